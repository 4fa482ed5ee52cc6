"""The order of updates on CUDA streams.

DDP's buckets are updated in callbacks. torch runs each callback on another stream, which waits for
the reduction of its bucket and for nothing else. But the updates share tensors: the uploaded
learning rate, and step counts that the first update takes apart. So each update waits for the one
before.
"""

import torch

__all__ = ["StreamOrder"]


class StreamOrder:
    """Orders pieces of work that the host submits one after the other, maybe on several streams."""

    def __init__(self) -> None:
        self._last: dict[torch.device, torch.cuda.Stream] = {}

    def follow(self, device: torch.device) -> None:
        """Let the current stream wait for the work before, if that was on another stream.

        Does nothing for other devices than CUDA. Never waits on the host.
        """
        if device.type != "cuda":
            return
        current = torch.cuda.current_stream(device)
        last = self._last.get(device)
        if last is not None and last != current:
            current.wait_stream(last)
        self._last[device] = current

    def forget(self) -> None:
        """Forget the work before, because the step has waited for it."""
        self._last.clear()
