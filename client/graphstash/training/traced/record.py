"""Record: one step as a graph; and why a step cannot be one.

roots      what the step computed: changed state, gradients, results; the graph's outputs
arguments  the device data below them; each is a tensor of the state, a gradient, one of the
           batch, the random seed, or frozen: a number that Python gave to the device, or a
           tensor that the function had from elsewhere
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["CannotFreezeError", "Place", "Record", "show"]

Place = tuple[str, Any]
"""("state", index), ("grad", index), ("batch", index), ("seed", 0), ("output", index),
("frozen", None), ("constant", value)"""


class CannotFreezeError(Exception):
    """This step did something that running its graph again would not do; says what."""


@dataclass
class Record:
    """One step as a graph."""

    graph: bytes  # torch_xla's hash of it
    arguments: tuple[Place, ...]
    targets: tuple[Place, ...]  # what the first outputs overwrite: state, then gradients
    new_grads: tuple[tuple[int, int], ...]  # (parameter, output): a gradient born in this step
    cleared: tuple[int, ...]  # parameters whose gradient becomes None
    results: tuple[Place, ...]
    nesting: Any  # of the results
    values: list[Tensor]  # the arguments
    roots: list[Tensor]

    def release(self) -> None:
        """Keeps of the step's data only what later steps are compared with."""
        self.roots = []
        for position, (kind, _) in enumerate(self.arguments):
            if kind != "frozen":
                self.values[position] = None  # type: ignore[call-overload]


def show(tensor: Tensor) -> str:
    """A number on the host as it is, anything else by its dtype and shape."""
    if tensor.numel() == 1 and tensor.device.type == "cpu":
        return f"{tensor.item():.9g}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
