"""Sums through aggregators: processes that add up the blocks that ranks send them over UDP.

    sums = reduce.AggregatedAllReduce()  # one aggregator beside each rank
    state = reduce.SparseState(through=sums)

    all_reduce.py    AggregatedAllReduce: replaces a tensor by its sums
    session.py       the start of a session: the ranks agree on it through torch's process group
    client.py        a rank's sockets
    server.py        an aggregator's process; __main__.py and colocated.py start it
    worker.py        a rank's side of the protocol, without I/O
    aggregator.py    an aggregator's side of the protocol, without I/O
    datagrams.py     the format of datagrams, and their seal

An aggregator process imports numpy but not torch.
"""
