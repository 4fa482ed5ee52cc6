"""Bindings: the functions of torch_xla that a traced step uses.

They are private, but torch_xla's dynamo bridge depends on the same functions.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch_xla
import torch_xla.runtime as xr
from torch import Tensor

__all__ = [
    "XLA",
    "Ownership",
    "Seeds",
    "handle",
    "inner",
    "outer",
    "unusable",
    "without_functionalization",
    "write",
]

XLA: Final[Any] = torch_xla._XLAC

_NEEDED: Final = (
    "_check_device_tensor_need_materialization",
    "_check_tensor_need_materialization",
    "_get_base_seed_as_tensor",
    "_get_graph_hash",
    "_get_tensors_xla_device_data_node",
    "_replace_xla_tensor",
    "_run_cached_graph",
    "_set_buffer_donation",
    "_unique_id_for_ir_and_data",
    "_xla_get_cpu_tensors",
    "_xla_get_rng_seed",
    "_xla_get_tensor_id",
    "_xla_set_rng_seed",
    "_xla_sync_live_tensors",
    "_xla_warm_up_cache",
)

_FUNCTIONALIZE: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)


def unusable() -> str | None:
    """Return why steps cannot be traced in this process, or None if they can."""
    missing = [name for name in _NEEDED if not hasattr(torch_xla._XLAC, name)]
    if missing:
        return f"torch_xla {torch_xla.__version__} has no {', '.join(missing)}"
    if xr.is_spmd():
        return "torch_xla runs in SPMD mode; use torch_xla.compile"
    if torch_xla._XLAC._get_use_eager_mode():
        return "torch_xla runs in eager mode; use torch_xla.compile"
    if not torch._is_functional_tensor(torch.empty((), device=torch_xla.device())):
        return "XLA_DISABLE_FUNCTIONALIZATION is set; unset it"
    return None


def inner(tensor: Tensor) -> Tensor:
    """Return the tensor below functionalization. The next in-place change may replace it."""
    unwrapped: Tensor = torch._from_functional_tensor(tensor)
    return unwrapped


def write(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Assign `values`, below functionalization, to `targets` and their detach() aliases."""
    # There, copying a tensor of the same shape and dtype computes nothing. One call is quicker.
    if targets:
        torch._foreach_copy_([torch._from_functional_tensor(t) for t in targets], list(values))


def outer(tensor: Tensor) -> Tensor:
    """Return the tensor above functionalization, as Python uses it."""
    wrapped: Tensor = torch._to_functional_tensor(tensor)
    return wrapped


def without_functionalization() -> AbstractContextManager[Any]:
    """Return a context in which tensors are created below functionalization, which is cheaper."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE)
    return guard


def handle(tensor: Tensor) -> tuple[str, Tensor]:
    """Return an id of a computed tensor's device data, and a tensor that keeps the data alive."""
    (data,) = XLA._get_tensors_xla_device_data_node([tensor])[1]
    return XLA._unique_id_for_ir_and_data(data), data


class Ownership:
    """Makes sure that no other tensor shares device data that a step overwrites.

    After torch_xla's `copy_`, both tensors refer to the same data. If a step overwrote the data of
    one tensor, the other would lose its value. A clone gets its own data at the next sync.
    """

    def __init__(self) -> None:
        self._copies: int | None = None

    def ensure(self, tensors: Sequence[Tensor], device: str) -> None:
        """Give each tensor its own data if `copy_` has run since the last `settle`."""
        if XLA._xla_counter_value("xla::copy") == self._copies:
            return
        clones = [inner(tensor.detach().clone()) for tensor in tensors]
        XLA._xla_sync_live_tensors(device, [], wait=False)
        write(tensors, clones)
        self.settle()

    def settle(self) -> None:
        """Record that after all copies until now, every tensor has its own data."""
        self._copies = XLA._xla_counter_value("xla::copy")


class Seeds:
    """The random seeds of traced steps, equal to those of lazy steps.

    A lazy step derives its random numbers from the device's base seed, and advances the seed at its
    end. Random numbers drawn between steps advance a running seed. The next step starts from it.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._base = 0

    def take(self) -> Tensor:
        """Return the seed of the step that begins now, on the device."""
        running = XLA._xla_get_rng_seed(self._device)
        seed: Tensor = XLA._get_base_seed_as_tensor(self._device)  # resets the running seed
        self._base = XLA._xla_get_rng_seed(self._device)
        if running != self._base:
            XLA._xla_set_rng_seed(running, self._device)
            seed = XLA._get_base_seed_as_tensor(self._device)
        return seed

    def skip(self) -> None:
        """Begin a step that draws no random numbers."""
        self._base = XLA._xla_get_rng_seed(self._device)

    def advance(self) -> None:
        """Advance the seed as torch::lazy::LazyGraphExecutor::DeviceContextArena::MarkStep does."""
        following = (1012031 + self._base * 7012063) % 2**64
        XLA._xla_set_rng_seed(following, self._device)
