"""A session: the ranks of a process group and their aggregators.

The ranks use the process group only to agree on the session. The aggregators compute the sums.
"""

import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import distributed

from graphstash.errors import ConfigError, GraphstashError
from graphstash.training.reduce.aggregators import sockets
from graphstash.training.reduce.aggregators.client import Client, Counters, PathLimits
from graphstash.training.reduce.aggregators.colocated import ColocatedAggregator
from graphstash.training.reduce.aggregators.datagrams import Operation, Seal
from graphstash.training.reduce.aggregators.server import read_secret
from graphstash.training.reduce.aggregators.worker import (
    AggregationError,
    BlockRows,
    Totals,
    Worker,
)
from graphstash.training.reduce.agreement import gathered, require_same

__all__ = ["Session", "Settings"]

_PAYLOADS: Final = (1_452, 8_952, 61_440)
"""Datagram sizes to try: the UDP payloads of frames of 1,500 and 9,000 bytes over IPv6, and a large
datagram that IP fragments.
"""

_MAX_SLOTS: Final = 16
"""Maximum slots unless the settings give a number. More slots only lengthen queues."""

_ANY_PORT: Final = 9
"""Placeholder: connecting a UDP socket selects a route and sends nothing."""


@dataclass(frozen=True)
class Settings:
    """The arguments of `AggregatedAllReduce` that must be equal on all ranks."""

    block_size: int
    aggregators: tuple[str, ...] | None
    quantize: bool
    payload_bytes: int | None
    slots: int | None
    lost_after_seconds: float


@dataclass(frozen=True)
class _Offer:
    """What each rank sends to all ranks at the start, perhaps unencrypted.

    Attributes:
        secret: Secret of the rank's own aggregator. For dedicated aggregators, whose secret other
            jobs share, its SHA-256.
        problem: Why the rank cannot take part.
    """

    session: int
    host: str
    addresses: list[sockets.Address]
    secret: bytes
    problem: str = ""


class Session:
    """A session of all ranks, which construct it together. For arguments see `AggregatedAllReduce`.

    Attributes:
        payload_bytes: Maximum size of a datagram.
        counters: Datagrams that this rank has sent and received.

    Raises:
        ConfigError: the ranks do not agree, an address or `secret_file` cannot be used, or an
            aggregator process does not start; on every rank.
        AggregationError: an aggregator does not answer, or refuses the session; on every rank.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup,
        settings: Settings,
        *,
        secret_file: Path | None,
        listen: str | None,
        timeout_seconds: float,
    ) -> None:
        rank, world = distributed.get_rank(group), distributed.get_world_size(group)
        self._own: ColocatedAggregator | None = None
        self._secret = b""
        self._client: Client | None = None
        self._process = os.getpid()
        self.counters = Counters()
        self._failure: str | None = None
        self._is_used = threading.Lock()
        self._rank = rank
        try:
            require_same(
                *(group, str(settings)),
                wrong="the ranks want different sums",
                advice="give the same settings on each",
            )
            offers = gathered(group, self._offer(settings, rank, secret_file, listen))
            _require_agreement(offers, settings)
            addresses = [offer.addresses[0] for offer in offers]
            keys = [offer.secret for offer in offers]
            if settings.aggregators is not None:
                addresses = offers[0].addresses
                keys = [self._secret] * len(addresses)
            seals = [Seal(key, offers[0].session) for key in keys]
            limits = gathered(group, self._path_limits(addresses, seals, settings, rank, world))
            self.payload_bytes, slots = _agreed(limits, settings, world)
            self._worker = Worker(
                seals,
                rank=rank,
                slots=slots,
                payload_bytes=self.payload_bytes,
                lost_after_seconds=settings.lost_after_seconds,
                timeout_seconds=timeout_seconds,
            )
        except BaseException:
            self.close("its session did not begin")
            raise

    def reduce(
        self,
        blocks: BlockRows,
        nonzero: npt.NDArray[np.bool_],
        *,
        element: int,
        operation: Operation = Operation.SUM,
    ) -> Totals:
        """Reduce a tensor over all ranks, in place; see `Client.reduce`.

        Raises:
            AggregationError: the session is over, or belongs to the process that forked this one.
            RuntimeError: another thread is reducing a tensor.
        """
        if self._process != os.getpid():
            raise AggregationError(
                f"this process is a fork of the rank's process {self._process}, and only that "
                "process may use these sums"
            )
        if not self._is_used.acquire(blocking=False):
            raise RuntimeError(
                "two threads add up through one AggregatedAllReduce at the same time, so ranks "
                "could take one tensor for the other: make one for each"
            )
        try:
            if self._failure is not None or self._client is None:
                raise AggregationError(f"these sums have ended: {self._failure or 'closed'}")
            try:
                return self._client.reduce(
                    self._worker,
                    blocks,
                    nonzero,
                    element=element,
                    operation=operation,
                    check=self._require_own,
                )
            except BaseException as error:
                self._failure = self._why(error)
                self.close(self._failure)
                raise
        finally:
            self._is_used.release()

    def _why(self, error: BaseException) -> str:
        """Return the failure to report to all ranks. Name this rank if the error is not ours."""
        if isinstance(error, GraphstashError):
            return str(error)
        return f"rank {self._rank} has given up: {type(error).__name__} {error}".rstrip()

    def close(self, why: str = "") -> None:
        """Leave the session. Other ranks fail if they still need this rank, or if `why` is set."""
        if self._process != os.getpid():  # a forked child shares the sockets
            return
        if self._client is not None:
            self._client.leave(why)
            self._client = None
        if self._own is not None:
            self._own.close()
            self._own = None

    def _offer(
        self, settings: Settings, rank: int, secret_file: Path | None, listen: str | None
    ) -> _Offer:
        session = secrets.randbits(64)
        host = socket.gethostname()
        try:
            addresses, secret = self._aggregators(settings, rank, secret_file, listen)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an offer
            return _Offer(session, host, [], b"", f"rank {rank}: {error}")
        return _Offer(session, host, addresses, secret)

    def _aggregators(
        self, settings: Settings, rank: int, secret_file: Path | None, listen: str | None
    ) -> tuple[list[sockets.Address], bytes]:
        if settings.aggregators is None:
            self._own = ColocatedAggregator(_host(listen) or _own_host(), rank=rank)
            return [self._own.address], self._own.secret
        if secret_file is None:
            raise ConfigError(
                "dedicated aggregators need secret_file=, the file that they were given"
            )
        self._secret = read_secret(secret_file)
        addresses = [sockets.parsed(each) for each in settings.aggregators]
        return addresses, hashlib.sha256(self._secret).digest()

    def _path_limits(
        self,
        addresses: Sequence[sockets.Address],
        seals: Sequence[Seal],
        settings: Settings,
        rank: int,
        world: int,
    ) -> PathLimits | GraphstashError:
        """Return the limits of this rank's paths, or an error, which every rank then raises."""
        sizes = _PAYLOADS if settings.payload_bytes is None else (settings.payload_bytes,)
        try:
            self._client = Client(
                addresses,
                seals,
                rank=rank,
                world=world,
                lost_after_seconds=settings.lost_after_seconds,
                counters=self.counters,
            )
            return self._client.open(sizes)
        except GraphstashError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer
            return AggregationError(self._why(error))

    def _require_own(self) -> None:
        if self._own is not None and self._own.has_ended():
            raise AggregationError(
                f"the aggregator process of rank {self._rank} on {socket.gethostname()} has ended"
            )


def _host(listen: str | None) -> str | None:
    if listen is None:
        return None
    try:
        if not ip_address(listen.partition("%")[0]).is_unspecified:
            return listen
    except ValueError:
        pass
    raise ConfigError(
        f"listen={listen!r} is not an address of this host for other ranks: give its IP address "
        "without a port, such as 10.0.0.7"
    )


def _own_host() -> str:
    """Return the address of the interface that routes to torch's store, which every rank reaches.

    If the store has no host, resolve this host's name. If that fails, return `127.0.0.1`.
    """
    store = _store_host()
    for name in (store, socket.gethostname()) if store else (socket.gethostname(),):
        try:
            (family, kind, protocol, _, at), *_ = socket.getaddrinfo(
                name, _ANY_PORT, type=socket.SOCK_DGRAM
            )
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(at)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def _store_host() -> str | None:
    """Return the store's host, or None for a store in files or in memory."""
    store: Any = distributed.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return host if isinstance(host, str) and host else None


def _require_agreement(offers: Sequence[_Offer], settings: Settings) -> None:
    """Raise the same error on every rank if the offers do not fit together."""
    problems = [offer.problem for offer in offers if offer.problem]
    if problems:
        raise ConfigError(f"the sums cannot begin: {'; '.join(problems)}")
    if settings.aggregators is not None:
        if any(offer.secret != offers[0].secret for offer in offers):
            raise ConfigError(
                "the files of secret_file= differ between the ranks: give all the same"
            )
        return
    hosts = {offer.host for offer in offers}
    for rank, offer in enumerate(offers):
        if len(hosts) > 1 and ip_address(offer.addresses[0][0].partition("%")[0]).is_loopback:
            raise ConfigError(
                f"rank {rank} on {offer.host} listens on {offer.addresses[0][0]}, which other "
                "hosts do not reach: give listen= the address of its network"
            )


def _agreed(
    found: Sequence[PathLimits | GraphstashError], settings: Settings, world: int
) -> tuple[int, int]:
    """Return datagram bytes and slots per aggregator, equal on all ranks.

    All ranks may send to an aggregator at once, so the smallest receive buffer must hold a datagram
    from each rank for each slot.
    """
    problems = [each for each in found if isinstance(each, GraphstashError)]
    if problems:
        raise problems[0]
    limits = [each for each in found if isinstance(each, PathLimits)]
    room = min(each.buffer_bytes for each in limits) // 2  # Linux also counts its own overhead
    common = sorted(set.intersection(*(set(each.payload_bytes) for each in limits)))
    if not common:
        raise AggregationError("no size of datagrams passes between all ranks and aggregators")
    fitting = [size for size in common if size * world <= room]
    payload = fitting[-1] if fitting else common[0]
    slots = min(max(room // (payload * world), 1), _MAX_SLOTS)
    return payload, slots if settings.slots is None else settings.slots
