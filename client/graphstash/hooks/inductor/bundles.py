"""Bundles: the fallback where torch has no place for a remote cache that the hook knows.

`torch.compiler.save_cache_artifacts` (public, 2.7 and newer) gives everything that a process
compiled or found as one blob, `load_cache_artifacts` fills torch's own directories from one. A
bundle has no key of its own, so the job's name (`GRAPHSTASH_JOB`) is its key; without a name there
are no bundles. It is loaded when the compiler is imported and saved when the job ends. What is
published is never replaced: a run that compiled something new adds a bundle, up to a limit.
"""

import logging
from typing import Any, Final

import torch

from graphstash._compile import CompileCache
from graphstash._errors import CacheError, Reason
from graphstash._exchange import Exchange
from graphstash.hooks.inductor.fingerprint import entry_key, entry_parts, toolchain
from graphstash_schema import ArtifactKind

__all__ = ["Bundles"]

_log = logging.getLogger("graphstash")

_BUNDLES: Final = 4
"""Bundles of one job."""

_LISTED: Final = ("inductor_artifacts", "aot_autograd_artifacts", "autotune_artifacts")
"""What counts as new. Profiles (`pgo_artifacts`) change with every run."""


class Bundles:
    """Loads and saves the bundles of one job; never raises.

    Args:
        cache: finds and publishes; its settings name the job.
    """

    def __init__(self, cache: CompileCache) -> None:
        self._known: set[str] = set()
        self._number = 0
        self.use(cache)

    def use(self, cache: CompileCache) -> None:
        """Goes on with another cache: a forked child has its own."""
        self._cache = cache
        self._exchange = Exchange(cache, toolchain=toolchain())

    def load(self) -> None:
        """Fills torch's directories with what earlier runs of this job compiled."""
        try:
            while self._number < _BUNDLES and self._load(self._number):
                self._number += 1
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: torch compiles
            _log.debug("loading a bundle failed", exc_info=True)
            self._cache.trouble(CacheError(Reason.INTERNAL, repr(error)))

    def save(self) -> None:
        """Publishes what this process compiled, if that is more than it had loaded."""
        try:
            if self._number < _BUNDLES:
                self._save()
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: the job ends well
            _log.debug("saving a bundle failed", exc_info=True)
            self._cache.trouble(CacheError(Reason.INTERNAL, repr(error)))
        self._exchange.close()

    def _load(self, number: int) -> bool:
        key = entry_key(ArtifactKind.INDUCTOR, self._name(), variant=number)
        bundle = self._exchange.get(key, lease=False)
        if bundle is None:
            return False
        info = torch.compiler.load_cache_artifacts(bundle)
        if info is None:
            self._exchange.reject(key, f"torch could not load the bundle {key}")
        else:
            self._known |= _names(info)
        return True

    def _save(self) -> None:
        saved = torch.compiler.save_cache_artifacts()
        if saved is None or not _names(saved[1]) - self._known:
            return
        name = self._name()
        self._exchange.put(
            entry_key(ArtifactKind.INDUCTOR, name, variant=self._number),
            saved[0],
            parts=entry_parts(name, variant=self._number),
        )

    def _name(self) -> str:
        return f"bundle {self._cache.config.job}"


def _names(info: Any) -> set[str]:
    return {f"{listed} {name}" for listed in _LISTED for name in getattr(info, listed, ())}
