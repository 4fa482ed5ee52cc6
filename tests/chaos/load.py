"""Mixed load from several threads; every answer is held against the model."""

import functools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import httpx

from chaos.caller import TIMEOUT_SECONDS, WINDOW, Caller
from chaos.cluster import KEEP, TIGHT, TIGHT_BYTES
from chaos.damage import LONG_BYTES
from chaos.model import Budgeted, Grants, Permanent, ViolationError
from graphstash_schema import Digest

_PAUSE_SECONDS = 0.02
"""Mean time between two operations of a thread: the servers need the processor more."""

_LARGEST_BYTES = 3_000_000


class _Content(NamedTuple):
    name: str
    size_bytes: int

    @property
    def blob(self):
        return _blob_of(self)


@functools.lru_cache(maxsize=100)
def _blob_of(content):
    return random.Random(content.name).randbytes(content.size_bytes)


class Load:
    """Runs from `start` to `stop`.

    Attributes:
        counts: answers, by call and status; what was no answer by the kind of its failure.
        struck: number of requests that met a damage, by its kind.
        newest: number of the newest key of the permanent namespace.
        failures: what broke a promise, or the test itself.
        flipped_since: whether bits were flipped behind the servers after a time.
    """

    def __init__(
        self,
        url_of: Callable[[int], str],
        *,
        seed: str,
        threads: int,
        flipped_since: Callable[[float], bool],
    ) -> None:
        self.flipped_since = flipped_since
        self.permanent = Permanent()
        self.budgeted = Budgeted(TIGHT_BYTES)
        self.grants = Grants()
        self.counts: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.newest = WINDOW
        self.failures: list[BaseException] = []
        self._url_of = url_of
        self._seed = seed
        self._stopped = threading.Event()
        self._digests: dict[_Content, Digest] = {}
        self._contents: dict[str, _Content] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(threads)
        ]
        self._threads.append(threading.Thread(target=self._watch, daemon=True))

    def start(self):
        for thread in self._threads:
            thread.start()

    def stop(self):
        """Returns when every operation has ended."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_SECONDS)
            assert not thread.is_alive(), "an operation does not end"

    def check(self):
        """Raises the first failure."""
        if self.failures:
            raise self.failures[0]

    def _run(self, number):
        """The outermost frame of its thread."""
        pick = random.Random(f"{self._seed} thread {number}")
        try:
            with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False) as http:
                caller = Caller(self, http, pick, name=f"thread-{number}")
                while not self._stopped.is_set():
                    caller.act()
                    time.sleep(pick.random() * 2 * _PAUSE_SECONDS)
        except BaseException as error:
            self.failures.append(error)

    def _watch(self):
        """Looks at what is stored, all the time."""
        try:
            with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False) as http:
                number = 0
                while not self._stopped.wait(0.05):
                    number += 1
                    with suppress(httpx.TransportError):
                        self._see_stats(http.get(f"{self._url_of(number % 2)}/v1/stats"))
        except BaseException as error:
            self.failures.append(error)

    def _see_stats(self, answer):
        self.counts[f"stats {answer.status_code}"] += 1
        if answer.status_code == 503:
            return
        if answer.status_code != 200:
            raise ViolationError(f"GET /v1/stats was answered {answer.status_code}: {answer.text}")
        for row in answer.json()["namespaces"]:
            if row["namespace"] == TIGHT:
                self.budgeted.saw_size(row["size_bytes"])

    @property
    def operations(self):
        return self.counts.total()

    def content(self, namespace, number, variant):
        """What somebody puts under a key. Every third key of the passing namespace gets the bytes
        of a key of the permanent one that is being written just now.
        """
        name = f"{namespace} {number} {variant}"
        if number % 3 == 0:
            if namespace == TIGHT:
                number = (self.newest - WINDOW) // 3 * 3 + number % WINDOW // 3 * 3
            name = f"pair {number}"
        size = random.Random(f"size of {name}")
        kind = size.random()
        if kind < 0.05:
            name, size_bytes = "empty", 0
        elif kind < 0.55:
            size_bytes = size.randrange(1, 5_000)
        elif kind < 0.92:
            size_bytes = size.randrange(5_000, 300_000)
        else:
            size_bytes = size.randrange(300_000, _LARGEST_BYTES)
        return _Content(name, size_bytes)

    def is_long(self, namespace, number):
        """Whether the first variant of a key is long enough for a reader that leaves."""
        return self.content(namespace, number, 0).size_bytes > LONG_BYTES

    def blob(self, content):
        blob = content.blob
        digest = self._digests.get(content)
        if digest is None:
            digest = self._digests[content] = Digest.of(blob)
            self._contents[str(digest)] = content
        return blob, digest

    def made(self, digest):
        """The bytes of a digest."""
        return self._contents[digest].blob

    def url(self, number):
        return self._url_of(number)

    def model(self, namespace):
        return self.permanent if namespace == KEEP else self.budgeted
