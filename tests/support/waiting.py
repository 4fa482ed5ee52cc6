"""Wait for an event that a test has caused and can observe."""

import time
from collections.abc import Callable
from typing import Final

import httpx

from graphstash import ClientConfig

PATIENT: Final = {"connect_seconds": 30, "first_byte_seconds": 30}
"""Timeouts for clients whose fallbacks a test counts. On a busy machine, an answer may take longer
than the defaults, 0.5 and 2 seconds."""

PATIENT_VARIABLES: Final = {
    f"GRAPHSTASH_{name.upper()}": str(seconds) for name, seconds in PATIENT.items()
}
"""The same settings for a process that a test starts."""


def variables_of(config: ClientConfig) -> dict[str, str]:
    """Return the environment of a process of the same host, server and namespace."""
    return PATIENT_VARIABLES | {
        "GRAPHSTASH_URL": config.url,
        "GRAPHSTASH_NAMESPACE": config.namespace,
        "GRAPHSTASH_CACHE_DIR": str(config.cache_dir),
    }


def until(holds: Callable[[], object], *, seconds: float = 300) -> None:
    """Wait until `holds()` is true. Fail after `seconds`.

    The pauses grow with the wait, because many callers ask a server.
    """
    start = time.monotonic()
    while not holds():
        waited = time.monotonic() - start
        assert waited < seconds, f"still false after {seconds} s"
        time.sleep(min(0.01 + waited / 10, 0.25))


def until_waiting(url: str, count: int = 1) -> None:
    """Wait until callers wait on a server that no other test uses meanwhile."""
    until(lambda: httpx.get(f"{url}/v1/stats", timeout=60).json()["waiters"] >= count)
