"""Ways to hold a tensor's memory without the tensor, as data, for any version of torch."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import dlpack

_DLPACK: Final[Any] = dlpack
"""torch does not annotate it."""

HOLDERS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "a view": lambda tensor: tensor.detach().view(-1)[:],
    "data": lambda tensor: tensor.data,
    "detach": Tensor.detach,
    "a storage": lambda tensor: torch.empty(0).set_(tensor.detach().untyped_storage()),
    "numpy": lambda tensor: torch.from_numpy(tensor.detach().numpy()),
    "frombuffer": lambda tensor: torch.frombuffer(tensor.detach().numpy(), dtype=tensor.dtype),
    "from_dlpack": lambda tensor: _DLPACK.from_dlpack(tensor.detach()),
    "to_dlpack": lambda tensor: _DLPACK.from_dlpack(_DLPACK.to_dlpack(tensor)),
}
"""Functions by name. Each returns a tensor that shares memory with its argument, but no version."""
