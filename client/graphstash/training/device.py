"""Operations for torch_xla: uploads, assignments, traced operations.

Tensors of a lazy step must be recorded or on the device. The result of `Tensor.to` is neither: the
first step that uses it turns a small number into a constant, and any other tensor into memory that
must not be reused. That step needs a graph, and a compilation, of its own.
"""

from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

__all__ = [
    "Shapes",
    "TracedOp",
    "assign",
    "donates",
    "formula_only",
    "materialize",
    "settle",
    "shapes_of",
    "torch_xla_functions",
    "upload",
]


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors from the host. On torch_xla, one transfer copies them immediately."""
    if device.type != "xla":
        # CUDA copies a few bytes of pageable memory before the call returns.
        return [tensor.to(device, non_blocking=True) for tensor in tensors]
    uploaded: list[Tensor] = torch_xla_functions()._xla_tensors_from_aten(
        list(tensors), [str(device)] * len(tensors)
    )
    return uploaded


def assign(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Assign new values to `targets` in place. Call it under `no_grad`.

    On torch_xla, results of `detach()`, `.data` and `state_dict()` also get the new values. Other
    views do not, as with torch_xla's own optimizers.
    """
    if not targets:
        return
    lazy = targets[0].device.type == "xla" and torch._is_functional_tensor(targets[0])
    if lazy:
        # Below functionalization, this records nothing; the new value takes the old value's memory.
        targets = [torch._from_functional_tensor(target) for target in targets]
        values = [torch._from_functional_tensor(value) for value in values]
    torch._foreach_copy_(list(targets), list(values))
    if lazy and not donates():
        for target, value in zip(targets, values, strict=True):
            torch._propagate_xla_data(value, target)  # do not write over the old value


@cache
def donates() -> bool:
    """Return whether a torch_xla graph may write a tensor's new value over the old one.

    Not on a CPU, where XLA copies memory that is still read when it is overwritten: AdamW's step
    for 4 M parameters took 28.7 instead of 18.2 ms of CPU time.
    """
    import torch_xla.runtime as xr

    return bool(xr.device_type() != "CPU")


@torch.no_grad()
def materialize(tensors: Sequence[Tensor]) -> None:
    """Compute recorded tensors into memory that may be overwritten.

    They are then inputs of the first step, as of all others, so its graph is the same.
    """
    ours = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if ours:
        # A number that was only moved to the device shares its memory with all equal numbers.
        for number in ours:
            if number.dim() == 0:
                number.data = number.clone()
        torch_xla_functions()._xla_sync_multi(ours, [], wait=False)


@torch.no_grad()
def settle(tensors: Sequence[Tensor]) -> None:
    """Give loaded tensors their own memory, as they had when training began. May read the device.

    A resumed run then has the graphs of the run before, and compiles nothing. Graphs order results
    by the creation of their tensors, so this function keeps that order.
    """
    ours = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if ours:
        ours.sort(key=torch_xla_functions()._xla_get_tensor_id)
        hosts = [tensor.detach().cpu() for tensor in ours]
        for tensor, uploaded in zip(ours, upload(hosts, ours[0].device), strict=True):
            tensor.data = uploaded


def torch_xla_functions() -> Any:
    """Return torch_xla's native functions, which have no public names."""
    import torch_xla

    return torch_xla._XLAC


formula_only: Final = ContextVar("formula_only", default=False)
"""Whether optimizers use formulas only. A captured graph cannot contain kernels. With formulas,
captured and other steps give the same bits."""


Shapes = tuple[tuple[torch.Size, torch.dtype], ...]

_Function = Callable[[list[Tensor], Any], list[Tensor]]


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Return the tensors' part of an operation's key."""
    return tuple([(tensor.shape, tensor.dtype) for tensor in tensors])


class TracedOp:
    """A function of many tensors that torch_xla traces once and then calls as one operation.

    Recording a lazy step costs the host about ten microseconds per operation, so an optimizer with
    twenty operations per parameter takes longer to record than a small model to run. A `TracedOp`
    lowers its function once to an XLA computation, and then records single calls of it. torch_xla's
    `amp.syncfree` has such operations only for one parameter of certain optimizers. On other
    devices, the function runs as it is.

    Args:
        name: shown in graphs and profiles; letters, digits and underscores.
        function: `function(inputs, key)` takes and returns a list of tensors, and is pure. Its
            Python numbers become constants of the computation.
    """

    def __init__(self, name: str, function: _Function) -> None:
        self._name = name
        self._function = function
        self._computations: dict[Hashable, _Computation] = {}

    def __call__(self, inputs: list[Tensor], key: Hashable = None) -> list[Tensor]:
        """Compute the function of `inputs`, which are on one device.

        `key` contains all that the function depends on, except the values of the inputs: their
        number, shapes and dtypes, and options.
        """
        if inputs[0].device.type != "xla":
            return self._function(inputs, key)
        computation = self._computations.get(key)
        if computation is None:
            computation = _Computation(self._name, self._function, inputs, key)
            self._computations[key] = computation
        return computation(inputs)


class _Computation:
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
        # Lowering orders the computation's parameters by first use. They are the used inputs, and
        # numbers that torch_xla uploads instead of making them constants.
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
