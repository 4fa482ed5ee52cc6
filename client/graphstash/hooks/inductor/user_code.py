"""Describe the user's code in a compilation. torch's keys contain at most its name.

torch computes the key of a graph before tracing, and the key only names a custom operation. This
module describes the code behind the name: kernels, the fake kernel, the backward pass, the types of
autocast, `vmap`, lowerings, decompositions, graph passes, and the files of C++ libraries. It covers
the operations in the graph, the operations in their code, and so on, and every replacement of
torch's own lowerings and decompositions. A graph with code that has no description is not shared.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch.fx import GraphModule

from graphstash.hooks.code import UndescribableError
from graphstash.hooks.inductor.describer import Describer
from graphstash.hooks.inductor.given import given_to_node, given_to_region
from graphstash.hooks.inductor.inputs import describe_ranges, describe_relations, input_lines
from graphstash.hooks.inductor.kernels import changed_definitions
from graphstash.hooks.inductor.libraries import libraries, needed_by
from graphstash.hooks.inductor.nodes import node_lines, output_lines
from graphstash.hooks.inductor.operations import operation_lines
from graphstash.hooks.inductor.registries import compilers_of, registered_for_torch
from graphstash.hooks.inductor.replaced import replaced_in_torch

__all__ = ["Registrations", "registrations", "user_code_of"]

_UNDECLARED: Final = frozenset(
    {
        *("activation_memory_budget_runtime_estimator", "activation_memory_budget_solver"),
        *("custom_partitioner_fn", "estimate_op_runtime"),
        "reorder_for_compute_comm_overlap_passes",
    }
)
"""Settings that may be functions, although torch declares them as something else."""


class Registrations(NamedTuple):
    """The user's code that takes part in compiling every graph.

    Attributes:
        lines: descriptions of the code.
        describer: records the operations in the code.
    """

    lines: list[str]
    describer: Describer


def registrations() -> Registrations:
    """Describe the user's code that takes part in compiling every graph.

    Raises:
        UndescribableError: some code has no description.
    """
    describer = Describer()
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
    describer = Describer()
    inputs = list(inputs)
    lines = [line for each in inputs for line in input_lines(describer, each)]
    lines += describe_ranges(inputs)
    for module in graph.modules():
        if isinstance(module, GraphModule):
            lines += given_to_region(describer, module)
            for node in module.graph.nodes:
                lines += given_to_node(describer, node)
                lines += node_lines(describer, module, node, is_traced=settings is None)
    of_process = registered or registrations()
    lines += of_process.lines
    describer.add(of_process.describer)
    if settings is None:
        lines += output_lines(graph)
    else:
        # torch 2.7 omits which inputs keep their addresses, such as parameters.
        lines.append(f"static {getattr(settings, 'static_input_indices', None)}")
        lines += [*describe_relations(inputs), *compilers_of(describer, settings)]
    for definition in changed_definitions():
        packet = definition._opoverload.overloadpacket
        describer.operations.setdefault(packet._qualified_op_name, packet)
    lines += operation_lines(describer)
    lines += [
        f"library {digest}"
        for each in libraries()
        if any(each.registers_in(namespace) for namespace in sorted(describer.namespaces))
        for digest in needed_by(each)
    ]
    return "\n".join(lines)


def _functions_of_settings(describer: Describer) -> Iterator[str]:
    if getattr(dynamo_config, "_custom_ops_profile", None) is not None:
        raise UndescribableError("the setting _custom_ops_profile replaces fake kernels")
    for module in (config, functorch_config):
        for name in _names_of_functions(module):
            value = getattr(module, name, None)
            for each in value if isinstance(value, list | tuple) else [value]:
                if each is not None and type(each) not in (bool, int, float, str):
                    yield f"{name}={describer.registered(each)}"


@cache
def _names_of_functions(module: Any) -> tuple[str, ...]:
    """Return the names of torch's settings that can be functions or objects."""
    return tuple(
        name
        for name, entry in module._config.items()
        if not name.startswith("trace.")
        and (
            any(word in str(entry.value_type) for word in ("Callable", "Pass", "type[", "Any"))
            or name in _UNDECLARED
        )
    )
