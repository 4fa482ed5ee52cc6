"""The team's memory in this process: what its session caches, and the ranks of its job."""

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
    """The memory of this process; None where the cache is off or has ended.

    Starts the cache, with the settings of `graphstash.install` or the environment.
    """
    cache = open_cache()
    return None if cache is None else _memory_of(cache)


@lru_cache(maxsize=1)
def _memory_of(cache: CompileCache) -> TeamMemory:
    return TeamMemory(cache, ranks=ranks_of_job)


def record_failure(consequence: str, error: Exception) -> None:
    """Counts that a kernel is tuned without the team, for a reason that nobody has foreseen.

    Never raises. The first such error is logged, all of them with their frames for debugging.
    """
    _log.debug(consequence, exc_info=error)
    try:
        if (cache := open_cache()) is not None:
            cache.record_fallback(CacheError(Reason.INTERNAL, f"{consequence}: {error!r}"))
    except Exception:  # noqa: BLE001 - the cache's outermost frame: training goes on
        _log.debug("counting it failed", exc_info=True)


def ranks_of_job(*, compiles_together: bool = False) -> RankStore | None:
    """What the ranks of this job share; None without `torch.distributed`, or with one rank.

    Args:
        compiles_together: see `RankStore`. A search of this package talks with no other rank.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return None
    from graphstash.hooks.inductor.ranks import ranks

    shared = ranks()
    return None if shared is None else _searching(shared, compiles_together)


@lru_cache(maxsize=2)
def _searching(ranks: RankStore, compiles_together: bool) -> "_Ranks":  # noqa: FBT001 - of a cache
    return _Ranks(ranks, compiles_together=compiles_together)


class _Ranks:
    """The ranks of a job, of which one searches, or all of them."""

    def __init__(self, ranks: RankStore, *, compiles_together: bool) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self.compiles_together = compiles_together
        self.claim = ranks.claim
        self.set = ranks.set
        self.wait = ranks.wait
        self.delete = ranks.delete
