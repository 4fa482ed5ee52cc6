"""Constraints between parameters, as text of which only arithmetic is evaluated."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from graphstash.tuning.space import SpaceError, Value

__all__ = ["Constraint"]

MAX_LENGTH: Final = 1000
"""Largest length of a constraint in characters."""

_ARITHMETIC: Final[dict[type[ast.AST], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Final[dict[type[ast.AST], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, values: value in values,
    ast.NotIn: lambda value, values: value not in values,
}

_MAX_NESTING: Final = 500

_Term: TypeAlias = Callable[[Mapping[str, Value]], Any]


class Constraint:
    """A condition such as "MWG % (MDIMC * VWM) == 0".

    It may use names of parameters, numbers, texts, + - * / // %, comparisons, `in (1, 2)`, and, or,
    not. If it divides by zero, it does not hold.

    Attributes:
        text: the given text.
        names: parameters used in it.

    Raises:
        SpaceError: the text is not such a condition.
    """

    def __init__(self, text: str) -> None:
        given: object = text  # may come from JSON
        if not isinstance(given, str) or len(given) > MAX_LENGTH:
            raise SpaceError(
                f"the constraint {str(text)[:60]!r} must be text, {MAX_LENGTH} characters at most"
            )
        self.text = text
        try:
            parsed = ast.parse(text.strip(), mode="eval").body
            _require_flat(parsed)
            self._term = self._built(parsed)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, SpaceError):
                raise
            raise SpaceError(f"the constraint {text!r} cannot be read: {error}") from error
        self.names = frozenset(node.id for node in ast.walk(parsed) if isinstance(node, ast.Name))
        if not self.names:
            raise SpaceError(f"the constraint {text!r} names no parameter")

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Return whether values of (at least) the parameters `names` satisfy the condition.

        Raises:
            SpaceError: the types of the values cannot be compared or computed with.
        """
        try:
            return bool(self._term(values))
        except ZeroDivisionError:
            return False
        except (TypeError, OverflowError, RecursionError) as error:
            used = {name: values[name] for name in sorted(self.names)}
            raise SpaceError(f"the constraint {self.text!r} fails for {used}: {error}") from error

    def _built(self, node: ast.expr) -> _Term:  # noqa: PLR0911 - one for each kind of node
        match node:
            case ast.Name(id=name):
                return lambda values: values[name]
            case ast.Constant(value=bool() | int() | float() | str() as constant):
                return lambda _: constant
            case ast.BoolOp(op=joined, values=nodes):
                terms = [self._built(each) for each in nodes]
                join = all if isinstance(joined, ast.And) else any
                return lambda values: join(term(values) for term in terms)
            case ast.UnaryOp(op=ast.Not() | ast.USub() as op, operand=operand):
                term = self._built(operand)
                if isinstance(op, ast.Not):
                    return lambda values: not term(values)
                return lambda values: -_number(term(values))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._arithmetic(left, _ARITHMETIC[type(op)], right)
            case ast.Compare() if all(type(op) in _COMPARISONS for op in node.ops):
                return self._comparison(node)
        raise SpaceError(
            f"the constraint {self.text!r} uses {ast.unparse(node)!r}: names of parameters, "
            "numbers, texts, + - * / // %, comparisons, in, and, or, not are what it may use"
        )

    def _arithmetic(
        self, left: ast.expr, compute: Callable[[Any, Any], Any], right: ast.expr
    ) -> _Term:
        first, second = self._built(left), self._built(right)
        return lambda values: compute(_number(first(values)), _number(second(values)))

    def _comparison(self, node: ast.Compare) -> _Term:
        operands = [node.left, *node.comparators]
        compares = [_COMPARISONS[type(op)] for op in node.ops]
        is_list = [False, *(isinstance(op, ast.In | ast.NotIn) for op in node.ops)]
        terms = [
            self._listed(each) if listed else self._built(each)
            for each, listed in zip(operands, is_list, strict=True)
        ]

        def compared(values: Mapping[str, Value]) -> bool:
            found = [term(values) for term in terms]
            return all(
                compare(a, b) for compare, a, b in zip(compares, found[:-1], found[1:], strict=True)
            )

        return compared

    def _listed(self, node: ast.expr) -> _Term:
        if not isinstance(node, ast.Tuple | ast.List):
            raise SpaceError(
                f"the constraint {self.text!r} needs a list such as (1, 2) after `in`, "
                f"not {ast.unparse(node)!r}"
            )
        terms = [self._built(each) for each in node.elts]
        return lambda values: [term(values) for term in terms]


def _require_flat(node: ast.AST) -> None:
    """Refuse deep nesting, independent of this process's recursion limit."""
    level = [node]
    for _ in range(_MAX_NESTING):
        level = [child for each in level for child in ast.iter_child_nodes(each)]
    if level:
        raise ValueError(f"it is nested in more than {_MAX_NESTING} levels")


def _number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value
