"""The number of rounds that a sum through aggregators takes, computed from the sets of blocks.

The formula follows the description in docs/training.md, not the product's code.
"""

from collections.abc import Sequence


def streams_of(blocks: int, capacity: int, pool: int) -> int:
    """Return the number of streams. Each stream of a dense tensor has at least two datagrams."""
    datagrams = -(-blocks // capacity)
    return max(1, min(pool, -(-datagrams // 2)))


def rounds_of(nonzero: Sequence[Sequence[int]], capacity: int, streams: int) -> int:
    """Return the rounds of all streams.

    Args:
        nonzero: numbers of the nonzero blocks, by rank.
        capacity: blocks of a datagram.
        streams: number of streams. Stream i has the blocks with remainder i.
    """
    return sum(
        _rounds([[n for n in each if n % streams == i] for each in nonzero], capacity)
        for i in range(streams)
    )


def _rounds(nonzero: list[list[int]], capacity: int) -> int:
    rest = [sorted(each) for each in nonzero]
    known: set[int] = set()
    rounds, at = 0, None
    while True:
        rounds += 1
        for each in rest:
            if each and (at is None or each[0] == at):
                known |= set(each[:capacity])
                del each[:capacity]
        following = min((each[0] for each in rest if each), default=None)
        complete = sorted(n for n in known if following is None or n < following)
        at = complete[capacity] if len(complete) > capacity else following
        known -= set(complete[:capacity])
        if at is None:
            return rounds
