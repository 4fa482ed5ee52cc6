"""Requests from several threads while servers stop, die and start."""

import itertools
import secrets
import threading
from collections.abc import Mapping
from typing import Self

import httpx

from graphstash_schema import Digest
from support.waiting import until


class Load:
    """Threads that put, get and acquire leases until the `with` block ends.

    Attributes:
        answered: rounds in which every answer was right.
        failures: wrong answers of the other rounds.
        stored: artifacts whose PUT was acknowledged: path -> blob.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, puts: bool) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self.stored: dict[str, bytes] = {}
        self._url = url
        self._headers = headers
        self._puts = puts
        self._prefix = secrets.token_hex(8)  # keys are unique to this load
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(4)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for(self, count: int) -> None:
        """Wait for `count` more right rounds."""
        goal = self.answered + count
        until(lambda: self.answered >= goal)

    def _work(self, worker: int) -> None:
        with httpx.Client(
            base_url=self._url, headers=self._headers, timeout=60, trust_env=False
        ) as client:
            for number in itertools.count():
                if self._end.is_set():
                    return
                name = f"{self._prefix}{worker:016x}{number:032x}"
                try:
                    self._round(client, name)
                except (httpx.HTTPError, AssertionError) as error:
                    self.failures.append(repr(error))

    def _round(self, client: httpx.Client, name: str) -> None:
        path = f"/v1/load/artifacts/jax/cpu/{name}"
        blob = name.encode() * 500
        if self._puts:
            sent = client.put(
                path, content=blob, headers={"Repr-Digest": Digest.of(blob).repr_digest}
            )
            assert sent.status_code == 201, f"PUT {sent.status_code} {sent.text}"
            self.stored[path] = blob
            got = client.get(path)
            assert got.status_code == 200, f"GET {got.status_code} {got.text}"
            assert got.content == blob, "GET other bytes"
        else:
            got = client.get(path)
            assert got.status_code == 404, f"GET {got.status_code} {got.text}"
        lease = client.post(f"/v1/load/leases/jax/cpu/{name[::-1]}", json={"ttl_seconds": 1})
        assert lease.status_code in {200, 201, 202}, f"POST {lease.status_code} {lease.text}"
        self.answered += 1
