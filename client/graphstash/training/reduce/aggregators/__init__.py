"""Sums through aggregators: processes that add up the blocks that ranks send them over UDP.

    sums = reduce.AggregatedAllReduce()  # one aggregator beside each rank
    state = reduce.SparseState(through=sums)

    all_reduce.py    AggregatedAllReduce: a tensor in, its sums out
    session.py       what the ranks agree on, by torch's process group, and how they begin
    client.py        a rank's sockets
    server.py        an aggregator's process; __main__.py and colocated.py start it
    worker.py        the protocol of a rank, and
    aggregator.py    of an aggregator: datagrams in, datagrams out
    datagrams.py     what is in them, and their seal

A process of an aggregator imports numpy, and not torch.
"""
