from dataclasses import replace

from graphstash._compile.stats import Counters, Stats
from graphstash.errors import Reason
from graphstash_schema import ArtifactKey
from support.processes import python

SUMMARIES = {
    "12 hits, 1 miss, 8 min 20 s of compiling saved (about 2 min 5 s of wall time); "
    "hits: 2 server, 10 this host": Stats(
        hits_host=10, hits_server=2, misses=1, saved_compile_seconds=500.2, saved_wall_seconds=125
    ),
    "1 hit, 2 misses, 1 wait, 2 published, 3 fallbacks (connect 1, timeout 2), "
    "3.1 s of compiling saved (about 2.0 s of wall time); hits: 1 server": Stats(
        hits_server=1,
        misses=2,
        waits=1,
        published=2,
        saved_compile_seconds=3.14,
        saved_wall_seconds=2.0,
        fallbacks={"timeout": 2, "connect": 1},
        uncached=3,
    ),
    "0 hits, 1 miss, 0 fallbacks and 1 failure (store_full 1)": Stats(
        misses=1, fallbacks={"store_full": 1}
    ),
    "0 hits, 0 misses, 1 fallback and 2 other failures (connect 1, local_io 2)": Stats(
        fallbacks={"local_io": 2, "connect": 1}, uncached=1
    ),
    "1 hit, 0 misses, 2 h 1 min of compiling saved (about 1 h 0 min of wall time); "
    "hits: 1 another rank": Stats(
        hits_ranks=1, saved_compile_seconds=7300, saved_wall_seconds=3600
    ),
    "0 hits, 2 misses, 2 published": Stats(misses=2, published=2),
}


def test_summary_is_one_readable_line_of_nonzero_counts():
    assert [stats.summary() for stats in SUMMARIES.values()] == list(SUMMARIES)


def test_counters_add_up_and_report_the_first_fallback_of_a_reason():
    counters = Counters()
    counters.add(hits_host=1, wait_seconds=1.5)
    counters.add(hits_host=2)
    assert counters.count_fallback(Reason.RESET)
    assert not counters.count_fallback(Reason.RESET)
    for kind in ("jax", "triton"):
        counters.count_uncached(ArtifactKey.parse(kind, "cpu", "a" * 64))
    snapshot = counters.snapshot()
    assert (snapshot.hits_host, snapshot.wait_seconds) == (3, 1.5)
    assert (snapshot.fallbacks, snapshot.uncached) == ({"reset": 2}, 2)


def test_notebook_table_escapes_all_text():
    stats = Stats(hits_server=2, misses=1, fallbacks={"<script>alert(1)</script>": 1})
    shown = stats._repr_html_()
    assert "<table>" in shown
    assert "2 (2 server)" in shown
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


def test_print_shows_a_line_for_each_nonzero_figure():
    stats = Stats(hits_prefetched=3, hits_ranks=1, misses=2, compile_seconds=4.2, published=2)
    stats = replace(stats, saved_compile_seconds=60, saved_wall_seconds=30.2)
    assert str(stats).splitlines() == [
        "hits             4 (3 prefetched, 1 another rank)",
        "misses           2 (4.2 s of compiling)",
        "compiling saved  1 min 0 s",
        "wall time saved  about 30 s",
        "published        2",
    ]


def test_scalars_are_named_for_the_curves_of_a_tracker():
    scalars = Stats(hits_host=2, misses=1, saved_wall_seconds=1.5, fallbacks={"a": 2}).scalars()
    assert scalars["graphstash/hits"] == scalars["graphstash/hits_host"] == 2
    assert scalars["graphstash/fallbacks"] == 2
    assert scalars["graphstash/saved_wall_seconds"] == 1.5
    assert all(isinstance(value, float) for value in scalars.values())


def test_signal_handler_can_read_stats_while_a_hit_is_counted():
    program = """
import faulthandler, signal
from graphstash._compile.stats import Counters
from graphstash_schema import ArtifactKey

class Moment(float):
    def __add__(self, other):
        signal.raise_signal(signal.SIGUSR1)
        return float(self) + other

faulthandler.dump_traceback_later(30, exit=True)
counters = Counters()
signal.signal(signal.SIGUSR1, lambda *_: print(counters.snapshot().hits))
key = ArtifactKey.parse("jax", "cpu-x86_64", "0" * 64)
counters.count_hit(key, "host", began=Moment(), compile_seconds=1.0)
"""
    assert python(program, check=True).stdout == "1\n"
