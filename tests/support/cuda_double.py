"""A stand-in for CUDA graphs on a CPU that enforces their rules.

A capture executes no operation. It records the operations with the memory that they read and write,
and a replay executes them. Reading a value during a capture, or letting other threads disturb it,
raises an error as CUDA does.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CudaDouble"]

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


class CudaDouble:
    """Observations for tests.

    Attributes:
        captures: number of successful captures.
        pools: memory pools that captures used.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures = 0
        self.pools: list[object] = []
        double = self

        class Graph:
            recorded: _Recording

            def replay(self) -> None:
                self.recorded.replay()

        @contextlib.contextmanager
        def graph(into: Any, *, pool: object, capture_error_mode: str) -> Iterator[None]:
            if capture_error_mode != "thread_local":
                raise RuntimeError("another thread used CUDA: the capture is invalid")
            double.pools.append(pool)
            into.recorded = _Recording()
            try:
                with into.recorded:
                    yield
                double.captures += 1
            except Exception:
                message = "operation failed due to a previous error during capture"
                raise RuntimeError(message) from None
            finally:
                into.recorded.undo()

        class Stream:
            def __init__(self, device: object) -> None:
                pass

            def wait_stream(self, other: object) -> None:
                pass

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: torch.get_rng_state())
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new, _: torch.set_rng_state(new))


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
        self._operations.append((function, args, kwargs, results))
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
