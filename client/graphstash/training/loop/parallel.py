"""Parallel: one training by several processes, each with its share of every batch.

    parallel = Parallel.current(device)
    model = parallel.wrap(model)
    for number, batch in enumerate(batches, 1):
        with parallel.reducing(model, last=number == len(batches)):
            loss_of(model, batch).backward()
    parallel.reduce_gradients(model.parameters())

Afterwards all processes have bit-identical mean gradients. An infinite or NaN gradient of one
process reaches all processes. So all processes skip the same steps and have the same loss scale
without further communication.

    Parallel            one process
    DistributedTorch    torch.distributed (torchrun): DDP reduces while backward runs
    DistributedXla      torch_xla (torch_xla.launch, xmp.spawn): one operation in the step's graph

torch_xla, at least up to 2.7, cannot reduce on its CPU device: each virtual device
(CPU_NUM_DEVICES) runs its own graph and waits forever for the others. On TPU it can.
"""

import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from graphstash.errors import ConfigError
from graphstash.training.reduce.ddp_hook import SparseState, sparse_hook
from graphstash.training.sharding import is_flattened, is_fully_sharded, is_sharded

__all__ = ["DistributedTorch", "DistributedXla", "Parallel"]


class Parallel:
    """How the processes of a job train together; this class serves a job of one process.

    Attributes:
        rank: number of this process, from 0.
        world: number of processes.
    """

    rank = 0
    world = 1

    @staticmethod
    def current(device: torch.device) -> "Parallel":
        """Return the implementation for this process's job and the model's device.

        Raises:
            ConfigError: several processes were started without a process group, or are unknown to
                torch_xla.
        """
        world = distributed.get_world_size() if _is_initialized() else 1
        if device.type == "xla":
            import torch_xla.runtime as xr

            xla_world = xr.world_size()
            if world > xla_world:
                raise ConfigError(
                    f"{world} processes run in torch.distributed, but torch_xla has {xla_world}; "
                    "start them with torch_xla.launch, or initialize the process group with "
                    "backend 'xla' and init_method 'xla://'"
                )
            return DistributedXla(xr.global_ordinal(), xla_world) if xla_world > 1 else Parallel()
        if world > 1:
            return DistributedTorch(device)
        if not _is_initialized() and _started_by_torchrun():
            raise ConfigError(
                "torchrun started this process, but there is no process group; call "
                "torch.distributed.init_process_group() before the training"
            )
        return Parallel()

    @property
    def is_first(self) -> bool:
        """Whether this process shows progress and writes checkpoints."""
        return self.rank == 0

    def wrap(
        self, model: nn.Module, *, reduce: SparseState | None = None, is_captured: bool = False
    ) -> nn.Module:
        """Return the model to compute losses with. Copy the first process's parameters unless the
        model is sharded. `is_captured`: whether CUDA graphs capture the step.

        Raises:
            ConfigError: `reduce` cannot be used, or not in a captured step; or
                FullyShardedDataParallel has sharded the model.
        """
        del is_captured
        if reduce is not None:
            raise ConfigError(
                "reduce= is for several processes of torch.distributed (torchrun), whose gradients "
                "DistributedDataParallel reduces; train without it"
            )
        return model

    def reducing(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of a micro-batch. `last`: it is the last of its step."""
        del model, last
        return nullcontext()

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients over all processes unless backward did. Does not read them."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank. Waits for all processes."""
        return [value]

    def require_same(self, values: Mapping[str, Any]) -> None:
        """Check that all processes have the same values. Waits for all processes.

        Raises:
            ConfigError: in every process, if a value differs. The message contains its name.
        """
        everywhere = self.gather(dict(values))
        for name in dict.fromkeys(name for each in everywhere for name in each):
            by_rank = [each.get(name) for each in everywhere]
            if any(other != by_rank[0] for other in by_rank):
                given = ", ".join(map(short, by_rank))
                raise ConfigError(
                    f"{name} differs between processes (by rank: {given}); "
                    "start them with the same arguments, and let them read the same directories"
                )


class DistributedTorch(Parallel):
    """Processes of torch.distributed, whose process group the script has initialized."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rank = distributed.get_rank()
        self.world = distributed.get_world_size()

    def wrap(
        self, model: nn.Module, *, reduce: SparseState | None = None, is_captured: bool = False
    ) -> nn.Module:
        """Return the model in DDP, unless it is in DDP, FSDP2 or tensor parallelism already."""
        if any(map(is_flattened, model.parameters())):
            raise ConfigError(
                "FullyShardedDataParallel has sharded the model, and its flat shards cannot be "
                "trained here: shard it with fully_shard(), which replaces it"
            )
        if any(map(is_sharded, model.parameters())):
            return super().wrap(model, reduce=reduce, is_captured=is_captured)
        on_cuda = self._device.type == "cuda"
        if on_cuda and is_captured and reduce is not None:
            raise ConfigError(
                "reduce= reads the device in each step, so the step cannot be captured as a CUDA "
                "graph: leave reduce or traced out"
            )
        if not isinstance(model, DistributedDataParallel):
            with _on_side_stream(self._device) if on_cuda and is_captured else nullcontext():
                # DDP refuses devices for a model that spans several of them.
                spans_devices = len({each.device for each in model.parameters()}) > 1
                device_ids = [self._device] if on_cuda and not spans_devices else None
                model = DistributedDataParallel(model, device_ids=device_ids)
        if reduce is not None:
            _register_hook(model, reduce)
        return model

    def reducing(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Let DDP and FSDP2 reduce only in the last backward of a step."""
        if is_fully_sharded(model):
            model.set_requires_gradient_sync(last)
        if last or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        unreduced: AbstractContextManager[None] = model.no_sync()
        return unreduced

    def gather(self, value: Any) -> list[Any]:
        """Gather with torch.distributed."""
        payloads: list[Any] = [None] * self.world
        # NCCL sends objects through the current device, which is cuda:0 on every rank of a script
        # that does not call torch.cuda.set_device().
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            distributed.all_gather_object(payloads, _pack(value))
        return [_unpack(payload) for payload in payloads]


@contextmanager
def _on_side_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a side stream. Create DDP in it if CUDA graphs capture the backward.

    DDP keeps the stream on which its autograd nodes were created, and CUDA refuses to capture work
    that waits for the default stream ("Usage with DistributedDataParallel" in torch's notes on CUDA
    graphs).
    """
    current = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


def _register_hook(model: DistributedDataParallel, reduce: SparseState) -> None:
    ranks = distributed.get_process_group_ranks(model.process_group)
    if ranks != reduce.ranks:
        raise ConfigError(
            f"reduce= adds up over the ranks {reduce.ranks}, and the model is trained by {ranks}; "
            "make the SparseState with a group of these"
        )
    try:
        model.register_comm_hook(reduce, sparse_hook)
    except RuntimeError as error:
        raise ConfigError(
            f"this DistributedDataParallel has a hook already ({error}); give train the model "
            "inside it"
        ) from error


class DistributedXla(Parallel):
    """Processes, or threads, of torch_xla with one device each."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def wrap(
        self, model: nn.Module, *, reduce: SparseState | None = None, is_captured: bool = False
    ) -> nn.Module:
        """Copy the first process's parameters to all processes."""
        import torch_xla.core.xla_model as xm

        super().wrap(model, reduce=reduce, is_captured=is_captured)
        xm.broadcast_master_param(model)
        return model

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add one operation for all gradients to the step's graph."""
        import torch_xla.core.xla_model as xm

        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            xm.all_reduce(xm.REDUCE_SUM, gradients, scale=1 / self.world)

    def gather(self, value: Any) -> list[Any]:
        """Gather with torch_xla's rendezvous, which runs its own graphs."""
        import torch_xla.core.xla_model as xm

        return [_unpack(payload) for payload in xm.rendezvous("graphstash", _pack(value))]


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)  # plain pickle cannot restore tensors of unsigned integers
    return buffer.getvalue()


def _unpack(payload: bytes) -> Any:
    # The payload comes from a process of the same job, so unpickling it is safe.
    return torch.load(io.BytesIO(payload), weights_only=False)


def _is_initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _started_by_torchrun() -> bool:
    return distributed.is_available() and distributed.is_torchelastic_launched()
