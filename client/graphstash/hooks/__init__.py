"""Hooks put the cache inside compilers; one module per compiler, the only importer of it.

A hook module offers `install(cache) -> Hook | None`: None means that it was not installed and has
logged why. No hook raises into a compiler, and none waits without a bound. This module imports no
compiler and nothing heavy: every Python process under `graphstash run` passes through it.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, cast

from graphstash.hooks.import_hook import is_imported, when_imported

if TYPE_CHECKING:
    from graphstash._compile.cache import CompileCache

__all__ = ["AUTOLOAD", "AUTOLOAD_OFF", "HOOKS", "Hook", "install", "install_when_needed"]

AUTOLOAD: Final = "GRAPHSTASH_AUTOLOAD"
"""Variable that is 1 in processes whose compilers get their hooks without a call, as under
`graphstash run`."""

AUTOLOAD_OFF: Final = ("", "0")
"""Its other values; any further one is a mistake, which does nothing either."""

HOOKS: Final[Mapping[str, tuple[str, ...]]] = {
    "torch_xla": ("torch_xla",),
    "pjrt": ("torch_xla", "jax"),
    "jax": ("jax",),
    "inductor": ("torch._inductor.compile_fx",),
    "triton": ("triton",),
}
"""For every hook, the modules of its compiler: the import of the first one installs it."""


class Hook(Protocol):
    """An installed hook."""

    def close(self) -> None:
        """Takes the hook out of its compiler and finishes or releases what it started."""

    def after_fork(self, cache: "CompileCache") -> bool:
        """Continues in a forked child with the child's cache; False when it does nothing there."""


def install(name: str, cache: "CompileCache") -> Hook | None:
    """Installs one hook into its compiler, which must have been imported.

    Raises:
        ValueError: there is no such hook.
    """
    if name not in HOOKS:
        raise ValueError(f"no hook {name!r}; there are: {', '.join(sorted(HOOKS))}")
    module = importlib.import_module(f"graphstash.hooks.{name}")
    return cast("Hook | None", module.install(cache))


def install_when_needed(
    names: Iterable[str],
    action: Callable[[str], None],
    *,
    begun: Callable[[str], None] = lambda _: None,
) -> None:
    """Calls `action(hook name)` now for every imported compiler, for the others on their import;
    `begun(hook name)` when that begins.
    """
    for name in names:
        modules = HOOKS.get(name, ())
        if not modules or any(map(is_imported, modules)):
            action(name)
        else:
            for module in modules:
                when_imported(module, partial(action, name), begun=partial(begun, name))
