"""Constraints between parameters: conditions in a small, safe subset of Python."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from graphstash.tuning.space import SpaceError, Value

__all__ = ["Constraint"]

MAX_LENGTH: Final = 1000
"""Maximum length of a constraint in characters."""

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

    It may use names of parameters, numbers, strings, + - * / // %, comparisons, `in (1, 2)`, and,
    or, not. A condition that divides by zero is false.

    Attributes:
        text: the condition.
        names: parameters in the condition.

    Raises:
        SpaceError: the text is not such a condition.
    """

    def __init__(self, text: str) -> None:
        given: object = text  # from JSON, it may have another type
        if not isinstance(given, str) or len(given) > MAX_LENGTH:
            raise SpaceError(
                f"the constraint {str(text)[:60]!r} must be text, {MAX_LENGTH} characters at most"
            )
        self.text = text
        try:
            parsed = ast.parse(text.strip(), mode="eval").body
            _limit_nesting(parsed)
            self._evaluate = self._compile(parsed)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, SpaceError):
                raise
            raise SpaceError(f"the constraint {text!r} cannot be read: {error}") from error
        self.names = frozenset(node.id for node in ast.walk(parsed) if isinstance(node, ast.Name))
        if not self.names:
            raise SpaceError(f"the constraint {text!r} names no parameter")

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Return whether values satisfy the condition. They must include the parameters `names`.

        Raises:
            SpaceError: the condition cannot be evaluated, because of a value's type or size.
        """
        try:
            return bool(self._evaluate(values))
        except ZeroDivisionError:
            return False
        except (TypeError, OverflowError, RecursionError) as error:
            used = {name: values[name] for name in sorted(self.names)}
            raise SpaceError(f"the constraint {self.text!r} fails for {used}: {error}") from error

    def _compile(self, node: ast.expr) -> _Term:  # noqa: PLR0911 - one return per kind of node
        match node:
            case ast.Name(id=name):
                return lambda values: values[name]
            case ast.Constant(value=bool() | int() | float() | str() as constant):
                return lambda _: constant
            case ast.BoolOp(op=joined, values=nodes):
                terms = [self._compile(each) for each in nodes]
                join = all if isinstance(joined, ast.And) else any
                return lambda values: join(term(values) for term in terms)
            case ast.UnaryOp(op=ast.Not() | ast.USub() as op, operand=operand):
                term = self._compile(operand)
                if isinstance(op, ast.Not):
                    return lambda values: not term(values)
                return lambda values: -_check_number(term(values))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._compile_arithmetic(left, _ARITHMETIC[type(op)], right)
            case ast.Compare() if all(type(op) in _COMPARISONS for op in node.ops):
                return self._compile_comparison(node)
        raise SpaceError(
            f"the constraint {self.text!r} uses {ast.unparse(node)!r}: names of parameters, "
            "numbers, texts, + - * / // %, comparisons, in, and, or, not are what it may use"
        )

    def _compile_arithmetic(
        self, left: ast.expr, compute: Callable[[Any, Any], Any], right: ast.expr
    ) -> _Term:
        first, second = self._compile(left), self._compile(right)
        return lambda values: compute(_check_number(first(values)), _check_number(second(values)))

    def _compile_comparison(self, node: ast.Compare) -> _Term:
        operands = [node.left, *node.comparators]
        compares = [_COMPARISONS[type(op)] for op in node.ops]
        is_list = [False, *(isinstance(op, ast.In | ast.NotIn) for op in node.ops)]
        terms = [
            self._compile_list(each) if listed else self._compile(each)
            for each, listed in zip(operands, is_list, strict=True)
        ]

        def compare_all(values: Mapping[str, Value]) -> bool:
            found = [term(values) for term in terms]
            return all(
                compare(a, b) for compare, a, b in zip(compares, found[:-1], found[1:], strict=True)
            )

        return compare_all

    def _compile_list(self, node: ast.expr) -> _Term:
        if not isinstance(node, ast.Tuple | ast.List):
            raise SpaceError(
                f"the constraint {self.text!r} needs a list such as (1, 2) after `in`, "
                f"not {ast.unparse(node)!r}"
            )
        terms = [self._compile(each) for each in node.elts]
        return lambda values: [term(values) for term in terms]


def _limit_nesting(node: ast.AST) -> None:
    """Raise at a fixed depth of nesting, because the recursion limit differs between processes."""
    level = [node]
    for _ in range(_MAX_NESTING):
        level = [child for each in level for child in ast.iter_child_nodes(each)]
    if level:
        raise ValueError(f"it is nested in more than {_MAX_NESTING} levels")


def _check_number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value
