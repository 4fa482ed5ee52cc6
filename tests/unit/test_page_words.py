"""Numbers, times and code as pages display them."""

from datetime import UTC, datetime, timedelta

import pytest

from graphstash_server.pages.words import ago, duration, many, prose, share, size

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DURATIONS = {
    0: "0 s",
    0.82: "820 ms",
    0.9996: "1.0 s",
    9.96: "10 s",
    59.4: "59 s",
    60: "1 min",
    125: "2 min 5 s",
    3599.9: "1 h",
    15_120: "4 h 12 min",
    172_800: "2 d",
    788_400: "9 d 3 h",
    1e9: "11,574 d 2 h",
}
SIZES = {0: "0 bytes", 1023: "1,023 bytes", 1024: "1.0 KiB", 1048575: "1.0 MiB"}
TIMES = {0.2: "just now", 8.9: "9 s ago", 7300: "2 h ago", -240: "in 4 min"}
COUNTS = {0: "0 misses", 1: "1 miss", 2000: "2,000 misses"}
SHARES = {
    (0, 0): "\N{EN DASH}",
    (0, 5): "0.0 %",
    (1, 10_000): "< 0.1 %",
    (9_999, 10_000): "> 99.9 %",
    (5, 5): "100 %",
    (2, 3): "66.7 %",
}


@pytest.mark.parametrize(
    ("write", "written"),
    [
        (duration, DURATIONS),
        (size, SIZES),
        (lambda seconds: ago(NOW - timedelta(seconds=seconds), NOW), TIMES),
        (lambda number: many(number, "miss", "misses"), COUNTS),
        (lambda numbers: share(*numbers), SHARES),
    ],
    ids=["durations", "sizes", "times", "counts", "shares"],
)
def test_numbers_are_formatted_for_people(write, written):
    assert {value: write(value) for value in written} == written


def test_code_is_marked_up_and_all_text_escaped():
    assert prose("<b> and `a<b`") == "&lt;b&gt; and <code>a&lt;b</code>"
