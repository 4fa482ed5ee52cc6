"""Capture a CUDA graph, and restore torch's state after a failed capture.

After a capture that CUDA has invalidated, for example because the step read the device, torch 2.7:

* leaves the capture's stream current. Uploads that other threads have queued on the stream before
  would race with the next step.
* leaves the random generator in the mode of a capture, so that the next dropout raises an error.
* still counts the capture in its allocator. Tensors of several streams would never be freed,
  `empty_cache` would raise an error, and the memory of the failed capture would stay reserved.

Later versions of torch clean up by themselves (2.15 does).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch

__all__ = ["capturing"]

_END_ALLOCATION: Final = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
"""Names of the same function of torch 2.15 and of 2.7."""


@contextmanager
def capturing(
    graph: "torch.cuda.CUDAGraph", *, pool: Any, stream: "torch.cuda.Stream"
) -> Iterator[None]:
    """Capture the block's work as a CUDA graph, on the device of `stream`.

    Without a stream, torch captures on a stream of the current device. If the tensors are on
    another device, the graph is empty.
    """
    device = stream.device
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        try:
            # Other threads upload batches, which must not invalidate the capture.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                yield
        except BaseException:
            with suppress(RuntimeError):  # the error of the capture matters
                _end_failed_capture(pool, stream)
            raise


def _end_failed_capture(pool: Any, stream: "torch.cuda.Stream") -> None:
    """Do what torch omits at the end of a failed capture.

    Raises:
        RuntimeError: torch has ended the capture.
    """
    core: Any = torch._C
    end = next(getattr(core, name) for name in _END_ALLOCATION if hasattr(core, name))
    device = stream.device.index
    end(device, pool)
    core._cuda_releasePool(device, pool)
    # The end of a capture that succeeds takes the generator out of the mode of a capture.
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=stream.device)
