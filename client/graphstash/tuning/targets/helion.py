"""The team as Helion's remote cache: what one job has tuned, others take.

    export HELION_AUTOTUNE_CACHE=RemoteAutotuneCache
    export HELION_REMOTE_CACHE_BACKEND=graphstash.tuning.targets.helion.TeamBackend

Helion makes the key, of the kernel's source, its arguments, the device and what can be tuned; this
adds Helion's version, because another one may refuse the configuration. What is stored is Helion's
own JSON. It is handed over only if it is what Helion can read, and what its kernel can be given:
Helion looks no further, and would end the job. Helion itself checks the result of each
configuration that it measures, before it stores the best one (`autotune_accuracy_check`, on by
default).
"""

import json
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from importlib.metadata import version
from itertools import islice
from typing import Any, Final

from helion.autotuner.local_cache import SavedBestConfig, parse_cache_entry
from helion.autotuner.remote_cache import (
    RemoteAutotuneCache,
    RemoteCacheBackend,
    StrictRemoteAutotuneCache,
)

from graphstash._compile.cache import CompileCache
from graphstash._compile.request import CompileRequest
from graphstash._compile.two_call import TwoCallCache
from graphstash._process.session import open_cache
from graphstash.errors import CacheError, Reason
from graphstash.hooks.labels import user_line
from graphstash.hooks.patching import Patches
from graphstash.tuning.memory.problem import HELION_LABEL
from graphstash.tuning.memory.process import ranks_of_job, record_failure
from graphstash.tuning.targets.torch_device import accelerator, device_type_of
from graphstash_schema import ArtifactKind
from graphstash_schema.listing import ArtifactQuery, ListOrder

__all__ = ["TeamBackend"]

_MAX_BYTES: Final = 256 * 1024

_MAX_LISTED: Final = 32
"""What a search begins with is downloaded one by one."""


class TeamBackend(RemoteCacheBackend):  # type: ignore[misc] # the package may be absent
    """What Helion's remote caches read and write; never raises.

    While one host tunes a kernel, others wait for it, as long as a job may wait at all. The ranks
    of a job get the same answer; where there is none, each of them tunes, because Helion may make
    them do so together.
    """

    def get(self, key: str) -> str | None:
        """What was stored under a key of Helion's; None for nothing that it can use."""
        try:
            cache = open_cache()
            if cache is None:
                return None
            request, exchange = _request(key), _exchange_of(cache)
            payload = exchange.get(request, ranks=ranks_of_job(compiles_together=True))
            if payload is None:
                return None
            if (problem := _problem(payload)) is not None:
                exchange.reject(request.key, f"{request.key} is no entry of Helion's: {problem}")
                return None
            return payload.decode()
        except Exception as error:  # noqa: BLE001 - the cache's outermost frame: training goes on
            record_failure("what the team has tuned was not looked up", error)
            return None

    def reject(self, key: str, problem: str) -> None:
        """Counts that an entry is of no use here; it is not taken again."""
        try:
            if (cache := open_cache()) is not None:
                name = _request(key).key
                _exchange_of(cache).reject(name, f"{name} does not fit its kernel: {problem}")
        except Exception as error:  # noqa: BLE001 - as above
            record_failure("what the team has tuned was not rejected", error)

    def put(self, key: str, data: str) -> None:
        """Publishes an entry in the background. What is there already stays."""
        try:
            if (cache := open_cache()) is not None:
                _exchange_of(cache).put(_request(key), data.encode())
        except Exception as error:  # noqa: BLE001 - as above
            record_failure("what was tuned was not published", error)

    def list(self, max_results: int | None = None) -> Iterator[str]:
        """Entries for devices of this kind, the newest first; at most 32.

        Args:
            max_results: how many; None for as many as there are.
        """
        try:
            cache = open_cache()
            yield from () if cache is None else islice(_listed(cache), max_results)
        except Exception as error:  # noqa: BLE001 - as above
            record_failure("what the team has tuned was not listed", error)


def _fitting(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Takes the place of `get` in Helion's caches, which know the kernel; the backend does not."""

    @wraps(get)
    def found_that_fits(cache: Any) -> Any:
        backend = getattr(cache, "_backend", None)
        if not isinstance(backend, TeamBackend):
            return get(cache)
        try:
            config = get(cache)
            check = getattr(cache.autotuner.config_spec, "normalized_config", None)
            if config is not None and check is not None:
                check(config)
        except Exception as error:  # noqa: BLE001 - of Helion, at what others wrote: it tunes
            backend.reject(cache.key.stable_hash(), str(error) or repr(error))
            return None
        return config

    return found_that_fits


for _cache in (RemoteAutotuneCache, StrictRemoteAutotuneCache):
    Patches().wrap(_cache, "get", _fitting)


def _listed(cache: CompileCache) -> Iterator[str]:
    """What Helion can read of the newest entries."""
    server = cache.stash.server
    if not server.is_known:
        return
    query = ArtifactQuery(
        kind=ArtifactKind.SCHEDULE,
        label=HELION_LABEL,
        device_type=device_type_of(accelerator()),
        order=ListOrder.NEWEST,
        limit=_MAX_LISTED,
    )
    try:
        found = server.list_artifacts(query).artifacts
    except CacheError as error:
        cache.record_fallback(error)
        return
    for each in found:
        pack = cache.fetch_pack(each.key, max_bytes=_MAX_BYTES)
        if pack is None or pack.payload is None:
            continue
        if (problem := _problem(pack.payload)) is None:
            yield pack.payload.decode()
        else:
            cache.record_fallback(CacheError(Reason.CORRUPT, f"{each.key}: {problem}"))


def _request(key: str) -> CompileRequest:
    release = version("helion")
    return CompileRequest.of(
        ArtifactKind.SCHEDULE,
        device_type_of(accelerator()),
        {"helion": release, "name": key},
        toolchain=f"helion {release}",
        label=f"{HELION_LABEL} {user_line()}".strip(),
        max_bytes=_MAX_BYTES,
    )


@lru_cache(maxsize=1)
def _exchange_of(cache: CompileCache) -> TwoCallCache:
    """Of all backends of this process: Helion makes one for each kernel."""
    return TwoCallCache(cache)


def _problem(payload: bytes) -> str | None:
    """Why Helion would raise at this entry, or take something else from it than a configuration."""
    try:
        entry: SavedBestConfig = parse_cache_entry(payload.decode())
        record: Any = json.loads(payload)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        return str(error) or repr(error)
    is_whole = isinstance(record["config"], str) and bool(entry.config.config)
    return None if is_whole else "it has no configuration"
