"""Describe the code and constants in the nodes of a graph that torch's key omits."""

from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final

import torch
from torch._guards import TracingContext
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.freezing_utils import is_frozen_param
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.node import _side_effectful_functions
from torch.utils._pytree import tree_leaves

from graphstash.hooks.environment import version_of
from graphstash.hooks.inductor.describer import Describer, describe_constant
from graphstash.hooks.inductor.origins import is_torchs

__all__ = ["node_lines", "output_lines"]

_SIDE_EFFECTS_OF_TORCH: Final = frozenset(_side_effectful_functions)
"""Functions that torch kept in graphs although their results are unused, when this module was
imported. `_target_lines` describes later ones, which are the user's."""

_KNOWN_TO_TORCH: Final = frozenset({"einops"})
"""Packages whose functions torch's AOTAutograd cache accepts, and identifies by name."""

_MAX_CONSTANT: Final = 64 * 1024**2
"""Maximum elements of a constant tensor in a graph, described by digest."""


def node_lines(
    describer: Describer, module: GraphModule, node: Node, *, is_traced: bool
) -> Iterator[str]:
    """Describe the code and constants of a node that torch's key omits."""
    if node.op == "call_function":
        yield from _target_lines(describer, node.target, node)
        if not isinstance(node.target, OpOverload):
            yield from _argument_lines(describer, node)
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
            # torch's key omits most values of frozen parameters. Inductor writes some of these
            # values into the code, and stores others in the entry, such as packed weights.
            yield f"frozen {describe_constant(value.detach(), most=value.numel())}"
        elif not (is_traced or _is_input(module, value)):
            yield f"constant {describe_constant(value, most=_MAX_CONSTANT)}"
    elif node.op == "call_module":
        called = module.get_submodule(str(node.target))
        if not isinstance(called, GraphModule):
            yield from _module_lines(describer, called)


def _target_lines(describer: Describer, target: Any, node: Node) -> Iterator[str]:
    """Describe a function that torch's key identifies only by its name."""
    describer.record(target, node)
    if isinstance(target, OpOverload):
        if target in _side_effectful_functions and target not in _SIDE_EFFECTS_OF_TORCH:
            yield f"kept {target}"
    elif isinstance(target, FunctionType) and not is_torchs(target):
        root = target.__module__.partition(".")[0]
        known = f"{root} {version_of(root)}" if root in _KNOWN_TO_TORCH else ""
        yield f"function {known or describer.registered(target)}"


def _argument_lines(describer: Describer, node: Node) -> Iterator[str]:
    """Describe what a higher-order operator gets, such as the operation that it wraps.

    Inductor's graphs wrap an operation that changes its arguments in `auto_functionalized_v2`.
    """
    # Most arguments are nodes, and `tree_leaves` is slow.
    given = [each for each in (*node.args, *node.kwargs.values()) if not isinstance(each, Node)]
    for value in tree_leaves(given) if given else ():
        if isinstance(value, OpOverload | OpOverloadPacket | HigherOrderOperator | FunctionType):
            yield from _target_lines(describer, value, node)
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


def _module_lines(describer: Describer, called: torch.nn.Module) -> Iterator[str]:
    for each in called.modules():
        yield describer.describe(type(each))
        for name, hooks in vars(each).items():
            if name.endswith("_hooks") and hooks:
                yield f"{name} {describer.describe(list(hooks.values()))}"


def output_lines(graph: GraphModule) -> Iterator[str]:
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
