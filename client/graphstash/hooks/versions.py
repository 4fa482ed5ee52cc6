"""Which versions of its compiler each hook was tested with, and what it does with others.

Known without an import of a compiler: `graphstash doctor` reads it on hosts where none may start.
The pjrt hook is not here: it depends on the version of an interface, which a plug-in reports when
it is loaded (`pjrt/abi.py`).
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["TRIED", "TriedVersions", "is_supported", "release_of"]

_log = logging.getLogger("graphstash")


@dataclass(frozen=True, slots=True)
class TriedVersions:
    """The versions of one distribution that one hook was tested with.

    Attributes:
        distribution: as a package index names it.
        oldest: first release; as many numbers as count.
        newest: last release, likewise: (2, 15) holds 2.15.3.
        steps_aside_below: the hook is not installed before `oldest`; else it warns and is.
        steps_aside_above: the same after `newest`.
    """

    distribution: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    steps_aside_below: bool
    steps_aside_above: bool

    def is_below(self, version: str) -> bool:
        """Whether a version is older than all tested ones."""
        return release_of(version)[: len(self.oldest)] < self.oldest

    def is_above(self, version: str) -> bool:
        """Whether a version is newer than all tested ones."""
        return release_of(version)[: len(self.newest)] > self.newest

    def covers(self, version: str) -> bool:
        """Whether a version was tested, or lies between two that were."""
        return not self.is_below(version) and not self.is_above(version)

    def is_refused(self, version: str) -> bool:
        """Whether the hook is not installed into a version."""
        return (self.steps_aside_below and self.is_below(version)) or (
            self.steps_aside_above and self.is_above(version)
        )

    def __str__(self) -> str:
        """The range for people: `2.6 to 2.15`, or `2.7`."""
        first, last = (".".join(map(str, bound)) for bound in (self.oldest, self.newest))
        return first if first == last else f"{first} to {last}"


TRIED: Final[Mapping[str, TriedVersions]] = {
    # 2.8 and newer write files into their cache that they cannot load (pytorch/xla#9094).
    "torch_xla": TriedVersions(
        "torch_xla", (2, 7), (2, 7), steps_aside_below=True, steps_aside_above=True
    ),
    # First and last version with tests; what the hook needs was read in 0.4.25 to 0.12.0.
    "jax": TriedVersions(
        "jax", (0, 4, 31), (0, 10, 2), steps_aside_below=False, steps_aside_above=False
    ),
    # With 2.7 and 2.15; the names are the same in between and in 2.6.
    "inductor": TriedVersions(
        "torch", (2, 6), (2, 15), steps_aside_below=True, steps_aside_above=False
    ),
    # Their seams are the same two; run with 3.3, 3.5 and 3.9.
    "triton": TriedVersions(
        "triton", (3, 0), (3, 9), steps_aside_below=True, steps_aside_above=True
    ),
}
"""By hook."""


def is_supported(hook: str, version: str) -> bool:
    """Whether a hook is to be installed; logs a warning about a version that was not tested."""
    tested = TRIED[hook]
    if tested.is_refused(version):
        _log.warning(
            "graphstash: the %s hook supports %s %s, not %s; the hook is not installed",
            hook,
            tested.distribution,
            tested,
            version,
        )
        return False
    if not tested.covers(version):
        _log.warning(
            "graphstash: the %s hook was tested with %s %s, not %s; it runs if it finds the "
            "internals it needs",
            hook,
            tested.distribution,
            tested,
            version,
        )
    return True


_RELEASE: Final = re.compile(r"\d+(\.\d+)*")


def release_of(version: str) -> tuple[int, ...]:
    """The numbers of a version: `0.10.2.dev2026+g1` gives (0, 10, 2); no number gives ()."""
    found = _RELEASE.match(version)
    return tuple(map(int, found[0].split("."))) if found else ()
