"""The inputs of the model: a fleet, a deployment, and what each call costs.

Costs come from docs/benchmarks/server.md. An input that was not measured says "assumed" with its
source.
"""

from dataclasses import dataclass
from enum import StrEnum

MIB = 1024**2
GIB = 1024**3


class Bytes(StrEnum):
    """What carries the bytes of an artifact to the client."""

    SERVER = "server"
    NGINX = "nginx"  # by X-Accel-Redirect, on the server's host
    BUCKET = "bucket"  # a presigned URL of an object store


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Hosts that start one job, and the settings of their clients.

    Every process wants the same graphs in the same order, the new ones first. New graphs are not
    stored; the disks of the hosts are empty.
    """

    hosts: int
    processes: int = 8
    """Processes on each host. They share the host's disk, so that one of them downloads a graph."""
    graphs: int = 40
    new: int = 2
    size_bytes: float = 1 * MIB
    """Mean size of an artifact. Assumed: 0.5 MiB for a whole job of torch.compile in
    docs/benchmarks/compilers.md, 5 MB on the page for clusters."""
    compile_seconds: float = 60.0
    """Assumed: 72 minutes for 80 compilations on a TPU v6e-8 (pytorch/xla#9094)."""
    start_seconds: float = 30.0
    """Time in which the processes start, evenly spread. Assumed."""
    trace_seconds: float = 1.0
    """Mean time of a process between two graphs, evenly spread by a half. Assumed."""
    connect_seconds: float = 0.5
    first_byte_seconds: float = 2.0
    fetch_seconds: float = 60.0
    wait_seconds: float = 1200.0
    lease_seconds: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Servers, each with a link of its own, and one PostgreSQL."""

    servers: int = 2
    workers: int = 4
    """Processes of a server. Each uses at most one core."""
    max_connections: int = 16_384
    """GRAPHSTASH_MAX_CONNECTIONS: places of a worker."""
    database_connections: int = 5
    """GRAPHSTASH_DATABASE_CONNECTIONS of a worker."""
    database_cores: int = 4
    link_bits_per_second: float = 10e9
    """Link of a server. Assumed."""
    bytes_by: Bytes = Bytes.SERVER
    bucket_gets_per_second: float = 5500.0
    """Assumed: AWS documents 5,500 GET requests per second for each prefix of a bucket."""
    bucket_seconds: float = 0.05
    """Time to the first byte of a bucket. Assumed: AWS documents 100 to 200 ms for small objects,
    and tens of milliseconds are typical."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a call costs: CPU seconds of a worker, statements, and waits."""

    get_hot: float = 0.067e-3
    get_cold: float = 0.60e-3
    """For a row that the worker did not read within two seconds; PostgreSQL, without the read."""
    miss: float = 0.07e-3
    read: float = 0.11e-3
    """Of the worker, for a statement of a read: a miss on PostgreSQL less one on SQLite."""
    per_mib: float = 0.27e-3
    """Sending, by the worker (GET of 64 MiB). nginx takes as much on cores of its own."""
    lease: float = 0.82e-3
    """A call for a lease, without its reads: the wait and GET of 64 KiB, less the GET."""
    put: float = 2.1e-3
    put_per_mib: float = 2.1e-3
    connect: float = 0.10e-3
    """Assumed, like the next three."""
    refusal: float = 0.15e-3
    grant: float = 3.0e-3
    renewal: float = 2.0e-3
    statement: float = 0.10e-3
    """CPU of the database. Assumed."""
    round_trip: float = 0.5e-3
    """Between a worker and the database. Assumed: one network hop inside a data center."""
    grant_statements: int = 7
    """Of `_take` in services/jobs/leases.py, with BEGIN and COMMIT."""
    renewal_statements: int = 3
    put_statements: int = 11
    """The limit of `test_single_upload_takes_few_statements`."""
    flush_statements: float = 3.0
    """Of a worker in each second in which it answered reads. Assumed."""
    notify_seconds: float = 0.16
    """From a commit to the waiters of another server: the median of 64 clients."""
    row_seconds: float = 2.0
    """Time for which a worker answers from a row in its memory."""
