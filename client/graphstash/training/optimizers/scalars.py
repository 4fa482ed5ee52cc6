"""Numbers of an optimizer as tensors on its devices."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from graphstash.training.device import assign, upload

__all__ = ["DeviceScalars", "number_of"]


class DeviceScalars:
    """Numbers of an optimizer's groups, as tensors on the devices of its parameters. Python numbers
    would be constants of the graph, or one upload per parameter.
    """

    def __init__(self) -> None:
        self._scalars: dict[
            tuple[int, torch.device, torch.dtype], tuple[list[float], list[Tensor]]
        ] = {}
        """By group, device and dtype: the numbers, and their tensors."""

    def get(
        self,
        group: int,
        values: Mapping[str, float | Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return the tensors of `values`. Upload numbers that are new or have changed.

        Each call for a group must pass the same names. Raises ValueError for a tensor on a device.
        """
        numbers = list(map(number_of, values.values()))
        place = (group, device, dtype)
        if place not in self._scalars:
            tensors = upload([torch.tensor(number, dtype=dtype) for number in numbers], device)
            self._scalars[place] = numbers, tensors
        self._update(place, numbers)
        return self._scalars[place][1]

    def refresh(self, group: int, values: Mapping[str, float | Tensor]) -> None:
        """Upload the changed numbers of a group, to the devices that `get` has used."""
        for place in self._scalars:
            if place[0] == group:
                self._update(place, list(map(number_of, values.values())))

    def __iter__(self) -> Iterator[Tensor]:
        for _, tensors in self._scalars.values():
            yield from tensors

    def _update(self, place: tuple[int, torch.device, torch.dtype], numbers: list[float]) -> None:
        old, tensors = self._scalars[place]
        changed = [index for index, number in enumerate(numbers) if number != old[index]]
        if changed:
            new = [torch.tensor(numbers[index], dtype=place[2]) for index in changed]
            with torch.no_grad():
                assign([tensors[index] for index in changed], upload(new, place[1]))
            old[:] = numbers


def number_of(value: float | Tensor) -> float:
    """Return an option as a number. Raises ValueError for a tensor on a device."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cpu":
        raise ValueError(
            f"an option such as the learning rate is a tensor on {value.device}, where the host "
            "cannot see it change; give a number, which is uploaded whenever it changes"
        )
    return value.item()
