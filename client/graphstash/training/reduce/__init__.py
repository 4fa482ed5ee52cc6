"""Sparse gradients: send only the blocks of a gradient that are not all zero.

    state = reduce.SparseState()
    ddp.register_comm_hook(state, reduce.sparse_hook)
    ...
    print(state.statistics())

Gradients of embeddings, mixtures of experts and pruned layers are mostly zero, and a ring sends
every zero. Here the ranks first exchange one bit per block to find the union: the blocks that are
nonzero on at least one rank. Then they sum only these blocks. All ranks get the same bits. A dense
all-reduce adds the ranks in another order, so its sums may differ in rounding and in the sign of
zeros.

The algorithm is OmniReduce (Fei et al., SIGCOMM 2021) on the collectives of torch.distributed.
`AggregatedAllReduce` implements its variant with aggregators, over UDP.
"""

from typing import TYPE_CHECKING

from graphstash._lazy import lazy

if TYPE_CHECKING:
    from graphstash.training.reduce.aggregators.all_reduce import AggregatedAllReduce
    from graphstash.training.reduce.aggregators.client import Counters
    from graphstash.training.reduce.aggregators.worker import AggregationError
    from graphstash.training.reduce.all_reduce import BlockSparseAllReduce, Sent
    from graphstash.training.reduce.ddp_hook import SparseState, sparse_hook
    from graphstash.training.reduce.forecast import Forecast, report
    from graphstash.training.reduce.thresholding import Thresholding

__all__ = [
    "AggregatedAllReduce",
    "AggregationError",
    "BlockSparseAllReduce",
    "Counters",
    "Forecast",
    "Sent",
    "SparseState",
    "Thresholding",
    "report",
    "sparse_hook",
]

__getattr__, __dir__ = lazy(__name__)
