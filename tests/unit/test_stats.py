from dataclasses import replace

from graphstash._compile.stats import Counters, Stats
from graphstash.errors import Reason


def test_the_summary_is_one_readable_line():
    stats = Stats(hits_host=10, hits_server=2, misses=1, saved_compile_seconds=500.2)
    stats = replace(stats, saved_wall_seconds=125)
    assert stats.summary() == (
        "12 hits, 1 miss, 8 min 20 s of compiling saved (about 2 min 5 s of wall time); "
        "hits: 2 server, 10 this host"
    )


def test_the_summary_names_waits_uploads_and_fallbacks_when_there_are_any():
    stats = Stats(
        hits_server=1,
        misses=2,
        waits=1,
        published=2,
        saved_compile_seconds=3.14,
        saved_wall_seconds=2.0,
        fallbacks={"timeout": 2, "connect": 1},
    )
    assert stats.summary() == (
        "1 hit, 2 misses, 1 wait, 2 published, 3 fallbacks (connect 1, timeout 2), "
        "3.1 s of compiling saved (about 2.0 s of wall time); hits: 1 server"
    )


def test_hours_are_told_in_hours():
    stats = Stats(hits_ranks=1, saved_compile_seconds=7300, saved_wall_seconds=3600)
    assert "2 h 1 min of compiling saved (about 1 h 0 min of wall time)" in stats.summary()


def test_a_process_without_hits_says_nothing_of_savings():
    assert Stats(misses=2, published=2).summary() == "0 hits, 2 misses, 2 published"


def test_counters_add_up_and_report_the_first_fallback_of_a_reason():
    counters = Counters()
    counters.add(hits_host=1, wait_seconds=1.5)
    counters.add(hits_host=2)
    assert counters.fallback(Reason.RESET)
    assert not counters.fallback(Reason.RESET)
    snapshot = counters.snapshot()
    assert (snapshot.hits_host, snapshot.wait_seconds) == (3, 1.5)
    assert snapshot.fallbacks == {"reset": 2}
