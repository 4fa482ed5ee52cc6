"""Describe what a program attaches to parts of a graph, and torch's key of the graph omits."""

from collections.abc import Iterator
from typing import Final

from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from graphstash.hooks.code import CodeDescriber
from graphstash.hooks.inductor.origins import is_torchs_namespace

__all__ = ["given_to_node", "given_to_region"]

_OF_REGION: Final = ("_checkpoint_context_fn", "nested_region_config")
"""What to keep for the backward pass, and the options of a region. torch 2.15 identifies the first
one by a hash that the program states."""

_COUNTED_BY_TORCH: Final = "call_id"
"""An annotation that torch itself makes. It differs in each process, and pairs two operations."""


def given_to_region(describer: CodeDescriber, module: GraphModule) -> Iterator[str]:
    """Describe the code and options that a program gives to a part of its graph."""
    of_module = getattr(module, "meta", None) or {}
    for name in _OF_REGION:
        if (given := of_module.get(name)) is not None:
            yield f"{name}={describer.registered(given)}"


def given_to_node(describer: CodeDescriber, node: Node) -> Iterator[str]:
    """Describe the annotations of an operation, and the classes of the objects that it gets.

    Programs annotate with `torch.fx.traceback.annotate`, and Inductor reads some names, such as
    `fallback_to_eager`. In torch 2.15, an operation of the program may get an object. The graph
    contains its value, and a fake kernel may call its methods.
    """
    for name, value in sorted((node.meta.get("custom") or {}).items()):
        if name != _COUNTED_BY_TORCH:
            yield f"annotation of {node.name} {name}={describer.describe(value)}"
    target = node.target
    if not isinstance(target, OpOverload) or is_torchs_namespace(target.namespace):
        return
    for each in map(type, tree_leaves([node.args, node.kwargs])):
        if each.__module__ != "builtins" and not describer.is_known(each.__module__):
            yield f"object {describer.describe(each)}"
