"""Uploads to a namespace that nobody else uses, through a server that nothing is done to.

What they wait for is the fault of another server, or of the machine: a test that ran beside this
one decides nothing, so the report has the times and no test asserts them.
"""

import itertools
import os
import time

import httpx

from chaos.caller import TIMEOUT_SECONDS, artifact_path
from graphstash_schema import ArtifactMetadata, Digest

__all__ = ["STALL_SECONDS", "Bystander"]

STALL_SECONDS = 2.0
"""What a frozen server may cost another namespace."""

_BYTES = 20_000
_METADATA = ArtifactMetadata(compile_seconds=1, raw_size_bytes=_BYTES, toolchain="chaos")


class Bystander:
    """Has the answer and the time of every upload.

    Attributes:
        seconds: of each upload that was answered 201.
        others: what the rest was answered.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.others: list[str] = []
        self._numbers = itertools.count()

    def upload(self, url: str, seconds: float) -> None:
        """Uploads one after the other for so long, or until the one that is under way has ended."""
        deadline = time.monotonic() + seconds
        with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False) as http:
            while (began := time.monotonic()) < deadline:
                answered = self._put(http, url)
                if answered == "201":
                    self.seconds.append(time.monotonic() - began)
                else:
                    self.others.append(answered)

    @property
    def stalls(self) -> int:
        """Uploads that took longer than they may."""
        return sum(each > STALL_SECONDS for each in self.seconds)

    def _put(self, http, url):
        blob = os.urandom(_BYTES)
        headers = {
            "Repr-Digest": Digest.of(blob).repr_digest,
            "Graphstash-Metadata": _METADATA.to_header(),
        }
        path = artifact_path("bystander", next(self._numbers))
        try:
            answer = http.put(url + path, content=blob, headers=headers)
        except httpx.TransportError as error:
            return type(error).__name__
        return str(answer.status_code)
