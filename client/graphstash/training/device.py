"""What torch_xla needs done differently: uploads, assignments, traced operations.

On a lazy device everything that a step touches is either recorded or already there. A tensor that
was only moved to the device is neither: the first step that uses it makes a constant of a small
number, or memory that must not be reused of anything else. That step then gets a graph of its own,
compiled at full price, that no later step has.
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
    """Copies tensors from the host; on torch_xla in one transfer, and they are there afterwards."""
    if device.type != "xla":
        # CUDA copies a few bytes of ordinary memory aside before the call returns.
        return [tensor.to(device, non_blocking=True) for tensor in tensors]
    uploaded: list[Tensor] = torch_xla_functions()._xla_tensors_from_aten(
        list(tensors), [str(device)] * len(tensors)
    )
    return uploaded


def assign(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Gives `targets` new values; they stay the same objects. Call it under `no_grad`.

    On torch_xla whatever came from `detach()`, `.data` or `state_dict()` follows; other views keep
    the value that they had, as under torch_xla's own optimizers.
    """
    if not targets:
        return
    lazy = targets[0].device.type == "xla" and torch._is_functional_tensor(targets[0])
    if lazy:
        # Below functionalization this records nothing; the new value takes the old one's memory.
        targets = [torch._from_functional_tensor(target) for target in targets]
        values = [torch._from_functional_tensor(value) for value in values]
    torch._foreach_copy_(list(targets), list(values))
    if lazy and not donates():
        for target, value in zip(targets, values, strict=True):
            torch._propagate_xla_data(value, target)  # says that it has memory of its own


@cache
def donates() -> bool:
    """Whether a graph on torch_xla may write a tensor's new value over the old one.

    Not on a CPU: XLA copies there what is still read when it is overwritten, and AdamW's pass over
    4 M parameters took 1.6 times as long (28.7 against 18.2 ms of CPU time).
    """
    import torch_xla.runtime as xr

    return bool(xr.device_type() != "CPU")


@torch.no_grad()
def materialize(tensors: Sequence[Tensor]) -> None:
    """Puts tensors at rest: computed if they were only recorded so far, and free to be overwritten.

    Then the first step has the same graph as the second, to which they are plain inputs.
    """
    ours = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if ours:
        # A number that was only moved to the device shares its memory with all that are equal.
        for number in ours:
            if number.dim() == 0:
                number.data = number.clone()
        torch_xla_functions()._xla_sync_multi(ours, [], wait=False)


@torch.no_grad()
def settle(tensors: Sequence[Tensor]) -> None:
    """Gives tensors that were loaded memory of their own, as they had when training began.

    Then a run that resumes has the graphs of the run before it, and compiles nothing. A graph's
    results are in the order in which its tensors came to be, which stays as it is among these. May
    read the device.
    """
    ours = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if ours:
        ours.sort(key=torch_xla_functions()._xla_get_tensor_id)
        hosts = [tensor.detach().cpu() for tensor in ours]
        for tensor, uploaded in zip(ours, upload(hosts, ours[0].device), strict=True):
            tensor.data = uploaded


def torch_xla_functions() -> Any:
    """torch_xla's native functions, which have no public names."""
    import torch_xla

    return torch_xla._XLAC


formula_only: Final = ContextVar("formula_only", default=False)
"""Set while optimizers compute every step by their formula, and not by a kernel that a captured
graph could not have: with the same bits, captured or not."""


Shapes = tuple[tuple[torch.Size, torch.dtype], ...]

_Function = Callable[[list[Tensor], Any], list[Tensor]]


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Shapes and dtypes: the part of an operation's key that tensors make up."""
    return tuple([(tensor.shape, tensor.dtype) for tensor in tensors])


class TracedOp:
    """A function of many tensors that torch_xla traces once and then calls as one operation.

    Recording a lazy step costs the host some ten microseconds per operation, so an optimizer that
    touches every parameter twenty times spends more time recording than a small model needs to
    run. On torch_xla a `TracedOp` lowers its function once to an XLA computation and from then on
    records a single call of it, whatever its size. torch_xla's own `amp.syncfree` has such
    operations, written in C++, for one parameter of one optimizer; here it is all parameters and
    any function. Elsewhere the function is simply called.

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
        """Computes the function of `inputs`, which are on one device.

        `key` distinguishes everything that the function depends on besides the inputs' values:
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
