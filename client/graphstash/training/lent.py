"""Tensors that a collective has borrowed, and when Python has them back.

A thread of gloo lets go of a collective's tensors a moment after `wait` has returned. If Python has
dropped a tensor by then, that thread frees the tensor's Python object, and needs the interpreter
lock for it. In torch up to 2.7, a process that drops its group holds this lock while it waits for
the thread, and hangs (https://github.com/pytorch/pytorch/pull/154976). If the interpreter ends in
that moment, the process may abort (https://github.com/pytorch/pytorch/issues/190489).
"""

import time
from collections.abc import Callable
from typing import Any, Final, Self

import torch
from torch import Tensor

__all__ = ["Lent"]

_MOST_SECONDS: Final = 1.0
"""Bound of a wait. A thread lets go within microseconds unless the machine does not run it."""

_POLL_SECONDS: Final = 20e-6

_holders: Final[Callable[[Tensor], int]] = getattr(Tensor, "_use_count", lambda _: 1)
"""Returns the number of references to a tensor. All those from Python count as one. If torch lacks
its private function, `Lent` does not wait.
"""


class Lent:
    """Tensors for one collective, which stay referenced until its thread has let go of them.

    Create it before the collective starts. A `with` block around a synchronous collective takes
    them back. Views of the tensors must be made before or after.

    Attributes:
        work: The `Work` of an asynchronous collective. It refers to the tensors, so nothing else
            should refer to it.
    """

    def __init__(self, *tensors: Tensor) -> None:
        # torch.compile traces neither the count of references nor the clock.
        awaited = () if torch.compiler.is_compiling() else tensors
        # Tensors that others refer to, such as DDP's buckets, are not freed by the thread.
        self._tensors = [each for each in awaited if not each.is_cuda and _holders(each) == 1]
        self.work: Any = None

    def take_back(self) -> None:
        """Wait for the end of the collective, and then until only Python refers to the tensors."""
        try:
            if self.work is not None:
                self.work.wait()
        finally:
            self.work = None
            deadline = time.monotonic() + _MOST_SECONDS if self._tensors else 0.0
            while any(_holders(each) > 1 for each in self._tensors):
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.take_back()
