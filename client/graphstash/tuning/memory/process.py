"""Access to the team's tuning results, with the cache of this process and the ranks of its job."""

import logging
import sys
from functools import lru_cache

from graphstash._compile.cache import CompileCache
from graphstash._compile.ranks import RankStore
from graphstash._process.session import open_cache
from graphstash.errors import CacheError, Reason
from graphstash.tuning.memory.team import TeamMemory

__all__ = ["ranks_of_job", "record_failure", "team_memory"]

_log = logging.getLogger("graphstash")


def team_memory() -> TeamMemory | None:
    """Return the memory of this process, or None if the cache is off, has ended or cannot start.

    Starts the cache if necessary, with the settings of `graphstash.install` or the environment.
    """
    cache = open_cache()
    return None if cache is None else _memory_of(cache)


@lru_cache(maxsize=1)
def _memory_of(cache: CompileCache) -> TeamMemory:
    return TeamMemory(cache, ranks=ranks_of_job)


def record_failure(consequence: str, error: Exception) -> None:
    """Count an unexpected error in sharing tuning results. Never raises.

    The cache warns of the first error. All errors are logged at debug level with their tracebacks.
    """
    _log.debug(consequence, exc_info=error)
    try:
        if (cache := open_cache()) is not None:
            cache.record_fallback(CacheError(Reason.INTERNAL, f"{consequence}: {error!r}"))
    except Exception:  # noqa: BLE001 - the cache's outermost frame: training continues
        _log.debug("counting it failed", exc_info=True)


def ranks_of_job(*, compiles_together: bool = False) -> RankStore | None:
    """Return the store of this job's ranks, or None without `torch.distributed` or with one rank.

    Args:
        compiles_together: see `RankStore`. Default: False, because a search by graphstash needs no
            other rank.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return None
    from graphstash.hooks.inductor.ranks import ranks

    shared = ranks()
    return None if shared is None else _with_option(shared, compiles_together)


@lru_cache(maxsize=2)
def _with_option(ranks: RankStore, compiles_together: bool) -> "_Ranks":  # noqa: FBT001 - cache key
    return _Ranks(ranks, compiles_together=compiles_together)


class _Ranks:
    def __init__(self, ranks: RankStore, *, compiles_together: bool) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self.compiles_together = compiles_together
        self.claim = ranks.claim
        self.set = ranks.set
        self.wait = ranks.wait
        self.delete = ranks.delete
