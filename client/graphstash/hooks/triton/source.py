"""What a kernel takes from the modules around it, and Triton's key leaves out.

Triton compiles the values of globals into a kernel, and knows kernels by their text. Of the values,
its key has none in 3.3, and in 3.9 those of `constexpr` globals; in neither a type (`DTYPE =
tl.float16`), an attribute (`config.SIZE`), or the default of an argument of an inner function. Two
jobs that differ in nothing else would run each other's kernel.
"""

import ast
import inspect
from types import FrameType
from typing import Any

import triton.language as tl

__all__ = ["compiled_for", "source_being_compiled", "values_in"]


def source_being_compiled() -> Any:
    """What Triton's `compile` was given in this thread; None outside of it."""
    return _locals_of_compile().get("src")


def compiled_for() -> dict[str, str]:
    """The target and the options of what is compiled in this thread; empty outside of it."""
    found = _locals_of_compile()
    return {name: str(found[name]) for name in ("target", "options") if name in found}


def _locals_of_compile() -> dict[str, Any]:
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if (
            frame.f_code.co_name == "compile"
            and frame.f_globals.get("__name__") == "triton.compiler.compiler"
        ):
            return frame.f_locals
        frame = frame.f_back
    return {}


def values_in(source: Any) -> str:
    """The values that the functions of a source refer to, a line each; empty when there are none.

    More is named than is used: a parameter that hides a global does not hide it here.
    """
    constants = getattr(source, "constants", None) or {}
    given = (getattr(source, "fn", None), *constants.values())
    functions = [each for each in given if _is_theirs(each)]
    lines = []
    for number, function in enumerate(functions):  # which grows
        scope = {**function.__globals__, **inspect.getclosurevars(function.fn).nonlocals}
        for node in ast.walk(function.parse()):
            if not isinstance(node, ast.Name | ast.Attribute):
                continue
            value = _value_of(node, scope)
            functions += [
                each for each in _functions_in(value) if not any(each is one for one in functions)
            ]
            told = _told(value)
            if told is not None:
                lines.append(f"{number} {ast.unparse(node)} = {told}")
    return "\n".join(dict.fromkeys(lines))


def _value_of(node: ast.expr, scope: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value_of(node.value, scope), node.attr, None)
    return None


def _told(value: Any) -> str | None:
    """A value in words that are the same in every process; None for what no kernel is made of."""
    if isinstance(value, tl.constexpr):
        # A value without such words has its address in them: no other process will look it up.
        return f"constexpr {_told(value.value) or repr(value.value)}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_told(each) or repr(each) for each in value)}]"
    if isinstance(value, bool | int | float | str | bytes | tl.dtype):
        return repr(value)
    return str(value.cache_key) if _is_theirs(value) else None


def _functions_in(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [function for each in value for function in _functions_in(each)]
    inner = value.value if isinstance(value, tl.constexpr) else value
    return [inner] if _is_theirs(inner) else []


def _is_theirs(value: Any) -> bool:
    """Whether Triton compiles it, but did not bring it: its key has all that it brought."""
    return (
        hasattr(value, "cache_key")
        and hasattr(value, "parse")
        and not str(getattr(value, "__module__", "")).startswith("triton.")
    )
