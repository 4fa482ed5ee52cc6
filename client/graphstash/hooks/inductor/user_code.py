"""Describe the user's code in a compilation. torch's keys contain at most its name.

torch computes the key of a graph before tracing, and the key only names a custom operation. This
module describes the code behind the name: kernels, the fake kernel, the backward pass, the types of
autocast, `vmap`, lowerings, decompositions, graph passes, and the files of C++ libraries. It covers
the operations in the graph, the operations in their code, and so on, and every replacement of
torch's own lowerings and decompositions. A graph with code that has no description is not shared.
"""

import ctypes
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from dis import Instruction
from functools import cache, cached_property
from math import prod
from operator import itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Final, NamedTuple

import torch
from torch import library
from torch._C import DispatchKey
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._higher_order_ops import effects
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_mutation,
)
from torch._inductor import config, lowering
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.freezing_utils import is_frozen_param
from torch._inductor.utils import tensor_is_aligned
from torch._library import custom_ops, simple_registry
from torch._library.custom_ops import CustomOpDef
from torch._library.utils import can_generate_trivial_fake_impl
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.node import _side_effectful_functions
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from graphstash.hooks.code import CodeDescriber, UndescribableError
from graphstash.hooks.environment import version_of
from graphstash.hooks.inductor.autocast import type_of_autocast
from graphstash.hooks.inductor.given import given_to_node, given_to_region
from graphstash.hooks.inductor.kernels import (
    changed_definitions,
    fakes_of,
    operations_of_program,
)
from graphstash.hooks.inductor.libraries import libraries, needed_by
from graphstash.hooks.inductor.origins import is_torchs, is_torchs_namespace
from graphstash.hooks.inductor.recorded import Kernel, kernels_by_library
from graphstash.hooks.inductor.registries import (
    OF_USER,
    compilers_of,
    is_torchs_operator,
    kernels_of_operator,
    registered_for_torch,
    tables,
)
from graphstash.hooks.inductor.replaced import replaced_in_torch
from graphstash.hooks.inductor.target import GPUS
from graphstash.hooks.inductor.tensor_class import members_of_program

__all__ = ["Registrations", "registrations", "user_code_of"]

_BACK_REFERENCES: Final = frozenset({"_lib", "_opoverload", "_namespace", "_name"})
"""Attributes of a `CustomOpDef` that lead back to the operation."""

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

_TYPES_OF_AUTOCAST: Final = {"_autocast_cpu_dtype": "cpu", "_autocast_cuda_dtype": "cuda"}
"""Attributes of a `CustomOpDef` of torch 2.7, and their devices."""

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

_SIDE_EFFECTS_OF_TORCH: Final = frozenset(_side_effectful_functions)
"""Functions that torch kept in graphs although their results are unused, when this module was
imported. `_target` describes later ones, which are the user's."""

_KNOWN_TO_TORCH: Final = frozenset({"einops"})
"""Packages whose functions torch's AOTAutograd cache accepts, and identifies by name."""

_OF_OPERATORS: Final = frozenset(vars(triton_kernel_wrapper_mutation))
"""Attributes that torch gives every higher-order operator."""

_MAX_VALUES: Final = 4096
"""Maximum elements of a tensor that code reads, described by value."""

_MAX_CONSTANT: Final = 64 * 1024**2
"""Maximum elements of a constant tensor in a graph, described by digest."""


class _Describer(CodeDescriber):
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

    def add(self, other: "_Describer") -> None:
        self.operations = other.operations | self.operations
        self.executed |= other.executed
        self.executes_all |= other.executes_all
        self.namespaces |= other.namespaces
        if other.names is not None:
            self.names = other.names | (self.names or set())

    def reads_state(self, function: Any) -> str:
        module = str(getattr(function, "__module__", ""))
        name = str(getattr(function, "__name__", ""))
        self.executes_all |= module in _EXECUTING_MODULES or name in _EXECUTING_NAMES
        if f"{module}.".startswith(tuple(f"{each}." for each in _STATEFUL_MODULES)):
            return "reads more than its arguments"
        return ""

    def check_names(self, names: Iterable[str]) -> None:
        super().check_names(names := tuple(names))
        if self.names is None:
            self.names = set()
        self.names.update(names)
        self.executes_all |= not _EXECUTING_NAMES.isdisjoint(names)
        if found := _STATEFUL_NAMES.intersection(names):
            raise UndescribableError(f"code reads {min(found)}")

    def check_attributes(self, code: CodeType, instructions: list[Instruction]) -> None:
        super().check_attributes(code, instructions)
        self.executes_all |= "target" in code.co_names and _calls_target(instructions)

    def special(self, value: Any) -> str | None:
        match value:
            case OpOverload() | OpOverloadPacket():
                return self._operation(value)
            case CustomOpDef():
                return self._operation(value._opoverload)
            case HigherOrderOperator():
                return self._operator(value)
            case torch.dtype() | torch.layout() | torch.memory_format() | torch.device():
                return repr(value)
            case torch.Tensor():
                return f"{_constant(value)} {self._state_of(value)}"
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
        for label, table in tables():  # `_operation` describes the user's entries
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
        return type(value).__name__ in {"_Ops", "_OpNamespace"}

    def _operator(self, operator: HigherOrderOperator) -> str:
        if not is_torchs_operator(operator):
            self.operations.setdefault(f"operator {operator}", operator)
        return f"operator {operator}"

    def record(self, target: Any, node: Node) -> None:
        """Record the operation that a node of a graph calls. Other targets have no effect."""
        match target:
            case OpOverload() | OpOverloadPacket():
                name, is_own = self._record(target)
                if is_own and not _has_unknown_input(node):
                    self.executed.add(name)
            case HigherOrderOperator():
                self._operator(target)

    def _record(self, operation: Any) -> tuple[str, bool]:
        """Return the name of an operation, and whether it is the user's."""
        packet = getattr(operation, "overloadpacket", operation)
        name = str(packet._qualified_op_name)
        is_own = not is_torchs_namespace(name) or name in self._of_program
        if is_own:
            self.operations.setdefault(name, packet)
        else:
            self.namespaces.add(name.partition("::")[0])
        return name, is_own

    def _operation(self, operation: Any) -> str:
        own = _attributes_of_program(operation)
        name, _ = self._record(operation)
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


class Registrations(NamedTuple):
    """The user's code that takes part in compiling every graph.

    Attributes:
        lines: descriptions of the code.
        describer: records the operations in the code.
    """

    lines: list[str]
    describer: _Describer


def registrations() -> Registrations:
    """Describe the user's code that takes part in compiling every graph.

    Raises:
        UndescribableError: some code has no description.
    """
    describer = _Describer()
    lines = [*_functions_of_settings(describer), *registered_for_torch(describer)]
    lines += replaced_in_torch(describer)
    return Registrations(lines, describer)


def user_code_of(
    graph: GraphModule,
    inputs: Iterable[Any],
    settings: Any = None,
    registered: Registrations | None = None,
) -> str:
    """Describe the user's code that takes part in compiling a graph.

    Args:
        graph: graph for AOTAutograd or for Inductor.
        inputs: fake inputs of the graph.
        settings: settings of AOTAutograd. None if the graph is for Inductor.
        registered: result of `registrations`, if the caller has it.

    Raises:
        UndescribableError: some code has no description.
    """
    describer = _Describer()
    inputs = list(inputs)
    lines = [line for each in inputs for line in _input(describer, each)]
    lines += _ranges(inputs)
    for module in graph.modules():
        if isinstance(module, GraphModule):
            lines += given_to_region(describer, module)
            for node in module.graph.nodes:
                lines += given_to_node(describer, node)
                lines += _node(describer, module, node, is_traced=settings is None)
    of_process = registered or registrations()
    lines += of_process.lines
    describer.add(of_process.describer)
    if settings is None:
        lines += _outputs(graph)
    else:
        # torch 2.7 omits which inputs keep their addresses, such as parameters.
        lines.append(f"static {getattr(settings, 'static_input_indices', None)}")
        lines += [*_relations(inputs), *compilers_of(describer, settings)]
    for definition in changed_definitions():
        packet = definition._opoverload.overloadpacket
        describer.operations.setdefault(packet._qualified_op_name, packet)
    lines += _operations(describer)
    lines += [
        f"library {digest}"
        for each in libraries()
        if any(each.registers_in(namespace) for namespace in sorted(describer.namespaces))
        for digest in needed_by(each)
    ]
    return "\n".join(lines)


def _operations(describer: _Describer) -> Iterator[str]:
    """Describe the recorded operations, the code that theirs reads from arguments, and so on."""
    described: set[str] = set()
    while True:
        operations = sorted(set(describer.operations) - described)
        read = () if describer.names is None else members_of_program(describer.names)
        members = [(place, value) for place, value in read if place not in described]
        if not operations and not members:
            kernels = {label: each for label, each in _needed(describer) if label not in described}
            described.update(kernels)
            for label, kernel in kernels.items():
                text = describer.registered(kernel.function)
                yield f"{label}={text} {kernel.with_keyset}"
            if not kernels:
                break
        described.update(operations, (place for place, _ in members))
        for name in operations:
            yield _operation(describer, describer.operations[name], name)
        for place, value in sorted(members, key=itemgetter(0)):
            try:
                yield f"{place}={describer.describe(value)}"
            except UndescribableError as error:
                raise UndescribableError(f"{place}: {error}") from error


def _needed(describer: _Describer) -> Iterator[tuple[str, Kernel]]:
    """Yield the kernels on which a compilation depends, of the operations recorded so far."""
    for name, operation in describer.operations.items():
        if isinstance(operation, OpOverloadPacket):
            is_executed = describer.executes_all or name in describer.executed
            yield from _kernels(operation, is_executed=is_executed)


def _relations(inputs: list[Any]) -> Iterator[str]:
    """Describe the properties of inputs that AOTAutograd reads and torch's key omits.

    If a graph mutates an input that shares memory with another one, AOTAutograd compiles both as
    views of one base, with their offsets. It compiles a mutation of a leaf, which has no history,
    differently. Kernels for GPUs may load from aligned addresses only, and do not check those of
    parameters.
    """
    storages: dict[int, list[int]] = {}
    bases: dict[int, int] = {}
    for at, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.requires_grad and not tensor.is_leaf:
            yield f"history {at}"
        if tensor.device.type in GPUS and not tensor_is_aligned(tensor):
            yield f"not aligned {at}"
        if tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor):
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(at)
            bases.setdefault(id(_base(tensor)), at)
    for places in storages.values():
        for at in places if len(places) > 1 else ():
            tensor, first = inputs[at], inputs[places[0]]
            base = _base(tensor)
            yield (
                f"memory {at} of {places[0]}, base of {bases[id(base)]}, same {tensor is first}, "
                f"offset {tensor.storage_offset()}, base {base.dtype} {base.shape} {base.stride()} "
                f"{base.storage_offset()} {base.requires_grad} of {base.untyped_storage().nbytes()}"
            )


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _ranges(inputs: list[Any]) -> Iterator[str]:
    """Describe the ranges of dynamic sizes, in the order of the inputs.

    An executable is right only within its range, and its guards contain the range.
    """
    found: dict[Any, Any] = {}
    for each in inputs:
        for size in each.shape if isinstance(each, torch.Tensor) else (each,):
            if isinstance(size, torch.SymInt):
                ranges = size.node.shape_env.var_to_range
                found |= {symbol: ranges.get(symbol) for symbol in _symbols(size)}
    yield from (f"range {number} {each}" for number, each in enumerate(found.values()))


def _symbols(size: torch.SymInt) -> list[Any]:
    return sorted(size.node.expr.free_symbols, key=str)


def _input(describer: _Describer, value: Any) -> Iterator[str]:
    known = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator)
    if value is not None and not isinstance(value, (*known, int, float, complex, str)):
        yield _opaque(describer, getattr(value, "real_obj", value))
        return
    if not isinstance(value, torch.Tensor) or describer.is_known(type(value).__module__):
        if hasattr(value, "device_mesh") and not _has_stable_key(value):
            raise UndescribableError("torch's key of a DTensor's mesh differs in each process")
        return
    if not is_traceable_wrapper_subclass(value):
        raise UndescribableError(f"an input is a {type(value).__qualname__}")
    names, context = value.__tensor_flatten__()
    yield f"input {describer.describe(type(value))} {names} {describer.describe(context)}"
    for name in names:
        yield from _input(describer, getattr(value, name))


def _opaque(describer: _Describer, value: Any) -> str:
    """Describe an opaque object that a graph gets as an input, which fake kernels may read.

    Since torch 2.11, a graph may get a constant object. Objects that may change are refused.
    """
    kind = type(value)
    opaque = getattr(torch._library, "opaque_object", None)  # since 2.10
    names = ("is_opaque_constant_type", "is_opaque_value_type")  # the second one until 2.13
    is_value = next((getattr(opaque, each) for each in names if hasattr(opaque, each)), None)
    if is_value is None or not is_value(kind) or not hasattr(value, "__dict__"):
        raise UndescribableError(f"an input is a {kind.__qualname__}")
    return f"opaque {describer.describe(kind)} {describer.describe(vars(value))}"


def _has_stable_key(value: Any) -> bool:
    """Return whether torch's key of a DTensor is equal in every process.

    torch 2.7 hashes strings into the key. In torch 2.15, a mesh that is an input of the graph
    enters the graph's key by its address.
    """
    return (
        hasattr(value, "_stable_hash_for_caching")
        and "device_mesh" not in (value.__tensor_flatten__()[0])
    )


def _node(
    describer: _Describer, module: GraphModule, node: Node, *, is_traced: bool
) -> Iterator[str]:
    """Describe the code and constants of a node that torch's key omits."""
    if node.op == "call_function":
        yield from _target(describer, node.target, node)
        if not isinstance(node.target, OpOverload):
            yield from _arguments(describer, node)
        if "kernel_idx" in node.kwargs:  # a Triton kernel in a table of this process
            numbers: dict[str, Any] = dict(node.kwargs)
            kernel = kernel_side_table.get_kernel(numbers["kernel_idx"])
            constants = kernel_side_table.get_constant_args(numbers["constant_args_idx"])
            yield f"kernel {describer.describe(kernel)} {describer.describe(constants)}"
    elif node.op == "get_attr":
        value = _attribute(module, str(node.target))
        if not isinstance(value, torch.Tensor):
            pass
        elif is_traced and is_frozen_param(value):
            # torch's key contains few values of frozen parameters. Inductor writes others into
            # code, and stores in the entry what it computes from them, such as packed weights.
            yield f"frozen {_constant(value.detach(), most=value.numel())}"
        elif not (is_traced or _is_input(module, value)):
            yield f"constant {_constant(value, most=_MAX_CONSTANT)}"
    elif node.op == "call_module":
        called = module.get_submodule(str(node.target))
        if not isinstance(called, GraphModule):
            yield from _module(describer, called)


def _target(describer: _Describer, target: Any, node: Node) -> Iterator[str]:
    """Describe a function of which torch's key contains only the name."""
    describer.record(target, node)
    if isinstance(target, OpOverload):
        if target in _side_effectful_functions and target not in _SIDE_EFFECTS_OF_TORCH:
            yield f"kept {target}"
    elif isinstance(target, FunctionType) and not is_torchs(target):
        root = target.__module__.partition(".")[0]
        known = f"{root} {version_of(root)}" if root in _KNOWN_TO_TORCH else ""
        yield f"function {known or describer.registered(target)}"


def _arguments(describer: _Describer, node: Node) -> Iterator[str]:
    """Describe what a higher-order operator gets, such as the operation that it wraps.

    Inductor's graphs wrap an operation that changes its arguments in `auto_functionalized_v2`.
    """
    # Most arguments are nodes, and `tree_leaves` is slow.
    given = [each for each in (*node.args, *node.kwargs.values()) if not isinstance(each, Node)]
    for value in tree_leaves(given) if given else ():
        if isinstance(value, OpOverload | OpOverloadPacket | HigherOrderOperator | FunctionType):
            yield from _target(describer, value, node)
        elif callable(value) and not isinstance(value, Node) and not is_torchs(value):
            yield f"argument {describer.registered(value)}"


def _is_input(module: GraphModule, value: torch.Tensor) -> bool:
    """Return whether AOTAutograd makes an attribute an input, which it compiles for any values."""
    lifted = (*module.parameters(), *module.buffers())
    return isinstance(value, FakeTensor) or any(each is value for each in lifted)


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _module(describer: _Describer, called: torch.nn.Module) -> Iterator[str]:
    for each in called.modules():
        yield describer.describe(type(each))
        for name, hooks in vars(each).items():
            if name.endswith("_hooks") and hooks:
                yield f"{name} {describer.describe(list(hooks.values()))}"


def _outputs(graph: GraphModule) -> Iterator[str]:
    """Describe facts of the surrounding compilation that Inductor reads and torch's key omits.

    Inductor keeps the strides of outputs that the user sees. In a backward graph, it reuses the
    memory of donated inputs: saved tensors without other references.
    """
    meta = graph.graph.find_nodes(op="output")[0].meta if hasattr(graph, "graph") else {}
    context = TracingContext.try_get()
    donated = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
    for name in ("user_visible_output_idxs", "original_output_strides"):
        yield f"{name}={meta.get(name)}"
    yield f"donated={donated}"


def _functions_of_settings(describer: _Describer) -> Iterator[str]:
    for module in (config, functorch_config):
        for name in _names_of_functions(module):
            value = getattr(module, name, None)
            for each in value if isinstance(value, list | tuple) else [value]:
                if each is not None and type(each) not in (bool, int, float, str):
                    yield f"{name}={describer.registered(each)}"


_UNDECLARED: Final = frozenset(
    {
        *("activation_memory_budget_runtime_estimator", "activation_memory_budget_solver"),
        *("custom_partitioner_fn", "estimate_op_runtime"),
        "reorder_for_compute_comm_overlap_passes",
    }
)
"""Settings that may be functions, although torch declares them as something else."""


@cache
def _names_of_functions(module: Any) -> tuple[str, ...]:
    """Return the names of those of torch's settings that can be functions or objects."""
    return tuple(
        name
        for name, entry in module._config.items()
        if not name.startswith("trace.")
        and (
            any(word in str(entry.value_type) for word in ("Callable", "Pass", "type[", "Any"))
            or name in _UNDECLARED
        )
    )


def _operation(describer: _Describer, packet: Any, name: str) -> str:
    """Describe all registrations for one of the user's operations."""
    if isinstance(packet, HigherOrderOperator):
        called = describer.describe(type(packet))
        own = {key: each for key, each in vars(packet).items() if key not in _OF_OPERATORS}
        kernels = [
            f"{getattr(key, '__qualname__', key)}={describer.registered(kernel)}"
            for key, kernel in kernels_of_operator(packet)
        ]
        return "\n".join([name, called, describer.describe(own), *kernels])
    overloads = [getattr(packet, each) for each in packet.overloads()]
    found = [f"operation {name}", *(f"{each._schema} {each.tags}" for each in overloads)]
    found += [_handling(describer, each) for each in overloads]
    definition = custom_ops.OPDEFS.get(name)
    if definition is not None:
        found += _definition(describer, definition)
    for overload in overloads:
        if definition is None:
            found.append(_fake(describer, overload))
        kernels = overload.py_kernels.items()
        found += [f"{key}={describer.registered(kernel)}" for key, kernel in kernels]
    for label, table in tables():
        given = [table[each] for each in (packet, *overloads) if each in table]
        found += [
            f"{label}={describer.registered(each)}"
            for each in given
            if label == OF_USER or not is_torchs(each)
        ]
    if definition is None:
        in_python = all(each.name() in library._defs for each in overloads)
        found += _libraries_with(name, is_required=not in_python)
    return "\n".join(found)


def _handling(describer: _Describer, operation: OpOverload) -> str:
    """Describe how graph passes and Inductor treat an operation.

    When Inductor compiles an operation without a layout constraint, it registers its default. A
    process with only hits never does. To get equal keys, describe the default like no constraint.
    """
    known = getattr(lowering, "_maybe_layout_constraints", {})
    constraint = known.get(operation)
    is_usual = constraint in (None, *_usual_constraints(operation))
    layout = "" if is_usual else describer.registered(constraint)
    read = getattr(effects, "_get_effect", None)
    effect = effects.SIDE_EFFECTS.get(operation) if read is None else read(operation)
    has_effect = operation in _side_effectful_functions
    return f"effect {effect} {has_effect} layout {layout}"


def _usual_constraints(operation: OpOverload) -> Iterator[Any]:
    """Yield Inductor's default layout constraint for an operation, by its tag."""
    tag = lowering.get_layout_constraint_tag(operation)
    chosen = getattr(lowering, "tag_to_layout_constraint", None)
    if chosen is not None:
        yield chosen(tag)
    elif tag is torch._C.Tag.needs_fixed_stride_order:  # 2.7
        yield lowering.constrain_to_fx_strides


def _definition(describer: _Describer, definition: CustomOpDef) -> Iterator[str]:
    for name, value in vars(definition).items():
        if name in _BACK_REFERENCES:
            continue
        if callable(value):
            yield f"{name}={describer.registered(value)}"
        elif value is not None and name in _TYPES_OF_AUTOCAST:
            yield f"{name}={type_of_autocast(definition, _TYPES_OF_AUTOCAST[name])}"
        elif isinstance(value, dict):
            for key, each in value.items():
                text = describer.registered(each) if callable(each) else describer.describe(each)
                yield f"{name}.{getattr(key, '__qualname__', key)}={text}"
        else:
            yield f"{name}={describer.describe(value)}"


def _kernels(packet: OpOverloadPacket, *, is_executed: bool) -> Iterator[tuple[str, Kernel]]:
    """Yield the labeled Python kernels of an operation that torch has no means to look up.

    torch gives back only the kernels of a `CustomOpDef` and fake kernels. `recorded` has others, if
    their number is what the dispatcher lists. Since 2.8, a library may replace kernels. The
    dispatcher then lists the replaced kernel as inactive. It also does if a `CustomOpDef` replaces
    its own kernel, which is allowed: both come from one place in torch.

    An executable calls an operation's kernel for one device, or for all, by the operation's name. A
    compilation does not depend on it if there is a fake kernel and it does not execute it:
    it executes pointwise operations on constants, and any operation while it freezes a graph, or in
    a pass of the user that folds constants or calls the target of a node.

    Raises:
        UndescribableError: the operation has such a kernel, which was not recorded.
    """
    definition = custom_ops.OPDEFS.get(str(packet._qualified_op_name))
    for each in packet.overloads():
        overload = getattr(packet, each)
        keys = _unknown_kernels(overload, definition)
        has_fake = definition is not None or _has_fake(overload)
        may_run = is_executed or torch.Tag.pointwise in overload.tags
        # Whether torch takes it apart before it computes gradients depends on the other kernels.
        may_run |= overload.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
        if not may_run and (has_fake or can_generate_trivial_fake_impl(overload)):
            # torch first tries the kernel for all devices before it makes a trivial fake one.
            unused = _DEVICES | {"CompositeExplicitAutograd"} if has_fake else _DEVICES
            keys = [key for key in keys if key not in unused]
        for key in sorted(set(keys)):
            name = overload.name()
            kernels = kernels_by_library(name, key)
            listed = torch._C._dispatch_dump(name).splitlines()
            count = sum(re.match(rf"{key}\b", line) is not None for line in listed)
            if len(kernels) != count or (key == "Meta" and fakes_of(name)):
                raise UndescribableError(f"torch does not give back the {key} kernel of {name}")
            for number, kernel in enumerate(kernels):
                yield f"{name} {key} {number}", kernel


def _unknown_kernels(operation: OpOverload, definition: CustomOpDef | None) -> list[str]:
    """Return the dispatch keys of an operation's Python kernels that torch cannot look up."""
    name = operation.name()
    fakes = len(fakes_of(name)) if definition is None else 1
    place = name.replace("::", "/") + "/"
    known = set() if definition is None else {*definition._lib._op_impls}
    listed = torch._C._dispatch_dump(name).splitlines()
    known.discard(f"{place}Meta")
    if fakes == sum(line.startswith("Meta") for line in listed):
        known.add(f"{place}Meta")
    keys = [
        each.removeprefix(place) or "CompositeImplicitAutograd"
        for each in library._impls - known
        if each.startswith(place)
    ]
    found = [line.partition(" :: ")[0].partition(": ") for line in listed]
    places = {label: where for label, _, where in found}
    for label, _, where in found:
        key, _, rest = label.partition(" ")
        is_own = definition is not None and where == places.get(key) == places.get("debug")
        if rest == "(inactive)" and not is_own and (key != "Meta" or f"{place}Meta" not in known):
            keys.append(key.removesuffix("[alias]"))
    return keys


def _has_fake(operation: OpOverload) -> bool:
    """Return whether a program registered a fake kernel for an operation."""
    name = operation.name()
    return bool(fakes_of(name) or kernels_by_library(name, "Meta"))


def _executes_all() -> bool:
    """Return whether a compilation may execute every operation, on real tensors."""
    return bool(config.freezing or functorch_config.fake_tensor_propagate_real_tensors)


_DEVICES: Final = frozenset({"CPU", "CUDA", "HPU", "MPS", "MTIA", "PrivateUse1", "XPU"})
"""Dispatch keys of kernels that compute on one kind of device."""


def _fake(describer: _Describer, operation: OpOverload) -> str:
    described = [describer.registered(each) for each in fakes_of(operation.name())]
    entry = simple_registry.singleton._data.get(operation.name())
    rules = {} if entry is None else vars(entry.torch_dispatch_rules).get("_data", {})
    described += [f"{cls.__qualname__}={describer.registered(rule)}" for cls, rule in rules.items()]
    return f"fake={described}"


def _constant(tensor: torch.Tensor, *, most: int = _MAX_VALUES) -> str:
    if type(tensor) is not torch.Tensor:
        raise UndescribableError(f"a tensor of the class {type(tensor).__qualname__}")
    if tensor.is_meta:
        raise UndescribableError("a tensor without elements, on the device meta")
    if tensor.numel() > most:
        raise UndescribableError(f"a tensor of {tensor.numel()} elements, more than {most}")
    if tensor.numel() > _MAX_VALUES and tensor.layout is torch.strided:
        whole = tensor.detach().cpu().contiguous()
        content = (ctypes.c_char * whole.nbytes).from_address(whole.data_ptr())
        digest = hashlib.sha256(content).hexdigest()
        return f"tensor {tensor.dtype} {tensor.device} {tensor.shape} {tensor.stride()} {digest}"
    values = f"{tensor.shape} {tensor.stride()} {tensor.tolist()}"
    return f"tensor {tensor.dtype} {tensor.device} {values}"


def _libraries_with(name: str, *, is_required: bool) -> list[str]:
    """Describe the loaded libraries that mention an operation, and their dependencies.

    Raises:
        UndescribableError: `is_required`, and no library mentions it.
    """
    found = {
        f"library {digest}"
        for each in libraries()
        if each.mentions(name)
        for digest in needed_by(each)
    }
    if is_required and not found:
        raise UndescribableError(f"{name} is defined in C++, by a library without a file")
    return sorted(found)
