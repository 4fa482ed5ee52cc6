"""An S3 proxy whose faults end: what hung is cut off when the fault is over."""

import math
import threading
import time
from contextlib import suppress
from enum import StrEnum

from support.s3_proxy import S3Fault, S3Proxy, Seen
from support.waiting import until


class Delay(StrEnum):
    """What `S3Fault` has not."""

    LOST_ANSWER = "the request is served and its answer lost"
    SLOW = "every request waits for a moment"


FAULTS = (
    S3Fault.FAILING,
    S3Fault.BUSY,
    S3Fault.FORBIDDEN,
    S3Fault.NO_BUCKET,
    S3Fault.STRANGER,
    S3Fault.RESET,
    S3Fault.HANG,
    S3Fault.CUT,
    S3Fault.CUT_BY_RESET,
    S3Fault.FLIP,
    S3Fault.FLIP_LENGTH,
    S3Fault.HOLD,
    *Delay,
)

_SLOW_SECONDS = 0.15


class ChaosProxy(S3Proxy):
    """Misbehaves from `begin` to `end`.

    Attributes:
        flipped_at: when a bit was last flipped, as the monotonic clock says.
    """

    def __init__(self, upstream_port):
        self.flipped_at = -math.inf
        self._calm = threading.Event()
        self._calm.set()
        self._lost = threading.local()
        super().__init__(upstream_port)

    def begin(self, fault, *, strikes):
        """Every request meets the fault from now on, if `strikes` says so."""
        self._calm.clear()
        self.strikes = strikes
        self.fault = fault

    def end(self):
        self.fault = S3Fault.NONE
        self._calm.set()

    def deliver(self):
        """Sends on what was held, and returns when all of it was answered."""
        self.resume.set()
        until(lambda: len(self.late) == self.held_count)

    def _note(self, seen: Seen):
        fault = super()._note(seen)
        self.seen.clear()
        if fault is S3Fault.NONE:
            return fault
        if fault in {S3Fault.FLIP, S3Fault.FLIP_LENGTH}:
            self.flipped_at = time.monotonic()
        self._lost.is_it = fault is Delay.LOST_ANSWER
        if not isinstance(fault, Delay):
            return fault
        self._count(fault)
        if fault is Delay.SLOW:
            time.sleep(_SLOW_SECONDS)
        return S3Fault.NONE

    def _hang(self):
        self._calm.wait()

    def _forward(self, connection, head, body, fault):
        if not getattr(self._lost, "is_it", False):
            super()._forward(connection, head, body, fault)
            return
        super()._forward(_Deaf(connection), head, body, fault)


class _Deaf:
    """A connection that takes no answer."""

    def __init__(self, connection):
        self._connection = connection

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def sendall(self, data):
        # The client would not send its body without it.
        if data.startswith(b"HTTP/1.1 100"):
            with suppress(OSError):
                self._connection.sendall(data)
