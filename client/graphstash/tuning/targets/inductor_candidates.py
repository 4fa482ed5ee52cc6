"""Describe Inductor's matrix products and their candidates as tuning problems and search spaces."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._inductor import config
from torch._inductor.virtualized import V

from graphstash.hooks.environment import cpu_model, read_part
from graphstash.tuning.memory.problem import Problem, word
from graphstash.tuning.space import Configuration
from graphstash.tuning.spaces.listed import ListedSpace
from graphstash.tuning.targets.torch_device import device_type_of

__all__ = ["CandidateSpace", "identity_of", "problem_of", "template_identity"]

_COUNTED: Final = re.compile(r"_\d+$")
"""Suffix by which torch numbers the kernels of a process."""


class CandidateSpace(ListedSpace):
    """The candidates for one product. No candidate has neighbours.

    Args:
        candidates: pairs of the parameters that identify a candidate, and the candidate.
        complete_for: templates whose candidates are all listed. The space then also contains every
            configuration of other templates. Default: it contains only the listed candidates.
    """

    def __init__(
        self,
        candidates: Iterable[tuple[Mapping[str, object], Any]],
        *,
        complete_for: frozenset[str] | None = None,
    ) -> None:
        super().__init__("inductor candidates", candidates)
        self._complete_for = complete_for

    def __contains__(self, configuration: object) -> bool:
        return super().__contains__(configuration) or self._is_of_another(configuration)

    def _is_of_another(self, configuration: object) -> bool:
        if self._complete_for is None or not isinstance(configuration, tuple):
            return False
        return dict(zip(self.names, configuration, strict=True))["template"] not in (
            self._complete_for
        )

    def has_types(self, configuration: Configuration) -> bool:
        """Return whether all values are strings."""
        return all(isinstance(each, str) for each in configuration)

    def describe(self) -> dict[str, Any]:
        """Describe the space without its candidates, which follow from parts of the problem."""
        return {"space": "inductor candidates"}


def problem_of(name: str, nodes: Sequence[Any]) -> Problem:
    """Return the tuning problem of a product.

    Args:
        name: name of the operation, e.g. `addmm`.
        nodes: operands in Inductor's graph. Dynamic sizes are replaced by their size hints.
    """
    sizevars: Any = V.graph.sizevars
    hints = sizevars.optimization_hints
    shapes = [hints(node.get_size()) for node in nodes]
    strides = [hints(node.get_stride()) for node in nodes]
    dtypes = [str(node.get_dtype()).removeprefix("torch.") for node in nodes]
    kind = nodes[-1].get_device().type
    return Problem(
        kernel=word(f"inductor.{name}"),
        shape=tuple(int(size) for shape in shapes for size in shape),
        dtype=word(",".join(dtypes)),
        layout=word(";".join("x".join(map(str, each)) for each in strides)),
        device_type=device_type_of(kind),
        compiler=f"torch {torch.__version__}",
        parts={
            "backends": config.max_autotune_gemm_backends,
            "candidates": config.max_autotune_gemm_search_space,
            "precision": read_part(_precision),
            "triton": read_part(_triton),
            **(_cpu_parts() if kind == "cpu" else {}),
        },
    )


def template_identity(choice: Any) -> dict[str, str]:
    """Identify a `KernelTemplateChoice` by its template and the template's parameters."""
    parameters = choice.params.to_serializeable_dict()
    if (source := getattr(choice.template, "src_hash", None)) is not None:
        parameters = {**parameters, "template_hash": source}
    return {
        "template": choice.template.uid,
        "parameters": json.dumps(parameters, sort_keys=True, default=str),
    }


def identity_of(choice: Any) -> dict[str, str]:
    """Identify a `ChoiceCaller` by its template choice, or else by its name and description."""
    if (template_choice := choice.annotations.get("ktc")) is not None:
        return template_identity(template_choice)
    return {"template": _COUNTED.sub("", choice.name), "parameters": choice.description}


def _cpu_parts() -> dict[str, str]:
    return {"cpu": read_part(cpu_model), "threads": str(torch.get_num_threads())}


def _precision() -> str:
    """Read the settings of each backend: torch's common getter raises if a backend has its own."""
    backends: Any = torch.backends
    return f"{backends.cuda.matmul.fp32_precision} {backends.mkldnn.matmul.fp32_precision}"


def _triton() -> str:
    import triton

    return str(triton.__version__)
