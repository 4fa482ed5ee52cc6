"""How many rounds sums through aggregators take: from the sets of blocks alone.

Written from the description in docs/training.md, and not from the product's code.
"""

from collections.abc import Sequence

__all__ = ["rounds_of", "streams_of"]


def streams_of(blocks: int, capacity: int, pool: int) -> int:
    """Into how many streams a tensor is dealt out: of two datagrams or more when it is dense."""
    datagrams = -(-blocks // capacity)
    return max(1, min(pool, -(-datagrams // 2)))


def rounds_of(nonzero: Sequence[Sequence[int]], capacity: int, streams: int) -> int:
    """The rounds of all streams.

    Args:
        nonzero: the numbers of the blocks that are not zero, by rank.
        capacity: blocks of a datagram.
        streams: number i has every block whose remainder is i.
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
