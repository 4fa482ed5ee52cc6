"""The team as Helion's remote cache: one job tunes a kernel, and others reuse the result.

    export HELION_AUTOTUNE_CACHE=RemoteAutotuneCache
    export HELION_REMOTE_CACHE_BACKEND=graphstash.tuning.targets.helion.TeamBackend

Helion computes the key from the kernel's source, its arguments, the device and the tunable
parameters. This module adds Helion's version, since another version may reject the configuration.
The stored value is Helion's own JSON. This module returns an entry only if Helion can parse it and
the kernel accepts it, because Helion would end the job on any other entry. Before Helion stores the
best configuration, it checks its results (`autotune_accuracy_check`, on by default).
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
"""Maximum listed entries, the starting points of a search. They are downloaded one by one."""


class TeamBackend(RemoteCacheBackend):  # type: ignore[misc] # the package may be absent
    """The backend of Helion's remote caches; never raises.

    While one host tunes a kernel, other jobs wait for it within their `WaitBudget`. All ranks of a
    job get the same entry. If there is none, all ranks tune, because Helion may tune on all ranks
    together.
    """

    def get(self, key: str) -> str | None:
        """Return the entry of a Helion key, or None if there is no usable entry."""
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
        except Exception as error:  # noqa: BLE001 - the cache's outermost frame: training continues
            record_failure("what the team has tuned was not looked up", error)
            return None

    def reject(self, key: str, problem: str) -> None:
        """Count an entry as unusable, and delete this host's copy."""
        try:
            if (cache := open_cache()) is not None:
                name = _request(key).key
                _exchange_of(cache).reject(name, f"{name} does not fit its kernel: {problem}")
        except Exception as error:  # noqa: BLE001 - as above
            record_failure("what the team has tuned was not rejected", error)

    def put(self, key: str, data: str) -> None:
        """Publish an entry in the background; an existing entry stays."""
        try:
            if (cache := open_cache()) is not None:
                _exchange_of(cache).put(_request(key), data.encode())
        except Exception as error:  # noqa: BLE001 - as above
            record_failure("what was tuned was not published", error)

    def list(self, max_results: int | None = None) -> Iterator[str]:
        """Yield at most `max_results` and 32 entries for this device type, newest first."""
        try:
            cache = open_cache()
            yield from () if cache is None else islice(_fetch_listed(cache), max_results)
        except Exception as error:  # noqa: BLE001 - as above
            record_failure("what the team has tuned was not listed", error)


def _wrap_get(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a Helion cache's `get` to reject entries that its kernel, known only here, refuses."""

    @wraps(get)
    def get_if_valid(cache: Any) -> Any:
        backend = getattr(cache, "_backend", None)
        if not isinstance(backend, TeamBackend):
            return get(cache)
        try:
            config = get(cache)
            check = getattr(cache.autotuner.config_spec, "normalized_config", None)
            if config is not None and check is not None:
                check(config)
        except Exception as error:  # noqa: BLE001 - a peer's entry may cause any: tune instead
            backend.reject(cache.key.stable_hash(), str(error) or repr(error))
            return None
        return config

    return get_if_valid


for _cache in (RemoteAutotuneCache, StrictRemoteAutotuneCache):
    Patches().wrap(_cache, "get", _wrap_get)


def _fetch_listed(cache: CompileCache) -> Iterator[str]:
    server = cache.stash.server
    if not server.is_configured:
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
    """Return the exchange of this process, since Helion creates a backend per kernel."""
    return TwoCallCache(cache)


def _problem(payload: bytes) -> str | None:
    """Return why Helion could not read a configuration from this entry, or None if it can."""
    try:
        entry: SavedBestConfig = parse_cache_entry(payload.decode())
        record: Any = json.loads(payload)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        return str(error) or repr(error)
    is_whole = isinstance(record["config"], str) and bool(entry.config.config)
    return None if is_whole else "it has no configuration"
