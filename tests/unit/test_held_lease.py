"""HeldLease renews a lease three times per lifetime, and sooner if the server is busy."""

import threading
from types import SimpleNamespace

import pytest

from graphstash._compile import in_flight
from graphstash.errors import BusyError, CacheError, LeaseLostError, Reason
from support.host import key

BUSY = BusyError("full", retry_after_seconds=2.0)
HASTY = BusyError("full", retry_after_seconds=0.0)
SLOW = BusyError("down", retry_after_seconds=900.0)
FAILED = CacheError(Reason.CONNECT, "refused")
LOST = LeaseLostError("lost", code=None, status=410)


class _Server:
    """A server that answers each renewal with the next error."""

    def __init__(self, *errors):
        self._errors = iter(errors)

    def renew(self, _key, _token):
        raise next(self._errors)


@pytest.mark.parametrize(
    ("errors", "seconds"),
    [
        ([LOST], [20]),
        ([FAILED, FAILED, LOST], [20, 20, 20]),
        ([BUSY, HASTY, SLOW, FAILED, LOST], [20, 2, 1, 20, 20]),
    ],
    ids=["lost", "failed", "busy"],
)
def test_pauses_between_renewals(errors, seconds, monkeypatch):
    pauses = []

    class Event(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            return False

    monkeypatch.setattr(
        in_flight, "threading", SimpleNamespace(Event=Event, Thread=threading.Thread)
    )
    lease = in_flight.HeldLease(
        _Server(*errors), key(), token="a", ttl_seconds=60, budget_seconds=600
    )
    lease.join(60)
    assert lease.is_over
    assert pauses == seconds
