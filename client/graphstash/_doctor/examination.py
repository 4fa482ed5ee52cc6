"""The examination: every topic in order; what depends on a failed one is not tried."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from graphstash._config import ClientConfig
from graphstash._doctor.access import check_access
from graphstash._doctor.compilers import check_compilers
from graphstash._doctor.findings import Finding, Topic, fail, skipped
from graphstash._doctor.local import check_local
from graphstash._doctor.probe import probe_hooks, probe_lease
from graphstash._doctor.server import check_server
from graphstash._doctor.settings import check_settings
from graphstash._doctor.signatures import check_signatures

__all__ = ["examine"]

_T = TypeVar("_T")

_NO_SETTINGS = "not tried: the settings cannot be used"
_NO_SERVER = "not tried: the server does not answer as it should"


def examine(
    environ: Mapping[str, str], options: Mapping[str, str | None], *, with_probe: bool = False
) -> Iterator[Finding]:
    """Looks at everything, and tells what it found as it goes.

    Args:
        environ: the environment of a job.
        options: settings that the command line gives; None leaves the environment's.
        with_probe: also start a Python that imports the compilers, and take a lease.
    """
    config = yield from _guarded("settings", check_settings(environ, options))
    if config is None:
        for name in ("server", "token", "local tier", "signatures", "compilers"):
            yield skipped(name, _NO_SETTINGS)
        return
    yield from _examine_server(config, with_probe=with_probe)
    yield from _guarded("local tier", _topic(check_local(config)))
    yield from _guarded("signatures", _topic(check_signatures(config)))
    yield from _guarded("compilers", _topic(check_compilers(config, environ)))
    if with_probe:
        yield from _guarded("import probe", _topic(probe_hooks(environ, options)))


def _examine_server(config: ClientConfig, *, with_probe: bool) -> Iterator[Finding]:
    way = yield from _guarded("server", check_server(config))
    if way is not None:
        yield from _guarded("token", check_access(config, way))
        if with_probe:
            yield from _guarded("write probe", _topic(probe_lease(config)))
        return
    yield skipped("token", _NO_SERVER)
    if with_probe:
        yield skipped("write probe", _NO_SERVER)


def _guarded(name: str, topic: Topic[_T]) -> Topic[_T | None]:
    """A topic's outermost frame: one that fails itself hides none of the others."""
    try:
        return (yield from topic)
    except Exception as error:  # noqa: BLE001 - see above
        yield fail(
            name,
            f"this check failed itself: {type(error).__name__}: {error}",
            "please report it; the lines below are independent of it",
        )
        return None


def _topic(findings: Iterator[Finding]) -> Topic[None]:
    yield from findings
