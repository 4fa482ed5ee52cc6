"""Installs hooks when their compilers are imported.

Every Python process under `graphstash run` imports this module, which imports nothing heavy.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from graphstash.hooks.import_hook import after_import, is_imported, when_imported

if TYPE_CHECKING:
    from graphstash._compile.cache import CompileCache
    from graphstash.hooks.spec import Hook, HookSpec

__all__ = ["AUTOLOAD", "AUTOLOAD_OFF", "install", "install_when_needed"]

AUTOLOAD: Final = "GRAPHSTASH_AUTOLOAD"
"""Variable that `graphstash run` sets to 1, so that importing a compiler installs its hook."""

AUTOLOAD_OFF: Final = ("", "0")
"""Values that leave it off. A value other than these and 1 logs a warning."""


def install(name: str, cache: "CompileCache") -> "Hook | None":
    """Install one hook into its compiler, which must have been imported.

    Raises:
        ValueError: there is no such hook.
    """
    from graphstash.hooks.registry import hook_specs
    from graphstash.hooks.spec import load

    if (spec := hook_specs().get(name)) is None:
        raise ValueError(f"no hook {name!r}; there are: {', '.join(sorted(hook_specs()))}")
    return cast("Hook | None", load(spec.install)(cache))


def _load_and_call(function: str) -> None:
    from graphstash.hooks.spec import load

    load(function)()


def install_when_needed(
    specs: Iterable["HookSpec"],
    action: Callable[[str], None],
    *,
    on_begin: Callable[[str], None] = lambda _: None,
) -> None:
    """Call `action(hook name)` for each compiler: now if it is imported, otherwise on its import.

    `on_begin(hook name)` is called when such an import begins.
    """
    for spec in specs:
        for module, observe in spec.observers:
            after_import(module, partial(_load_and_call, observe))
        if any(map(is_imported, spec.modules)):
            action(spec.name)
        else:
            for module in spec.modules:
                when_imported(
                    module, partial(action, spec.name), on_begin=partial(on_begin, spec.name)
                )
