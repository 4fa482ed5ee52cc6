"""How pages write numbers and times."""

from datetime import UTC, datetime, timedelta

import pytest

from graphstash_server.pages.words import ago, duration, many, prose, share, size

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0 s"),
        (0.82, "820 ms"),
        (0.9996, "1.0 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (3599.9, "1 h"),
        (15_120, "4 h 12 min"),
        (172_800, "2 d"),
        (788_400, "9 d 3 h"),
        (1e9, "11,574 d 2 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds, written):
    assert duration(seconds) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1.0 KiB"), (1048575, "1.0 MiB")],
)
def test_sizes_have_binary_units(value, written):
    assert size(value) == written


@pytest.mark.parametrize(
    ("part", "whole", "written"),
    [
        (0, 0, "\N{EN DASH}"),
        (0, 5, "0.0 %"),
        (1, 10_000, "< 0.1 %"),
        (9_999, 10_000, "> 99.9 %"),
        (5, 5, "100 %"),
        (2, 3, "66.7 %"),
    ],
)
def test_a_share_is_all_or_nothing_only_when_it_is(part, whole, written):
    assert share(part, whole) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0.2, "just now"), (8.9, "9 s ago"), (7300, "2 h ago"), (-240, "in 4 min")],
)
def test_times_are_told_in_one_unit(seconds, written):
    assert ago(NOW - timedelta(seconds=seconds), NOW) == written


def test_one_is_not_several():
    assert [many(number, "miss", "misses") for number in (0, 1, 2000)] == [
        "0 misses",
        "1 miss",
        "2,000 misses",
    ]


def test_code_in_prose_is_marked_and_everything_is_escaped():
    assert prose("<b> and `a<b`") == "&lt;b&gt; and <code>a&lt;b</code>"
