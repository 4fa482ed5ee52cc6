"""The aggregator process of one rank, which starts and ends with the rank.

The process stops when its standard input is readable or closed. If the rank is killed, its forked
children may keep the pipe open, so the process also checks every second that its parent is alive.
Before it exits, it answers other ranks for up to two seconds.
"""

import contextlib
import json
import os
import secrets
import selectors
import subprocess
import sys
from typing import Final

from graphstash.training.reduce.aggregators.sockets import Address
from graphstash.training.reduce.aggregators.worker import AggregationError

__all__ = ["ColocatedAggregator"]

_MODULE: Final = "graphstash.training.reduce.aggregators"
_START_SECONDS: Final = 60.0
_END_SECONDS: Final = 5.0


class ColocatedAggregator:
    """Starts an aggregator process that listens on `host`, an address of this host.

    Attributes:
        address: Address on which the aggregator listens.
        secret: Random key for the seals.

    Raises:
        AggregationError: the process does not start; the message says why.
    """

    def __init__(self, host: str, *, rank: int) -> None:
        self.secret = secrets.token_bytes(32)
        listen = f"[{host}]:0" if ":" in host else f"{host}:0"
        # -P: a file in the job's working directory must not shadow a module.
        command = [sys.executable, "-P", "-m", _MODULE, "--listen", listen, "--owner", str(rank)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        greeting = {"secret": self.secret.hex(), "process": os.getpid()}
        try:
            self.address = self._started(json.dumps(greeting).encode() + b"\n")
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def has_ended(self) -> bool:
        """Whether the process has exited."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process. It still answers ranks that miss the last sums for up to 2 seconds."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(
                    b"end"
                )  # a forked child may hold the pipe open after close()
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _started(self, greeting: bytes) -> Address:
        assert self._process.stdin is not None  # noqa: S101 - both are pipes
        assert self._process.stdout is not None  # noqa: S101 - as above
        answer: dict[str, object] = {}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(greeting)
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if selector.select(_START_SECONDS):
                line = self._process.stdout.readline()
                try:
                    answer = json.loads(line or b"{}")
                except ValueError:  # something else was printed at Python's startup
                    answer["error"] = f"its first line is {line[:200]!r}"
        match answer:
            case {"address": [str(host), int(port)]}:
                return host, port
        raise AggregationError(
            f"the aggregator process did not start: {answer.get('error', 'it has said nothing')}"
        )
