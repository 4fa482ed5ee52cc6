"""A GPU that this host does not have: as much of it as Triton asks for before a launch."""

from typing import Any

from triton.backends.compiler import GPUTarget

__all__ = ["Driver", "Pointer"]


class Driver:
    """Report that the host has a GPU."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: Any) -> int:
        return 0


class Pointer:
    """What Triton asks a tensor for."""

    dtype = "torch.float32"

    def data_ptr(self) -> int:
        return 0
