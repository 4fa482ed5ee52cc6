"""The values that a kernel reads from the surrounding modules, and that Triton's key omits.

Triton compiles the values of globals into a kernel. Its key lacks them in 3.3, and all but those of
`constexpr` globals in 3.9. Both keys lack types (`DTYPE = tl.float16`), attributes (`config.SIZE`),
defaults of inner functions, and values that a `constexpr_function` reads. Two jobs that differ only
there would run each other's kernel. A kernel whose values cannot be described is not shared.
"""

import inspect
import os
import re
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import Any, Final

import triton

from graphstash.errors import CacheError, Reason
from graphstash.hooks.code import CodeDescriber, UndescribableError
from graphstash.hooks.triton.replaced import changed_in_place, replaced_members

__all__ = [
    "compiled_for",
    "options_being_compiled",
    "replacements",
    "settings_of",
    "source_being_compiled",
    "target_being_compiled",
    "values_in",
]

_KNOBS: Final = ("amd", "compilation", "language", "nvidia", "runtime")
"""Groups of Triton's settings that its compilers read (3.4 and newer)."""

_FOREIGN_CODE: Final = ("override", "swap_mir")
"""Settings that add the user's files to the compilation."""

_OBSERVERS: Final = re.compile(r"listener|jit_(cache|post_compile)_hook|(launch|kernel)_\w+_hook")
"""Settings that Triton calls around a compilation or a launch. They change no kernel."""

_TARGET_INFO: Final = "triton.language.target_info"
"""Module whose functions a kernel may call while Triton compiles it (3.4 and newer). They return
facts about the GPU of this process, even if Triton compiles for another one."""


class _Describer(CodeDescriber):
    def __init__(self) -> None:
        super().__init__("triton")

    def special(self, value: Any) -> str | None:
        if (type(value).__module__, type(value).__name__) == ("torch", "dtype"):
            return repr(value)
        if type(value).__module__ == "triton.knobs":  # it reads variables
            read = {each.key: os.environ.get(each.key) for each in _knobs_of(value).values()}
            return f"{type(value).__name__} {self.describe((vars(value), read))}"
        function = getattr(value, "__dict__", {}).get("fn", value)  # of a constexpr function
        if isinstance(function, FunctionType) and function.__module__ == _TARGET_INFO:
            active = function.__globals__["current_target"]()
            return f"{_TARGET_INFO}.{function.__name__} on {active}"
        if isinstance(value, BuiltinFunctionType) and self._may_read_state(value):
            raise UndescribableError(f"{value.__module__}.{value.__name__} may read settings")
        return None

    def _may_read_state(self, function: BuiltinFunctionType) -> bool:
        """Return whether compiled code of another package may return different values, as
        `torch.get_num_threads` does.
        """
        root = (function.__module__ or "builtins").partition(".")[0]
        return not (self.is_known(root) or root == "numpy" or root in sys.stdlib_module_names)


def source_being_compiled() -> Any:
    """Return the source that Triton compiles in this thread, or None."""
    return _locals_of_compile().get("src")


def target_being_compiled() -> Any:
    """Return the GPU for which Triton compiles in this thread, or None."""
    return _locals_of_compile().get("target")


def options_being_compiled() -> Any:
    """Return the options with which Triton compiles in this thread, or None."""
    return _locals_of_compile().get("options")


def compiled_for() -> dict[str, str]:
    """Return target and options of Triton's compilation in this thread, or an empty dict."""
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
    """Describe the values that the functions of a source read. Empty without functions.

    Raises:
        CacheError: the source is unknown, or a value cannot be described.
    """
    if source is None:
        raise _unshared("what Triton compiles is not known")
    function = getattr(source, "fn", None)
    describer = _Describer()
    kind = type(source)
    try:
        own = "" if describer.is_known(kind.__module__) else describer.describe(kind)
        if not hasattr(function, "cache_key"):  # IR or assembly, whose text is in Triton's key
            return own
        signature = [*map(_fields, source.signature.values())]
        constants = describer.describe(dict(getattr(source, "constants", None) or {}))
        return f"{own} {signature} {constants} {describer.describe(function)}"
    except (UndescribableError, RecursionError) as error:
        raise _unshared(str(error)) from error


def _fields(kind: Any) -> Any:
    """Return a type in a signature. Of a named tuple, whose text may be any, return the fields."""
    if not isinstance(kind, tuple):
        return str(kind)
    return getattr(kind, "_fields", ()), *map(_fields, kind)


def replacements() -> str:
    """Describe what the program replaced or added inside Triton.

    Raises:
        CacheError: a replacement cannot be described, or a table or function was changed in place.
    """
    if place := changed_in_place():
        raise _unshared(f"the program has changed {place}")
    describer = _Describer()
    try:
        return "\n".join(f"{at}={describer.registered(held)}" for at, held in replaced_members())
    except (UndescribableError, RecursionError) as error:
        raise _unshared(f"inside Triton, {error}") from error


def settings_of(environ: Mapping[str, str]) -> str:
    """Describe the settings that a program has made in code and the environment lacks.

    Triton writes most settings into the environment. A program may disable that, or change the
    variable later, which does not change the setting.

    Raises:
        CacheError: a setting is code without a description, or adds the user's files.
    """
    knobs = getattr(triton, "knobs", None)
    settings = []
    for group in _KNOBS:
        held = getattr(knobs, group, None)
        for name, value in sorted(vars(held).items()) if held is not None else ():
            variable = getattr(_knobs_of(held).get(name), "key", "")
            if name in _FOREIGN_CODE and value:
                raise _unshared(f"{group}.{name} is set")
            if type(value) in (bool, int, str, type(None)):
                if not _matches(environ.get(variable), value):
                    settings.append(f"{group}.{name}={value!r}")
            elif not _OBSERVERS.fullmatch(name):
                try:
                    settings.append(f"{name}={_Describer().registered(value)}")
                except (UndescribableError, RecursionError) as error:
                    raise _unshared(str(error)) from error
    return "\n".join(settings)


def _knobs_of(group: Any) -> Mapping[str, Any]:
    """Return the settings of a group by name; each has the name of a variable as `key`."""
    return {name: each for name, each in vars(type(group)).items() if hasattr(each, "key")}


def _matches(variable: str | None, value: bool | str | None) -> bool:
    """Return whether a variable holds what Triton writes for a setting."""
    if type(value) is bool:
        return variable == ("1" if value else "0")
    return variable == (None if value is None else str(value))


def _unshared(why: str) -> CacheError:
    return CacheError(Reason.UNSHAREABLE, f"a kernel is not shared: {why}")
