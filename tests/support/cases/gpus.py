"""A stand-in for an absent GPU: the properties that Triton reads before a launch."""

from typing import Any

from triton.backends.compiler import GPUTarget


class Driver:
    """Report that the host has a GPU."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: Any) -> int:
        return 0


class Pointer:
    """The attributes that Triton reads of a tensor."""

    dtype = "torch.float32"

    def data_ptr(self) -> int:
        return 0
