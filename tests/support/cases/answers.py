"""A client of a hostile server, in a process of its own."""

import logging
import time
from collections.abc import Callable

from graphstash import ClientConfig
from graphstash._http.client import ServerClient
from graphstash.errors import CacheError
from graphstash_schema import ArtifactKey, ManifestName
from support.meter import forget_peak, kibibytes

_KEY = ArtifactKey.parse("jax", "cpu-x86_64", "0" * 64)
CALLS: dict[str, Callable[[ServerClient], object]] = {
    "manifest": lambda client: client.manifest(ManifestName("nightly")),
    "lookup": lambda client: client.lookup([_KEY]),
    "lease": lambda client: client.acquire(_KEY),
    "statistics": lambda client: client.server_stats(),
    "verify": lambda client: client.verify(_KEY),
    "problem": lambda client: client.manifest(ManifestName("nightly")),
}


def costs_of(*, url: str, calls: list[str]) -> list[tuple[str, int, float]]:
    """Return the outcome of each call, the growth of the process in KiB, and its CPU seconds."""
    costs = []
    # Each call has its own client, because a client stops after several failures.
    for call in calls:
        client = ServerClient(ClientConfig.load({}, url=url, first_byte_seconds=30))
        forget_peak()
        before, began = kibibytes("VmRSS"), time.process_time()
        try:
            CALLS[call](client)
            outcome = "answered"
        except CacheError as error:
            logging.getLogger("graphstash").warning("%s", error)
            outcome = str(error.reason)
        costs.append((outcome, kibibytes("VmHWM") - before, time.process_time() - began))
        client.close()
    return costs
