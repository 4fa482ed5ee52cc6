"""DeviceScalars: numbers that the host decides and the device uses.

As a Python number in a graph, a learning rate is a constant of it or an upload by every parameter
that uses it. Here each number is a tensor of its own that is uploaded when the host has changed it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphstash.training.device import assign, upload

__all__ = ["DeviceScalars"]


@dataclass(slots=True)
class _Scalar:
    value: float
    tensor: Tensor  # []


class DeviceScalars:
    """Named numbers of an optimizer's groups, on the devices of its parameters."""

    def __init__(self) -> None:
        self._scalars: dict[tuple[int, torch.device, torch.dtype], dict[str, _Scalar]] = {}

    def get(
        self,
        group: int,
        values: Mapping[str, float | Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """The tensors of `values`, uploaded where they are new or have changed.

        Args:
            group: the numbers' owner.
            values: by name, always the same names for a group; numbers or tensors on the host.
            device: where the tensors are wanted.
            dtype: theirs.

        Raises:
            ValueError: a value is a tensor on a device.
        """
        place = (group, device, dtype)
        if place not in self._scalars:
            numbers = [_number(value) for value in values.values()]
            tensors = upload([torch.tensor(number, dtype=dtype) for number in numbers], device)
            scalars = map(_Scalar, numbers, tensors)
            self._scalars[place] = dict(zip(values, scalars, strict=True))
        return self._update(self._scalars[place], values)

    def refresh(self, group: int, values: Mapping[str, float | Tensor]) -> None:
        """Uploads those of a group's numbers that have changed since they were last got."""
        for (of_group, _, _), scalars in self._scalars.items():
            if of_group == group:
                self._update(scalars, values)

    def __iter__(self) -> Iterator[Tensor]:
        for scalars in self._scalars.values():
            for scalar in scalars.values():
                yield scalar.tensor

    def _update(
        self, scalars: Mapping[str, _Scalar], values: Mapping[str, float | Tensor]
    ) -> list[Tensor]:
        changed = []
        for name, value in values.items():
            number = _number(value)
            if scalars[name].value != number:
                scalars[name].value = number
                changed.append(scalars[name])
        if changed:
            old = [scalar.tensor for scalar in changed]
            new = [torch.tensor(scalar.value, dtype=old[0].dtype) for scalar in changed]
            with torch.no_grad():
                assign(old, upload(new, old[0].device))
        return [scalar.tensor for scalar in scalars.values()]


def _number(value: float | Tensor) -> float:
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cpu":
        raise ValueError(
            f"a learning rate or the like is a tensor on {value.device}, where the host cannot see "
            "it change; give a number, which is uploaded whenever it changes"
        )
    return value.item()
