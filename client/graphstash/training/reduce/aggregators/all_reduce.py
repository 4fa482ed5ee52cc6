"""The all-reduce through aggregators: each rank sends its own nonzero blocks, once.

    ranks  --  their nonzero blocks  -->  aggregators; each of n aggregators adds every n-th block
    ranks  <--  the sums of the union's blocks  --  aggregators

A ring of N ranks sends each element 2(N-1)/N times, zero or not. Here a rank sends its own nonzero
blocks, and receives the sums of the union: the blocks that are nonzero on any rank. This is
OmniReduce with its aggregators (Fei et al., SIGCOMM 2021). A tensor without zeros is streamed as in
SwitchML (Sapio et al., NSDI 2021).
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, distributed

from graphstash.errors import ConfigError
from graphstash.training.reduce.aggregators.aggregator import MAX_SLOTS
from graphstash.training.reduce.aggregators.client import Counters
from graphstash.training.reduce.aggregators.datagrams import (
    END,
    LONGEST,
    OVERHEAD_BYTES,
    Operation,
    Values,
    blocks_per_datagram,
)
from graphstash.training.reduce.aggregators.elements import (
    ELEMENTS,
    code_of,
    dequantized,
    exponents,
    quantized,
)
from graphstash.training.reduce.aggregators.session import Session, Settings
from graphstash.training.reduce.aggregators.worker import BlockRows
from graphstash.training.reduce.agreement import require_floats, require_scale, timeout_of
from graphstash.training.reduce.all_reduce import Sent
from graphstash.training.reduce.blocks import (
    BLOCK_ELEMENTS,
    BlockLayout,
    BlockView,
    written_back,
)

__all__ = ["AggregatedAllReduce"]

_INT32: Final = code_of("int32") or 0
_UINT8: Final = code_of("uint8") or 0

_YEAR_SECONDS: Final = 31_536_000


class AggregatedAllReduce:
    """Sums tensors over ranks, through aggregators.

    Every rank makes the same calls in the same order, from one thread at a time, and calls
    `close` at the end. The result has the same bits on all ranks and in every run, because an
    aggregator adds in the order of the ranks. It adds fp16 and bf16 in fp32 and rounds once; it
    adds other types in their own type.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup | None = None,
        *,
        block_size: int = BLOCK_ELEMENTS,
        aggregators: Sequence[str] | None = None,
        secret_file: Path | str | None = None,
        listen: str | None = None,
        quantize: bool = False,
        payload_bytes: int | None = None,
        slots: int | None = None,
        lost_after_seconds: float = 30.0,
        timeout_seconds: float | None = None,
    ) -> None:
        """Begin a session; a collective call, with the same arguments on all ranks except `listen`.

        Args:
            group: Process group of the ranks, used only to begin. Default: the default group.
            block_size: Elements of a block, 1 or more. Smaller blocks send fewer zeros.
            aggregators: `HOST:PORT` of each running aggregator, see
                `python -m graphstash.training.reduce.aggregators --help`. Default: start one
                process beside each rank, which ends with the rank.
            secret_file: File with the secret of the running aggregators.
            listen: IP address by which other ranks reach this host. Default: the address of the
                interface that routes to torch's store.
            quantize: Whether to add fp32 as int32 with an exponent per block, see `elements`.
            payload_bytes: Payload of a UDP datagram, up to 65,507. Default: the largest of 61,440,
                8,952 and 1,452 that passes between all ranks and aggregators, and of which half of
                every receive buffer holds one per rank.
            slots: Datagrams in flight between a rank and an aggregator, 1 to 64. Default: at most
                16, and no more than half of every receive buffer holds for all ranks.
            lost_after_seconds: Seconds of silence after which a process counts as dead, and all
                ranks get an error; 0.001 to a year.
            timeout_seconds: Seconds to wait for ranks that are alive but late. Default: the timeout
                of the group.

        Raises:
            ValueError: an argument is out of its range or contradicts another, or torch.distributed
                is not initialized.
            TypeError: `aggregators` is a string instead of a list.
            ConfigError: the ranks have different arguments, an address or `secret_file` cannot be
                used, or an aggregator process does not start; on every rank.
            AggregationError: an aggregator does not answer; on every rank.
        """
        if block_size < 1:
            raise ValueError(f"a block of {block_size} elements: take 1 or more, 256 is usual")
        if payload_bytes is not None and not OVERHEAD_BYTES < payload_bytes <= LONGEST:
            raise ValueError(
                f"payload_bytes={payload_bytes}: take more than {OVERHEAD_BYTES}, which a "
                f"datagram has beside its blocks, and up to {LONGEST}, which UDP carries"
            )
        if slots is not None and not 1 <= slots <= MAX_SLOTS:
            raise ValueError(f"slots={slots}: take 1 to {MAX_SLOTS}")
        if not 0.001 <= lost_after_seconds <= _YEAR_SECONDS:
            raise ValueError(
                f"lost_after_seconds={lost_after_seconds}: take 0.001 to {_YEAR_SECONDS}"
            )
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds={timeout_seconds}: take more than 0")
        if isinstance(aggregators, str):
            raise TypeError(f"aggregators={aggregators!r}: give a list, [{aggregators!r}]")
        if aggregators is None and secret_file is not None:
            raise ValueError(
                f"secret_file={str(secret_file)!r} is for aggregators that run already: name them "
                "in aggregators= as well, or leave it out"
            )
        if aggregators is not None and not aggregators:
            raise ValueError("aggregators=[]: name one or more, or take None to start them")
        if aggregators is not None and len(set(aggregators)) < len(aggregators):
            raise ValueError(f"aggregators={list(aggregators)}: name each of them once")
        self.block_size = block_size
        self.group = _or_default(group)
        self._world = distributed.get_world_size(self.group)
        self._quantize = quantize
        self._session = Session(
            self.group,
            Settings(
                block_size,
                None if aggregators is None else tuple(aggregators),
                quantize,
                payload_bytes,
                slots,
                lost_after_seconds,
            ),
            secret_file=None if secret_file is None else Path(secret_file),
            listen=listen,
            timeout_seconds=_seconds(self.group) if timeout_seconds is None else timeout_seconds,
        )
        finalize(self, self._session.close)

    def close(self) -> None:
        """End the session, and the aggregator beside this rank. The aggregator stays up to two
        seconds for ranks that miss the last sums.
        """
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counters(self) -> Counters:
        """Datagrams that this rank has sent and received in this session."""
        return self._session.counters

    def sum_(
        self,
        flat: Tensor,
        *,
        scale: float = 1.0,
        wire_dtype: torch.dtype | None = None,
        dense_above: float = 1.0,
        layout: BlockLayout | None = None,
    ) -> Sent:
        """Sum a tensor over all ranks, in place.

        Args:
            flat: A tensor of one dimension: integers of 8 to 64 bits, fp16, bf16, fp32 or fp64,
                with the same shape and type on all ranks. A strided tensor is summed through a
                copy. -0.0 counts as zero, and a sum of -0.0 may become 0.0, with the same bits on
                all ranks.
            scale: Finite factor by which every element is multiplied before it is sent.
            wire_dtype: Type in which elements are sent. Default: their own type.
            dense_above: Ignored: the number of a block costs only four bytes.
            layout: Ignored: all tensors of a session have blocks of `block_size` elements.

        Raises:
            ValueError: the tensor does not have exactly one dimension, is sparse, or has several
                elements at one address.
            ConfigError: the ranks have different tensors, which ends the session; or a block does
                not fit into a datagram; or the type is not supported; or `scale` is infinite or
                NaN.
            AggregationError: a rank or an aggregator is gone; the session is over.
        """
        del dense_above, layout
        require_scale(scale, flat.dtype)
        began = time.perf_counter()
        element = self._element_of(flat, wire_dtype)
        with written_back(flat) as contiguous:
            nonzero = BlockView(contiguous, self.block_size).nonzero(one_zero=True)
            return self._sum(contiguous, nonzero.cpu().numpy(), scale, element, began)

    def sum_whole_(self, flat: Tensor, *, wire_dtype: torch.dtype | None = None) -> int:
        """Sum a tensor in place, including its zeros, and return how many bytes were sent."""
        began = time.perf_counter()
        element = self._element_of(flat, wire_dtype)
        with written_back(flat) as contiguous:
            nonzero = np.ones(BlockView(contiguous, self.block_size).count, np.bool_)
            sent = self._sum(contiguous, nonzero, 1.0, element, began)
        return sent.bitmap_bytes + sent.block_bytes

    def _sum(
        self,
        flat: Tensor,
        nonzero: npt.NDArray[np.bool_],
        scale: float,
        element: int,
        began: float,
    ) -> Sent:
        if scale != 1.0:
            flat.mul_(scale)
        wire = flat.detach().to("cpu", getattr(torch, ELEMENTS[element].name))
        values = _as_numpy(wire)
        packed = time.perf_counter()
        before = self._session.counters.sent_bytes
        if self._quantize and wire.dtype == torch.float32:
            union = self._sum_quantized(values, nonzero)
        else:
            union = self._session.reduce(
                BlockRows(values, self.block_size), nonzero, element=element
            ).union_blocks
        summed = time.perf_counter()
        if wire.data_ptr() != flat.data_ptr():
            flat.copy_(wire)
        own = int(nonzero.sum())
        block_bytes = own * self.block_size * wire.itemsize
        return Sent(
            blocks=len(nonzero),
            own_blocks=own,
            union_blocks=union,
            bitmap_bytes=self._session.counters.sent_bytes - before - block_bytes,
            block_bytes=block_bytes,
            dense_bytes=flat.nbytes,
            density=own / (len(nonzero) or 1),
            union_density=union / (len(nonzero) or 1),
            pack_seconds=packed - began,
            send_seconds=summed - packed,
            unpack_seconds=time.perf_counter() - summed,
        )

    def _sum_quantized(self, values: Values, nonzero: npt.NDArray[np.bool_]) -> int:
        """Agree on exponents, sum the integers, and return the number of blocks in the union."""
        rows = np.zeros((len(nonzero), self.block_size), np.float32)
        rows.reshape(-1)[: len(values)] = values
        codes = exponents(rows)
        groups = BlockRows(codes, self.block_size)
        starts = np.arange(0, len(codes), self.block_size)
        used = np.add.reduceat(codes != 0, starts, dtype=np.int64) > 0 if len(codes) else codes > 0
        self._session.reduce(groups, used, element=_UINT8, operation=Operation.MAX)
        integers = quantized(rows, codes, self._world)
        totals = self._session.reduce(
            BlockRows(integers.reshape(-1), self.block_size), nonzero, element=_INT32
        )
        values[:] = dequantized(integers, codes, self._world).reshape(-1)[: len(values)]
        return totals.union_blocks

    def _element_of(self, flat: Tensor, wire_dtype: torch.dtype | None) -> int:
        require_floats(flat.dtype, wire_dtype)
        dtype = wire_dtype or flat.dtype
        element = code_of(str(dtype).removeprefix("torch."))
        if element is None:
            raise ConfigError(
                f"aggregators add up {', '.join(each.name for each in ELEMENTS.values())}, and "
                f"this is {dtype}"
            )
        if flat.numel() > self.block_size * (END - 1):
            raise ConfigError(
                f"{flat.numel()} elements in blocks of {self.block_size}: a tensor has {END - 1} "
                "blocks at most, so take a larger block_size="
            )
        payload, block_bytes = self._session.payload_bytes, self.block_size * dtype.itemsize
        if not blocks_per_datagram(payload, block_bytes):
            raise ConfigError(
                f"a block of {self.block_size} {dtype} has {block_bytes} bytes, and a datagram of "
                f"{payload} has {payload - OVERHEAD_BYTES} for a block and its number of 4: take "
                "a smaller block_size= or a larger payload_bytes="
            )
        return element


def _or_default(group: distributed.ProcessGroup | None) -> distributed.ProcessGroup:
    found = group if group is not None else distributed.group.WORLD
    if found is None:
        raise ValueError("torch.distributed is not initialized: call init_process_group before")
    return found


def _seconds(group: distributed.ProcessGroup) -> float:
    return (timeout_of(group) or distributed.default_pg_timeout).total_seconds()


def _as_numpy(flat: Tensor) -> Values:
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    return flat.numpy()
