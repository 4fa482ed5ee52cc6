"""HookSpec: the description of a hook for the rest of graphstash.

A package declares one record per hook and registers it in the entry-point group `graphstash.hooks`,
under the hook's name. Every process that may import a compiler reads the record, so its module must
be cheap to import, and must not import the compiler.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from graphstash._compile.cache import CompileCache
    from graphstash.config import ClientConfig

__all__ = ["Hook", "HookSpec", "TestedVersions", "Verdict", "load"]


class Hook(Protocol):
    """An installed hook."""

    def close(self) -> None:
        """Remove the hook from its compiler, and finish or release what it started."""

    def after_fork(self, cache: "CompileCache") -> bool:
        """Continue in a forked child with its cache. Return False if the hook is inactive there."""


class TestedVersions(NamedTuple):
    """The versions of a distribution that a hook was tested with.

    Attributes:
        distribution: name of the distribution in a package index.
        oldest, newest: first and last release. (2, 7) contains 2.7.1.
        steps_aside_below, steps_aside_above: whether to refuse older or newer versions, instead of
            only warning.
    """

    distribution: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    steps_aside_below: bool
    steps_aside_above: bool

    def is_below(self, version: str) -> bool:
        """Return whether a version is older than all tested versions."""
        return _release_of(version)[: len(self.oldest)] < self.oldest

    def is_above(self, version: str) -> bool:
        """Return whether a version is newer than all tested versions."""
        return _release_of(version)[: len(self.newest)] > self.newest

    def covers(self, version: str) -> bool:
        """Return whether a version was tested, or lies between two tested versions."""
        return not self.is_below(version) and not self.is_above(version)

    def is_refused(self, version: str) -> bool:
        """Return whether the hook is not installed into a version."""
        return (self.steps_aside_below and self.is_below(version)) or (
            self.steps_aside_above and self.is_above(version)
        )

    def __str__(self) -> str:
        """The range as text: `2.7 to 2.15`, or `2.7`."""
        first, last = (".".join(map(str, bound)) for bound in (self.oldest, self.newest))
        return first if first == last else f"{first} to {last}"


class Verdict(NamedTuple):
    """What `graphstash doctor` reports about a hook.

    `finding` is a sentence without a full stop. `remedy` is empty if nothing is wrong.
    """

    finding: str
    remedy: str = ""


class HookSpec(NamedTuple):
    """Description of one hook.

    Functions are given as `module:function`, because their modules may import the compiler.

    Attributes:
        name: the name in `GRAPHSTASH_HOOKS` and of the entry point.
        compiler: the compiler's name in the documentation's table of compilers (Markdown).
        tested_with: versions of the compiler that tests use, for that table.
        modules: modules of the compiler. Importing any of them installs the hook.
        install: function that takes the `CompileCache` and returns a `Hook`, or None after a
            warning that gives the reason.
        distributions: distributions that contain the compiler. The hook is needed if one of them is
            installed.
        runtimes: further distributions whose versions change what is compiled.
        observers: modules, each with a function (without arguments) to call after its import, which
            may come long before the import of `modules`.
        tested: supported versions. None if no installed distribution has the compiler's version.
        requirement: argument of `pip install` that installs a supported version of the compiler.
        settings: settings that the hook reads, in lower case without the prefix `GRAPHSTASH_`.
        diagnose: function that takes the `ClientConfig` and returns a `Verdict` or None, and must
            not import the compiler. Without a verdict, `graphstash doctor` compares the versions.
    """

    name: str
    compiler: str
    tested_with: str
    modules: tuple[str, ...]
    install: str
    kinds: tuple[str, ...]
    distributions: tuple[str, ...]
    runtimes: tuple[str, ...] = ()
    observers: tuple[tuple[str, str], ...] = ()
    tested: TestedVersions | None = None
    requirement: str = ""
    settings: tuple[str, ...] = ()
    diagnose: str = ""

    def is_supported(self, version: str) -> bool:
        """Return whether to install the hook. Log a warning about an untested version."""
        if self.tested is None or self.tested.covers(version):
            return True
        import logging  # most processes never get here

        is_refused = self.tested.is_refused(version)
        logging.getLogger("graphstash").warning(
            "graphstash: the %s hook supports %s %s, not %s; the hook is not installed"
            if is_refused
            else "graphstash: the %s hook was tested with %s %s, not %s; it runs if it finds the "
            "internals it needs",
            self.name,
            self.tested.distribution,
            self.tested,
            version,
        )
        return not is_refused

    def judge(self, config: "ClientConfig") -> Verdict | None:
        """Return the result of `diagnose`, or None if the hook has no such function."""
        verdict: Verdict | None = load(self.diagnose)(config) if self.diagnose else None
        return verdict


def load(path: str) -> Callable[..., Any]:
    """Return the function that `module:function` names."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def _release_of(version: str) -> tuple[int, ...]:
    """The numbers of a version: `0.10.2.dev2026+g1` gives (0, 10, 2); no number gives ()."""
    import re  # most processes never get here

    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
