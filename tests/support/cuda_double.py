"""A stand-in for CUDA graphs on a CPU that enforces their rules.

A capture executes no operation. It records the operations with the memory that they read and write,
and a replay executes them. Reading a value during a capture, or letting other threads disturb it,
raises an error as CUDA does. A failed capture leaves what it leaves in torch 2.7: another current
stream, an allocation that was not ended, and a generator that draws no number.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


@dataclass(frozen=True, eq=False)
class _Stream:
    device: object

    def wait_stream(self, other: object) -> None:
        """Do nothing, because a CPU has one stream."""


class CudaDouble:
    """Observations for tests.

    Attributes:
        captures: number of successful captures with a given pool.
        pools: memory pools that captures used.
        device: current device.
        stream: current stream.
        unended: pools of failed captures into which torch still allocates.
        held: number of graphs and failed captures that hold each pool.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures = 0
        self.pools: list[object] = []
        self.device: object = "cuda:7"
        self.default = self.stream = _Stream(self.device)
        self.unended: list[object] = []
        self.held: Counter[object] = Counter()
        self._is_capturing = False
        self._is_generator_capturing = False
        replaced = {
            "Stream": _Stream,
            "stream": partial(self._set, "stream"),
            "device": partial(self._set, "device"),
            "current_stream": lambda _: self.stream,
            "graph": self._graph,
            "CUDAGraph": _Graph,
            "graph_pool_handle": object,
            "get_rng_state": lambda _: torch.get_rng_state(),
            "set_rng_state": lambda new, _: torch.set_rng_state(new),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name, function in (
            ("_cuda_endAllocateCurrentStreamToPool", self._end_allocation),
            ("_cuda_releasePool", self._release),
        ):
            monkeypatch.setattr(torch._C, name, function, raising=False)

    @contextlib.contextmanager
    def _set(self, name: str, value: object) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    @contextlib.contextmanager
    def _graph(
        self,
        graph: "_Graph",
        *,
        pool: object = None,
        stream: _Stream | None = None,
        capture_error_mode: str,
    ) -> Iterator[None]:
        if capture_error_mode != "thread_local":
            raise RuntimeError("another thread used CUDA: the capture is invalid")
        if self.unended:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        before, self.stream = self.stream, stream or _Stream(self.device)
        self._is_capturing = self._is_generator_capturing = True
        graph.recorded = _Recording()
        self.held[pool] += 1
        try:
            with graph.recorded:
                yield
        except Exception:
            self.unended.append(pool)
            message = "operation failed due to a previous error during capture"
            raise RuntimeError(message) from None
        finally:
            graph.recorded.undo()
            self._is_capturing = False
        self._is_generator_capturing = False
        self.stream = before
        if pool is not None:
            self.pools.append(pool)
            self.captures += 1

    def _end_allocation(self, _device: object, pool: object) -> None:
        if pool not in self.unended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.unended.remove(pool)

    def _release(self, _device: object, pool: object) -> None:
        self.held[pool] -= 1

    def draw(self) -> None:
        """Draw a random number, as dropout does."""
        if self._is_generator_capturing and not self._is_capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


class _Graph:
    recorded: "_Recording"

    def replay(self) -> None:
        self.recorded.replay()


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        if "_fused_" in str(function):
            raise RuntimeError("the graph would keep the present values of numbers on the host")
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and id(tensor) not in self._made:
                self._before.setdefault(id(tensor), (tensor, tensor.detach().clone()))
        results = function(*args, **kwargs)
        for tensor in pytree.tree_leaves(results):
            if isinstance(tensor, Tensor):
                self._made.add(id(tensor))
        with torch.no_grad():  # a graph knows addresses only, and a tensor may get another
            operation = pytree.tree_map_only(Tensor, torch.Tensor.detach, (args, kwargs, results))
        self._operations.append((function, *operation))
        return results

    def undo(self) -> None:
        """Restore the values before the capture, because a capture executes nothing."""
        with torch.no_grad():
            for tensor, value in self._before.values():
                tensor.copy_(value)

    def replay(self) -> None:
        """Execute the operations again in their memory."""
        with torch.no_grad():
            for function, args, kwargs, results in self._operations:
                again = function(*args, **kwargs)
                pairs = zip(pytree.tree_leaves(results), pytree.tree_leaves(again), strict=True)
                for old, new in pairs:
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
