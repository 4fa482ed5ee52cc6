"""Ways to add up a gradient over all workers: the bytes of one call, and a model of its time.

ring       torch's all-reduce of all of it, on gloo
coo        torch's all-reduce of sparse tensors, as DDP does for embeddings with `sparse=True`:
           all-gather of rows of 256 elements with their index
blocks     BlockSparseAllReduce at any density
look       the same with the hook's fallback: sent whole above that density of the union
paused     the hook's call between two looks at a dense bucket
dedicated  AggregatedAllReduce with as many aggregators as workers, on links of their own
colocated  the same with an aggregator beside each worker, on its link
"""

import torch
from torch import distributed

from benchmarks.reduce.cells import (
    BLOCK,
    GLOO_HEADER,
    NUMBER,
    block_bytes,
    look_bytes,
    ring_bytes,
)
from graphstash.training.reduce import AggregatedAllReduce, BlockSparseAllReduce
from graphstash.training.reduce.aggregators.datagrams import OVERHEAD_BYTES
from graphstash.training.reduce.ddp_hook import _DENSE_ABOVE as DENSE_ABOVE

ARMS = ("ring", "coo", "blocks", "look", "paused", "dedicated", "colocated")

AGGREGATED = ("dedicated", "colocated")

DENSE_ONLY = ("look", "paused")
"""Arms that differ from `blocks` only if the union is dense, when the hook uses the fallback."""

LOOKS = 1 / 65
"""Share of a dense bucket's steps in which the hook looks at it, after it has settled."""


class Arms:
    """Arms of one worker. `place` holds AggregatedAllReduce's arguments about the links, by arm."""

    def __init__(self, place):
        self._place = place
        self._sums = BlockSparseAllReduce(block_size=BLOCK)
        self._aggregated = {}

    def aggregated(self, arm):
        """Return the sum of an arm. All calls share it, because it has processes of its own."""
        if arm not in self._aggregated:
            self._aggregated[arm] = AggregatedAllReduce(block_size=BLOCK, **self._place[arm])
        return self._aggregated[arm]

    def datagrams(self, arm):
        """Return the payload bytes sent and received so far, and the number of UDP datagrams."""
        if arm not in AGGREGATED:
            return None
        each = self.aggregated(arm).counters
        payload = each.sent_bytes + each.received_bytes
        return payload, each.sent_datagrams + each.received_datagrams

    def prepared(self, arm, flat, chosen):
        """Return a function that makes one call, and a function that returns the sum afterwards."""
        if arm in AGGREGATED:
            self.aggregated(arm).sum_(flat[:0])  # connects outside the measured call
        if arm == "coo":
            rows = flat.view(-1, BLOCK)
            places = chosen.nonzero().flatten()
            sparse = torch.sparse_coo_tensor(places[None], rows[places], rows.shape)
            sparse = sparse.coalesce()
            return lambda: distributed.all_reduce(sparse), lambda: sparse.to_dense().view(-1)
        call = {
            "ring": lambda: distributed.all_reduce(flat),
            "blocks": lambda: self._sums.sum_(flat),
            "look": lambda: self._sums.sum_(flat, dense_above=DENSE_ABOVE),
            "paused": lambda: self._sums.sum_whole_(flat),
            "dedicated": lambda: self.aggregated(arm).sum_(flat),
            "colocated": lambda: self.aggregated(arm).sum_(flat),
        }[arm]
        return call, lambda: flat


def arms_of(cell, arms):
    """Return the arms that differ from all others in a cell."""
    dense = cell.union() > DENSE_ABOVE * cell.blocks
    return [arm for arm in arms if dense or arm not in DENSE_ONLY]


def formula(arm, cell, datagrams):
    """Return the payload of all workers, and the bytes of its headers.

    The payload is what workers send. With aggregators, it is what workers send and receive, in that
    number of datagrams.
    """
    workers, size = cell.workers, cell.size
    if arm in {"ring", "paused"}:
        return ring_bytes(size, workers)
    if arm == "blocks":
        return block_bytes(cell)
    if arm == "look":
        return tuple(map(sum, zip(*look_bytes(cell), ring_bytes(size, workers), strict=True)))
    if arm == "coo":  # metadata, indices, values; the headers are as observed
        pairs = workers * (workers - 1)
        return pairs * (cell.own * (4 * BLOCK + 8) + 72), pairs * 12 * GLOO_HEADER
    blocks = workers * (cell.own + cell.union())
    return blocks * 4 * BLOCK, blocks * NUMBER + datagrams * OVERHEAD_BYTES


def model_bytes(arm, cell):
    """Return the minimum bytes of each link, in its busier direction."""
    workers, size = cell.workers, cell.size
    ring = 2 * (workers - 1) / workers
    own, union = cell.own / cell.blocks, cell.union() / cell.blocks
    agreed = min(ring * cell.blocks / 8, (workers - 1) * cell.own * NUMBER)
    return {
        "ring": ring * size,
        "paused": ring * size,
        "look": ring * (size + cell.blocks / 8),
        "blocks": min(ring * union, (workers - 1) * own) * size + agreed,
        "coo": (workers - 1) * cell.own * (4 * BLOCK + 8),
        "dedicated": max(own, union) * size,
        "colocated": (workers - 1) / workers * (own + union) * size,
    }[arm]
