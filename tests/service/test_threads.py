"""Threads run calls in their order, and drop cancelled ones."""

import asyncio
import threading

import pytest

from graphstash_server.threads import Threads

pytestmark = pytest.mark.anyio


async def test_concurrent_calls_get_threads_up_to_the_limit():
    both = threading.Barrier(2)
    names = []
    threads = Threads(2, name="test")

    def meet():
        both.wait()
        names.append(threading.current_thread().name)

    await asyncio.gather(*(threads.call(meet) for _ in range(6)))
    await threads.close()
    assert len(names) == 6
    assert set(names) == {"test-0", "test-1"}


async def test_call_cancelled_before_its_turn_never_runs():
    may_end = threading.Event()
    ran = []
    threads = Threads(1, name="test")
    first = threads.call(may_end.wait)
    dropped = threads.call(lambda: ran.append("dropped"))
    last = threads.call(lambda: ran.append("last"))
    dropped.cancel()
    may_end.set()
    await asyncio.gather(first, last)
    await threads.close()
    assert ran == ["last"]


async def test_close_finishes_earlier_calls_and_then_ends_each_thread():
    done = []
    threads = Threads(1, name="test", when_ended=lambda: done.append("ended"))
    calls = [threads.call(lambda number=number: done.append(number)) for number in range(3)]
    await threads.close()
    assert done == [0, 1, 2, "ended"]
    await asyncio.gather(*calls)


async def test_call_during_close_runs_and_takes_no_end_of_another_thread():
    may_end = threading.Event()
    threads = Threads(1, name="test")
    first = threads.call(may_end.wait)
    closing = asyncio.create_task(threads.close())
    await asyncio.sleep(0)  # until `close` waits for the thread
    found = await threads.call(lambda: 7)
    may_end.set()
    await closing
    assert found == 7
    assert await first
    await threads.close()
