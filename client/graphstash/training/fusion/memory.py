"""Memory: find the parameters that a tensor shares memory with."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from graphstash.training.sharding import local

__all__ = ["Memory"]


class Memory:
    """The memory of some parameters; for a DTensor, the memory of its shard."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._places: dict[int, list[tuple[int, int, Tensor]]] = {}
        """By storage: first address, address after the last, parameter."""
        for parameter in parameters:
            storage, first, end = _place(local(parameter))
            self._places.setdefault(storage, []).append((first, end, parameter))

    def shared_with(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the parameters whose address range overlaps that of a strided tensor."""
        storage, first, end = _place(tensor)
        return [
            parameter
            for its_first, its_end, parameter in self._places.get(storage, ())
            if first < its_end and its_first < end
        ]


def _place(tensor: Tensor) -> tuple[int, int, int]:
    first = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return tensor.untyped_storage().data_ptr(), first, first + count * tensor.element_size()
