"""Describe values of torch, and record the operations and names that the code around them uses."""

import ctypes
import hashlib
import sys
from collections.abc import Iterable
from dis import Instruction
from functools import cached_property
from math import prod
from types import BuiltinFunctionType, CodeType, MethodType
from typing import Any, Final

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor
from torch.fx import Node

from graphstash.hooks.code import CodeDescriber, UndescribableError
from graphstash.hooks.inductor.kernels import operations_of_program
from graphstash.hooks.inductor.origins import is_torchs_namespace
from graphstash.hooks.inductor.registries import is_torchs_operator, tables

__all__ = ["Describer", "describe_constant"]

_RARE: Final = torch.ops.aten._thnn_fused_gru_cell_backward
"""An operation on which programs set no attributes."""

_ATTRIBUTES_OF_TORCH: Final = (
    vars(_RARE).keys()
    | vars(_RARE.default).keys()
    | {"_nondeterministic_seeded", "__doc__"}
    | {
        name
        for cls in (*OpOverload.__mro__, *OpOverloadPacket.__mro__)
        for name, value in vars(cls).items()
        if isinstance(value, cached_property)
    }
)
"""Attributes that torch sets on operations and overloads."""

_ATTRIBUTES_OF_PRIMS: Final = {
    *("impl_aten", "prim_impl", "prim_meta_impl", "return_type", "schema")
}
"""Attributes that torch._prims also sets on its operations."""

_STATEFUL_NAMES: Final = frozenset(
    {
        *("current_device", "device_count", "from_file", "get_device_name", "get_local_rank"),
        *("get_node_local_rank", "get_num_interop_threads", "get_num_threads", "get_rank"),
        *("get_rng_state", "get_world_size", "initial_seed"),
    }
)
"""Functions and methods of torch whose results depend on state of the process or on a file."""

_STATEFUL_MODULES: Final = (
    # Passes that write the rank into a graph.
    *(f"torch._inductor.fx_passes.{name}" for name in ("bucketing", "decomp_comms", "fsdp")),
    *(f"torch._inductor.fx_passes.overlap_{name}scheduling" for name in ("", "manual_")),
    "torch._inductor.fx_passes.overlap_preserving_bucketer",
    *("torch.cuda.memory", "torch.distributed", "torch.export", "torch.hub"),
    *("torch.jit._serialization", "torch.package", "torch.random", "torch.serialization"),
    *("torch.utils.cpp_extension", "torch.utils.data", "torch.xpu.memory"),
)
"""Modules of torch whose functions may all depend on such state."""

_EXECUTING_MODULES: Final = frozenset(
    {
        *("torch._inductor.constant_folding", "torch._inductor.freezing"),
        *("torch.fx.experimental.const_fold", "torch.fx.interpreter"),
        "torch.fx.passes.shape_prop",
    }
)
"""Modules of torch whose functions run the operations of a graph."""

_EXECUTING_NAMES: Final = frozenset(
    {
        *("_disable_current_modes", "_pop_mode", "_pop_mode_temporarily", "constant_fold"),
        *("maybe_disable_fake_tensor_mode", "no_dispatch", "run_node", "unset_fake_temporarily"),
    }
)
"""Functions and methods of torch with which code, such as a pass, runs operations on real tensors
while torch compiles."""

_FUNCTIONS: Final = torch._C._VariableFunctions
"""The class whose static methods are torch's functions."""

_MAX_VALUES: Final = 4096
"""Maximum elements of a tensor that code reads, described by value."""


class Describer(CodeDescriber):
    """Describes values of torch, and records the operations and names that the code uses.

    Attributes:
        operations: by name: the user's operations.
        executed: names of operations whose kernels may run during the compilation.
        executes_all: whether the user's code may run the kernels of any operation.
        names: names that the user's code reads. None if there is no such code.
    """

    def __init__(self) -> None:
        super().__init__("torch", "triton")
        self.operations: dict[str, Any] = {}
        self.executed: set[str] = set()
        self.executes_all = _executes_all()
        self.namespaces = {"aten"}
        self.names: set[str] | None = None
        self._of_program = operations_of_program()

    def add(self, other: "Describer") -> None:
        """Add what another describer has recorded."""
        self.operations = other.operations | self.operations
        self.executed |= other.executed
        self.executes_all |= other.executes_all
        self.namespaces |= other.namespaces
        if other.names is not None:
            self.names = other.names | (self.names or set())

    def reads_state(self, function: Any) -> str:
        """See `CodeDescriber.reads_state`. Records whether the function runs kernels."""
        module = str(getattr(function, "__module__", ""))
        name = str(getattr(function, "__name__", ""))
        self.executes_all |= module in _EXECUTING_MODULES or name in _EXECUTING_NAMES
        if f"{module}.".startswith(tuple(f"{each}." for each in _STATEFUL_MODULES)):
            return "reads more than its arguments"
        return ""

    def check_names(self, names: Iterable[str]) -> None:
        """See `CodeDescriber.check_names`. Records the names."""
        super().check_names(names := tuple(names))
        if self.names is None:
            self.names = set()
        self.names.update(names)
        self.executes_all |= not _EXECUTING_NAMES.isdisjoint(names)
        if found := _STATEFUL_NAMES.intersection(names):
            raise UndescribableError(f"code reads {min(found)}")

    def check_attributes(self, code: CodeType, instructions: list[Instruction]) -> None:
        """See `CodeDescriber.check_attributes`. Records whether the code calls a node's target."""
        super().check_attributes(code, instructions)
        self.executes_all |= "target" in code.co_names and _calls_target(instructions)

    def special(self, value: Any) -> str | None:
        """Describe a value of torch, and record operations. See `CodeDescriber.special`."""
        match value:
            case OpOverload() | OpOverloadPacket():
                return self._describe_operation(value)
            case CustomOpDef():
                return self._describe_operation(value._opoverload)
            case HigherOrderOperator():
                return self._describe_operator(value)
            case torch.dtype() | torch.layout() | torch.memory_format() | torch.device():
                return repr(value)
            case torch.Tensor():
                return f"{describe_constant(value)} {self._state_of(value)}"
        return self._special_code(value)

    def _state_of(self, tensor: torch.Tensor) -> str:
        """Describe what code can read from a tensor apart from its elements."""
        if not tensor.is_leaf or tensor.grad is not None or tensor._backward_hooks:
            raise UndescribableError("a tensor with a gradient, hooks or a history")
        own = {name: each for name, each in vars(tensor).items() if not name.startswith("_dynamo_")}
        bits = (tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference())
        return f"{bits} {self.describe(own)}"

    def _special_code(self, value: Any) -> str | None:
        if isinstance(value, BuiltinFunctionType) and value.__self__ is _FUNCTIONS:
            return f"torch.{value.__name__}"
        if isinstance(value, MethodType):
            for module in (config, functorch_config):  # keys contain the settings
                if value.__self__ is module:
                    return f"method {module.__name__}.{value.__name__}"
        for label, table in tables():  # `_describe_operation` describes the user's entries
            if value is table:
                return label
        if isinstance(value, CustomGraphPass):
            own = f"{self.describe(type(value))} {self.describe(vars(value))}"
            return f"pass {value.uuid()!r} {own}"
        if self.is_path(value):
            name = value.name if type(value).__name__ == "_OpNamespace" else "torch.ops"
            if not is_torchs_namespace(name):
                raise UndescribableError(f"the operations of {name} are read as a whole")
            return f"operations {name}"
        return None

    def is_path(self, value: Any) -> bool:
        """Return whether a value is `torch.ops` or one of its namespaces."""
        return type(value).__name__ in {"_Ops", "_OpNamespace"}

    def _describe_operator(self, operator: HigherOrderOperator) -> str:
        if not is_torchs_operator(operator):
            self.operations.setdefault(f"operator {operator}", operator)
        return f"operator {operator}"

    def record(self, target: Any, node: Node) -> None:
        """Record the operation that a node of a graph calls. Other targets have no effect."""
        match target:
            case OpOverload() | OpOverloadPacket():
                name, is_own = self._record_operation(target)
                if is_own and not _has_unknown_input(node):
                    self.executed.add(name)
            case HigherOrderOperator():
                self._describe_operator(target)

    def _record_operation(self, operation: Any) -> tuple[str, bool]:
        """Return the name of an operation, and whether it is the user's."""
        packet = getattr(operation, "overloadpacket", operation)
        name = str(packet._qualified_op_name)
        is_own = not is_torchs_namespace(name) or name in self._of_program
        if is_own:
            self.operations.setdefault(name, packet)
        else:
            self.namespaces.add(name.partition("::")[0])
        return name, is_own

    def _describe_operation(self, operation: Any) -> str:
        own = _attributes_of_program(operation)
        name, _ = self._record_operation(operation)
        self.executed.add(name)  # its caller runs during the compilation
        overload = getattr(operation, "_overloadname", "")
        return f"operation {name} {overload} {self.describe(own) if own else ''}"


def _calls_target(steps: list[Instruction]) -> bool:
    """Return whether code calls `node.target`, or a name for it: it may run the operation of any
    node of a graph, on real tensors.
    """
    names = {"target"}
    unpacks = any(each.opname == "CALL_FUNCTION_EX" for each in steps)
    for at, step in enumerate(steps):
        own = step.argval if type(step.argval) is tuple else (step.argval,)
        if step.opname.startswith("STORE_FAST") and steps[at - 1].argval == "target":
            names.add(own[0])
        if names.isdisjoint(own) or "LOAD" not in step.opname:
            continue
        if step.opname == "LOAD_METHOD" or "NULL" in step.argrepr:
            return True
        if sys.version_info >= (3, 13):
            is_called = steps[at + 1].opname == "PUSH_NULL"
        else:
            while steps[at].opname == "LOAD_ATTR":
                at -= 1  # noqa: PLW2901 - to the start of the expression
            is_called = steps[at - 1].opname == "PUSH_NULL"
            is_called |= unpacks and not steps[at].opname.startswith("LOAD")  # its start is unknown
        if is_called:
            return True
    return False


def _has_unknown_input(node: Node) -> bool:
    """Return whether torch cannot compute a node's result while it compiles.

    It computes the result if all inputs are constants. These have static sizes and at most one
    element, see `CONSTANT_NUMEL_LIMIT` in `torch._subclasses.fake_tensor`.
    """
    inputs = (each.meta.get("val", each.meta.get("example_value")) for each in node.all_input_nodes)
    shapes = (each.shape for each in inputs if isinstance(each, FakeTensor))
    return any(not all(isinstance(n, int) for n in each) or prod(each) > 1 for each in shapes)


def _attributes_of_program(operation: Any) -> dict[str, Any]:
    """Return what a program set on an operation, its overloads, or one overload."""
    found: dict[str, Any] = {}
    of_prims = _ATTRIBUTES_OF_PRIMS if str(operation).startswith("prims.") else ()
    for name, value in vars(operation).items():
        if _is_overload_of(operation, name, value):
            if own := _attributes_of_program(value):
                found[name] = own
        elif name not in _ATTRIBUTES_OF_TORCH and name not in of_prims:
            found[name] = value
    return found


def _is_overload_of(operation: Any, name: str, value: Any) -> bool:
    """Return whether the value is an overload that torch stored when code first read it."""
    return (
        isinstance(value, OpOverload)
        and value._overloadpacket is operation
        and value._overloadname == name
    )


def _executes_all() -> bool:
    """Return whether a compilation may execute every operation, on real tensors."""
    return bool(config.freezing or functorch_config.fake_tensor_propagate_real_tensors)


def describe_constant(tensor: torch.Tensor, *, most: int = _MAX_VALUES) -> str:
    """Describe a tensor and its elements. Raise `UndescribableError` if it has more than `most`."""
    if type(tensor) is not torch.Tensor:
        raise UndescribableError(f"a tensor of the class {type(tensor).__qualname__}")
    if tensor.layout is not torch.strided or tensor.is_quantized:  # it has more than elements
        raise UndescribableError(f"a tensor of {tensor.dtype} and {tensor.layout}")
    if tensor.is_meta:
        raise UndescribableError("a tensor without elements, on the device meta")
    if tensor.numel() > most:
        raise UndescribableError(f"a tensor of {tensor.numel()} elements, more than {most}")
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    content = (ctypes.c_char * whole.nbytes).from_address(whole.data_ptr())
    digest = hashlib.sha256(content).hexdigest()
    return f"tensor {tensor.dtype} {tensor.device} {tensor.shape} {tensor.stride()} {digest}"
