"""A server, or a colleague, who lets a job wait for compilations that never end."""

import json
from itertools import cycle

import pytest

from graphstash_schema import LeaseReply, LeaseState
from support.hostile import Answer
from support.reader_job import OWN

_GRAPHS = 12
_POLL_SECONDS = 0.5
"""The client asks no more often, so the budget allows twice as many questions as it has seconds."""


@pytest.fixture
def job(victim, fort, space):
    """A job that may write, so that it asks for leases."""

    def start(**settings):
        settings = {"token": fort.token(f"write:{space}"), "read_only": False} | settings
        return victim(**settings)

    return start


def waits(box):
    """The requests that ask the server to wait."""
    return [
        each for each in box.to("/leases/", method="POST") if each.headers["prefer"] != "wait=0"
    ]


def build_all(job, key):
    for number in range(_GRAPHS):
        assert job.build(key(number)) == OWN


@pytest.fixture
def liar(middlebox):
    """A server that answers lease requests itself, from a list that goes round."""

    def make(replies):
        def change(request, answer):
            if answer is not None:
                return answer
            reply = next(replies)
            headers = {"content-type": "application/json", "graphstash-protocol": "1"}
            status = 202 if reply.state is LeaseState.HELD else 200
            return Answer(status, headers, reply.model_dump_json(exclude_none=True).encode())

        box = middlebox(change)
        ask = box.ask
        box.ask = lambda request: None if is_lease(request) else ask(request)
        return box

    return make


def is_lease(request):
    return "/leases/" in request.path and request.method == "POST"


def test_a_server_promises_what_it_does_not_have(liar, job, key):
    """`held`, then `ready`, and then there is nothing: such waits are in vain, too."""
    ready = LeaseReply(state=LeaseState.READY, digest="sha256:" + "0" * 64, size_bytes=1)
    held = LeaseReply(state=LeaseState.HELD, holder="h", expires_in_seconds=60)
    box = liar(cycle([held, ready, ready, ready]))
    waiting = job(url=box.url, wait_seconds=60)
    build_all(waiting, key)

    assert waiting.compiles == _GRAPHS
    assert len(waits(box)) == 3 * 3  # three waits, of three questions each


def test_a_writer_holds_the_lease_of_every_graph(fort, middlebox, job, key, space):
    """Under many names: it costs the documented total, and each graph is compiled."""
    attacker = fort.http(fort.token(f"write:{space}"))
    for number in range(_GRAPHS):
        lease = key(number).lease_path(space)
        body = {"holder": f"colleague {number}", "ttl_seconds": 300}
        assert attacker.post(lease, content=json.dumps(body)).status_code == 201

    box = middlebox()
    waiting = job(url=box.url, wait_seconds=1)
    build_all(waiting, key)

    assert waiting.compiles == _GRAPHS
    assert waiting.fallbacks["wait_budget"] == _GRAPHS
    assert 1 <= len(waits(box)) <= 1 / _POLL_SECONDS + 3  # a few waits, each ends with a question
    assert waiting.stats.published > 0  # whoever holds the lease keeps nobody from publishing
