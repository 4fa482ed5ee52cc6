"""Code of the user that takes part in a compilation, and that torch's keys know by name at most.

torch computes the key of a graph before it traces the graph, and names a custom operation in it.
What runs behind the name is here: kernels, the fake kernel, the backward pass, the types of
autocast, `vmap`, lowerings, decompositions, graph passes, and the files of C++ libraries. Only
operations that the graph names count, and those that their code names. Replacements of torch's own
lowerings and decompositions count always. Code without a description makes a graph unshareable.
"""

import hashlib
import inspect
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, Final

import torch
from torch import library
from torch._decomp import global_decomposition_table
from torch._functorch import config as functorch_config
from torch._inductor import config, lowering
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import decompositions
from torch._library import custom_ops, simple_registry
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule

from graphstash.hooks.code import CodeDescriber, UndescribableError

__all__ = ["user_code_of"]

_OWN: Final = frozenset(
    {
        *("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_inductor_test", "_native"),
        *("_quantized", "_test", "aten", "c10d", "c10d_functional", "debugprims", "export"),
        *("flex_lib", "fsdp", "higher_order", "inductor", "mempool", "mkl", "mkldnn"),
        *("mkldnn_prepacked", "onednn", "onnx", "onnx_symbolic", "prepacked", "prim", "prims"),
        *("profiler", "quantization", "quantized", "quantized_decomposed", "rngprims", "sparse"),
        *("static_runtime", "streams", "symm_mem"),
    }
)
"""Namespaces of operations that torch 2.7 and 2.15 bring."""

_OF_DEFINITION: Final = frozenset({"_lib", "_opoverload", "_namespace", "_name"})
"""Attributes of a `CustomOpDef` that lead back to the operation."""

_KEYS_OF_DEFINITION: Final = frozenset(
    {
        *("ADInplaceOrView", "Autograd", "AutocastCPU", "AutocastCUDA", "AutocastXPU"),
        *("BackendSelect", "CompositeExplicitAutograd", "FuncTorchBatched", "Meta"),
    }
)
"""Dispatch keys that a `CustomOpDef` fills from its attributes."""

_PASSES: Final = (
    *("_fuse_ddp_communication_passes", "_post_fusion_custom_pass", "_pre_fusion_custom_pass"),
    *("custom_partitioner_fn", "joint_custom_post_pass", "joint_custom_pass"),
    *("joint_custom_pre_pass", "post_grad_custom_post_pass", "post_grad_custom_pre_pass"),
    *("pre_grad_custom_pass", "reorder_for_compute_comm_overlap_passes"),
)
"""Settings of Inductor and AOTAutograd that hold functions."""

_FUNCTIONS: Final = torch._C._VariableFunctions
"""The class whose static methods are torch's functions."""

_MAX_VALUES: Final = 4096
"""Elements of a constant tensor in a description."""


class _Describer(CodeDescriber):
    """Describes torch's values; notes the operations that it meets."""

    def __init__(self) -> None:
        super().__init__("torch", "triton")
        self.operations: dict[str, Any] = {}

    def special(self, value: Any) -> str | None:
        match value:
            case OpOverload() | OpOverloadPacket():
                return self._operation(value)
            case CustomOpDef():
                return self._operation(value._opoverload)
            case torch.dtype() | torch.layout() | torch.memory_format() | torch.device():
                return repr(value)
            case torch.Tensor():
                return _constant(value)
        return self._special_code(value)

    def _special_code(self, value: Any) -> str | None:
        if isinstance(value, BuiltinFunctionType) and value.__self__ is _FUNCTIONS:
            return f"torch.{value.__name__}"
        for label, table in _tables():  # what a user put there is described with the graph
            if value is table:
                return label
        if isinstance(value, CustomGraphPass):
            return f"pass {value.uuid()!r} {self.describe(type(value))}"
        return None

    def is_path(self, value: Any) -> bool:
        return type(value).__name__ in {"_Ops", "_OpNamespace"}

    def _operation(self, operation: Any) -> str:
        packet = getattr(operation, "overloadpacket", operation)
        name = str(packet._qualified_op_name)
        if name.partition("::")[0] not in _OWN:
            self.operations.setdefault(name, packet)
        return f"operation {name} {getattr(operation, '_overloadname', '')}"


def user_code_of(graph: GraphModule, inputs: Iterable[Any]) -> str:
    """Describe the code of the user that takes part in compiling a graph; empty for most graphs.

    Raises:
        UndescribableError: some of it has no description.
    """
    for each in inputs:
        if _is_opaque(each):
            raise UndescribableError(f"an input is a {type(each).__qualname__}")
    describer = _Describer()
    for target in _targets(graph):
        describer.special(target)
    lines = [*_passes(describer), *_replacements(describer)]
    described: set[str] = set()
    while remaining := sorted(set(describer.operations) - described):
        described.update(remaining)
        lines += [_operation(describer, describer.operations[name], name) for name in remaining]
    return "\n".join(lines)


def _targets(graph: GraphModule) -> Iterator[Any]:
    for module in graph.modules():
        if isinstance(module, GraphModule):
            yield from (node.target for node in module.graph.nodes if node.op == "call_function")


def _is_opaque(value: Any) -> bool:
    known = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator)
    return value is not None and not isinstance(value, (*known, int, float, complex, str))


def _passes(describer: _Describer) -> Iterator[str]:
    for module in (config, functorch_config):
        for name in _PASSES:
            value = getattr(module, name, None)
            for each in value if isinstance(value, list | tuple) else [value]:
                if each is not None and not isinstance(each, str):
                    yield f"{name}={describer.registered(each)}"


def _replacements(describer: _Describer) -> Iterator[str]:
    """Lowerings and decompositions of torch's own operations that are not torch's."""
    for label, table in _tables():
        if set(map(id, table.values())) <= _torchs.keys():  # a graph costs a tenth of a millisecond
            continue
        for target, function in table.items():
            if _is_torchs(function):
                _torchs[id(function)] = function
            elif _is_torchs_operation(target):
                yield f"{label} {target}={describer.registered(function)}"


_torchs: Final[dict[int, Any]] = {}
"""Functions of torch in its tables, by id; kept alive, so that no other function gets the id."""


def _tables() -> Iterator[tuple[str, Any]]:
    yield "lowering", lowering.lowerings
    yield "decomposition", decompositions
    for name, table in global_decomposition_table.items():
        yield f"decomposition.{name}", table


def _is_torchs(function: Any) -> bool:
    while (inner := _inside(function)) is not None:
        function = inner
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0] == "torch"


def _inside(function: Any) -> Any:
    """The function that another one wraps; None when it wraps none."""
    if isinstance(function, partial):
        return function.func
    return getattr(function, "__wrapped__", None)


def _is_torchs_operation(target: Any) -> bool:
    namespace = getattr(target, "namespace", None) or getattr(target, "_qualified_op_name", "")
    return str(namespace).partition("::")[0] in _OWN


def _operation(describer: _Describer, packet: Any, name: str) -> str:
    """Everything that is registered for one operation of a user."""
    overloads = [getattr(packet, each) for each in packet.overloads()]
    found = [f"operation {name}", *(f"{each._schema} {each.tags}" for each in overloads)]
    definition = custom_ops.OPDEFS.get(name)
    _check_kernels(name, definition)
    entry = simple_registry.singleton._data.get(name)
    if definition is not None:
        found += _definition(describer, definition)
    elif entry is not None:
        found.append(_fake(describer, entry))
    for overload in overloads:
        kernels = overload.py_kernels.items()
        found += [f"{key}={describer.registered(kernel)}" for key, kernel in kernels]
    for label, table in _tables():
        given = [table[each] for each in (packet, *overloads) if each in table]
        found += [f"{label}={describer.registered(each)}" for each in given if not _is_torchs(each)]
    if definition is None:
        found += _libraries(name, is_required=name not in library._defs)
    return "\n".join(found)


def _definition(describer: _Describer, definition: CustomOpDef) -> Iterator[str]:
    for name, value in vars(definition).items():
        if name in _OF_DEFINITION:
            continue
        if callable(value):
            yield f"{name}={describer.registered(value)}"
        elif isinstance(value, dict):
            for key, each in value.items():
                told = describer.registered(each) if callable(each) else describer.describe(each)
                yield f"{name}.{getattr(key, '__qualname__', key)}={told}"
        else:
            yield f"{name}={describer.describe(value)}"


def _check_kernels(name: str, definition: CustomOpDef | None) -> None:
    """Refuse an operation with a kernel in Python that torch gives back to nobody.

    Raises:
        UndescribableError: there is one.
    """
    known: set[str] = set()
    if definition is not None:
        known = {*_KEYS_OF_DEFINITION, *(str(key).upper() for key in definition._backend_fns)}
    elif name in simple_registry.singleton._data:
        known = {"Meta"}
    place = name.replace("::", "/")
    for each in library._impls:
        owner, _, key = each.rpartition("/")
        if owner.startswith(place) and owner.partition(".")[0] == place and key not in known:
            raise UndescribableError(f"torch does not give back the {key} kernel of {name}")


def _fake(describer: _Describer, entry: Any) -> str:
    held = vars(entry.fake_impl)
    kernels = [*_list_of(held.get("kernel")), *_list_of(held.get("kernels"))]
    told = [describer.registered(_unchecked(each.func)) for each in kernels]
    rules = vars(entry.torch_dispatch_rules).get("_data", {})
    told += [f"{cls.__qualname__}={describer.registered(rule)}" for cls, rule in rules.items()]
    return f"fake={told}"


def _unchecked(function: Any) -> Any:
    """The fake kernel inside of torch's wrapper, which notes in a closure that it was called."""
    if getattr(function, "__qualname__", "") != "_check_pystubs_once.<locals>.inner":
        return function
    return inspect.getclosurevars(function).nonlocals["func"]


def _list_of(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _constant(tensor: torch.Tensor) -> str:
    if type(tensor) is not torch.Tensor or tensor.numel() > _MAX_VALUES or tensor.is_meta:
        raise UndescribableError(f"a tensor of {tensor.numel()} elements")
    return f"tensor {tensor.dtype} {tensor.device} {tensor.stride()} {tensor.tolist()}"


def _libraries(name: str, *, is_required: bool) -> list[str]:
    """Digests of the loaded libraries that mention an operation.

    Raises:
        UndescribableError: there is none, but the operation is not defined in Python.
    """
    found = []
    for path in _loaded_libraries():
        try:
            status = path.stat()
        except OSError:  # it was replaced or deleted
            continue
        if digest := _digest_if_mentions(path, status.st_mtime_ns, status.st_size, name):
            found.append(f"library {digest}")
    if is_required and not found:
        raise UndescribableError(f"{name} is defined in C++, by a library without a file")
    return sorted(found)


@lru_cache(maxsize=4096)
def _digest_if_mentions(path: Path, _changed_ns: int, _size: int, name: str) -> str:
    content = path.read_bytes()
    if all(word.encode() in content for word in name.split("::")):
        return hashlib.sha256(content).hexdigest()
    return ""


def _loaded_libraries() -> list[Path]:
    """Files of the shared libraries in this process but for torch's and the system's."""
    own = f"{Path(torch.__file__).parent}{os.sep}"
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if " r-xp " in line and "/" in line}
    system = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/")
    return [
        Path(path)
        for path in sorted(paths)
        if not path.startswith(own) and ("-packages/" in path or not path.startswith(system))
    ]
