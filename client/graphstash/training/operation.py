"""Operation: a function of many tensors, traced once and then called as one operation.

Recording a lazy step costs the host some ten microseconds per operation, so an optimizer that
touches every parameter twenty times spends more time recording than a small model needs to run. On
torch_xla an `Operation` lowers its function once to an XLA computation and from then on records a
single call of it, whatever its size. torch_xla's own `amp.syncfree` has such operations, written in
C++, for one parameter of one optimizer; here it is all parameters and any function. Elsewhere the
function is simply called.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphstash.training.device import torch_xla_functions

__all__ = ["Operation", "Shapes", "shapes_of"]

Shapes = tuple[tuple[torch.Size, torch.dtype], ...]

_Function = Callable[[list[Tensor], Any], list[Tensor]]


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Shapes and dtypes: the part of an operation's key that tensors make up."""
    return tuple([(tensor.shape, tensor.dtype) for tensor in tensors])


class Operation:
    """Calls `function` as one operation where that is cheaper than what it consists of.

    Args:
        name: shown in graphs and profiles; letters, digits and underscores.
        function: `function(inputs, key)` takes a list of tensors and returns a list of tensors. It
            is pure. Python numbers in it become constants of the computation.
    """

    def __init__(self, name: str, function: _Function) -> None:
        self._name = name
        self._function = function
        self._computations: dict[Hashable, _Computation] = {}

    def __call__(self, inputs: list[Tensor], key: Hashable = None) -> list[Tensor]:
        """Computes the function.

        Args:
            inputs: on one device.
            key: distinguishes everything that the function depends on besides the inputs' values:
                their number, shapes and dtypes, and options.
        """
        if inputs[0].device.type != "xla":
            return self._function(inputs, key)
        computation = self._computations.get(key)
        if computation is None:
            computation = _Computation(self._name, self._function, inputs, key)
            self._computations[key] = computation
        return computation(inputs)


class _Computation:
    """One traced form of an operation."""

    def __init__(self, name: str, function: _Function, inputs: list[Tensor], key: Any) -> None:
        from torch_xla.core import xla_builder

        self._xla = torch_xla_functions()
        self._name = f"xla::graphstash_{name}"
        placeholders = [xla_builder.create_placeholder_tensor(x.shape, x.dtype) for x in inputs]
        outputs = function(placeholders, key)
        context = self._xla.lowering.LoweringContext(name)
        context.set_name_string(name)
        context.build(outputs)
        self._computation = xla_builder.computation_from_module_proto(name, context.hlo())
        # The computation's parameters come in the order in which lowering met them: the inputs that
        # are used at all, and the numbers that torch_xla uploads instead of making them constants.
        uploaded = context.device_parameter_id_tensor_mapping()
        number_of = {context.tensor_parameter_id(x): i for i, x in enumerate(placeholders)}
        self._order = [number_of.get(i) for i in range(len(uploaded))]
        self._numbers = [None if n is not None else uploaded[i] for i, n in enumerate(self._order)]

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        parameters = [
            inputs[n] if n is not None else number
            for n, number in zip(self._order, self._numbers, strict=True)
        ]
        outputs: list[Tensor] = self._xla._xla_user_computation(
            self._name, parameters, self._computation
        )
        return outputs
