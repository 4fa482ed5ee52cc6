from graphstash._compile.stats import Counters, Stats
from graphstash.errors import Reason


def test_the_summary_is_one_readable_line():
    stats = Stats(hits_local=10, hits_remote=2, misses=1, saved_seconds=500.2)
    assert stats.summary() == "12 hits (10 local), 1 miss, 8 min 20 s of compiling saved"


def test_the_summary_names_waits_uploads_and_fallbacks_when_there_are_any():
    stats = Stats(
        hits_remote=1,
        misses=2,
        waits=1,
        published=2,
        saved_seconds=3.14,
        fallbacks={"timeout": 2, "connect": 1},
    )
    assert stats.summary() == (
        "1 hit, 2 misses, 1 wait, 2 published, 3 fallbacks (connect 1, timeout 2), "
        "3.1 s of compiling saved"
    )


def test_hours_are_told_in_hours():
    assert Stats(saved_seconds=7300).summary().endswith("2 h 1 min of compiling saved")


def test_counters_add_up_and_report_the_first_fallback_of_a_reason():
    counters = Counters()
    counters.add(hits_local=1, saved_seconds=1.5)
    counters.add(hits_local=2)
    assert counters.fallback(Reason.RESET)
    assert not counters.fallback(Reason.RESET)
    snapshot = counters.snapshot()
    assert (snapshot.hits_local, snapshot.saved_seconds) == (3, 1.5)
    assert snapshot.fallbacks == {"reset": 2}
