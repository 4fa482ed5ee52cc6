"""Compile matrix products with max-autotune, on a CPU.

The candidates are a C++ template and the library's kernel, which are really built and run. For the
last product, torch generates Triton's templates for an absent GPU. Their times are invented, and
torch compiles nothing after its choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor import config, select_algorithm
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V

from graphstash.tuning.memory.team import TeamMemory
from graphstash.tuning.targets import inductor
from support.cases.gpus import Driver


class ChosenError(Exception):
    """Ends a compilation."""


class ByHand(InductorChoices):
    """Choices without uuid(), which torch calls on every part of composed choices."""


def named(choice: Any) -> str:
    made_of = choice.annotations.get("ktc")
    given = made_of.params.to_serializeable_dict() if made_of is not None else {}
    if not given:
        return str(choice.name.rstrip("0123456789_"))
    numbers = (given[each] for each in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages"))
    return " ".join([made_of.template.name, *map(str, numbers)])


@dataclass
class Observer:
    """Records the candidates that torch generates, measures and chooses.

    Attributes:
        fastest: candidates whose times are next to zero.
        refused: a candidate that does not compile.
        seen: records of the last product.
    """

    fastest: Sequence[str]
    refused: str = ""
    seen: dict[str, Any] = field(default_factory=dict)

    def install(self) -> None:
        selector: Any = select_algorithm.AlgorithmSelectorCache
        benchmark, choose = selector.benchmark, selector.__call__

        def noted(selector: Any, choices: Any, *args: Any, **more: Any) -> dict[Any, float]:
            self.seen["measured"] += map(named, choices)
            is_run = config.cpu_backend == "cpp"
            found = (
                benchmark(selector, choices, *args, **more)
                if is_run
                else dict.fromkeys(choices, 0.0)
            )
            return {
                choice: 1e-9 if named(choice) in self.fastest else 1 + milliseconds
                for choice, milliseconds in found.items()
            }

        def chosen(selector: Any, name: str, choices: Any, *args: Any, **more: Any) -> Any:
            self.seen["generated"] = [named(choice) for choice in choices]
            for choice in choices:
                if config.cpu_backend == "triton":
                    choice.precompile = lambda: None
                elif named(choice) == self.refused:
                    choice.precompile = lambda: 1 // 0
            node, choice = choose(selector, name, choices, *args, **more)
            self.seen["chosen"] = named(choice)
            if config.cpu_backend == "triton":
                raise ChosenError
            return node, choice

        selector.benchmark, selector.__call__ = noted, chosen

    def compile(self, a: Any, b: Any, backends: str, views: int) -> dict[str, Any]:
        """Compile in graphs with different views, for which torch compiles no kernel."""

        def product(a: Any, b: Any) -> Any:
            result = torch.matmul(a, b)
            return result.mT if views == 1 else result[..., :8] if views == 2 else result

        self.seen.update(measured=[], generated=[], chosen=None)
        with config.patch(max_autotune=True, max_autotune_gemm_backends=backends):
            result = torch.compile(product, dynamic=False)(a, b)
        assert torch.allclose(result, product(a, b), atol=1e-4)
        return {**self.seen}

    def choose_of_triton(self, a: Any, columns: int, views: int) -> dict[str, Any]:
        with config.patch(cpu_backend="triton", benchmark_template_fusion=False):
            try:
                self.compile(a, torch.ones(48, columns), "TRITON,ATEN", views)
            except Exception as error:
                if "ChosenError" not in str(error):
                    raise
        return {**self.seen}


def products(
    *,
    fastest: Sequence[str] = (),
    views: int = 0,
    refuse: str = "",
    has_triton: bool = False,
    is_broken: bool = False,
) -> dict[str, Any]:
    """Return the candidates that torch measured and chose for each product.

    Args:
        fastest: candidates whose times are next to zero.
        views: 1 puts the same products into other graphs.
        refuse: a candidate that does not compile the second time.
        has_triton: whether to choose among Triton's templates.
        is_broken: whether to compile a product without the team's memory.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    observer = Observer(fastest)
    if installed := inductor.install():
        observer.install()
        # From now on, torch.get_float32_matmul_precision() raises.
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    report: dict[str, Any] = {"version": torch.__version__, "is_installed": installed is not None}
    a, b = torch.randn(2, 32, 48), torch.randn(2, 48, 16)
    report["product"] = observer.compile(a, b, "CPP,ATEN" if installed else "ATEN", views)
    if refuse:
        observer.refused = refuse
        report["refused"] = observer.compile(a, b, "CPP,ATEN", 2)
    if has_triton:
        from triton.runtime import driver

        driver.set_active(Driver())
        report["triton"] = observer.choose_of_triton(a[0], 16, views)
    if is_broken:
        TeamMemory.schedule = TeamMemory.find = lambda *_, **__: 1 // 0  # type: ignore[method-assign, assignment] # breaks it
        report["broken"] = observer.choose_of_triton(a[0], 32, views)
    if installed:
        report |= uninstalled(installed)
    return report


def uninstalled(installed: Any) -> dict[str, Any]:
    """Return the effects of a second install, of closing, and of the user's own choices."""
    is_one = inductor.install() is installed
    installed.close()
    report = {"is_one": is_one, "is_taken_out": is_taken_out(), "by_hand": choices_by_hand()}
    settings: Any = config  # present in versions with the lookup table
    settings.inductor_choices_class = ByHand
    return report | {"is_refused": inductor.install() is None and is_taken_out()}


def choices_by_hand() -> list[str]:
    """Return the choices in use, after the user has set torch's choices, install and close."""
    V.set_choices_handler(ByHand())
    again: Any = inductor.install()
    used = [type(V.choices).__name__]
    again.close()
    again.close()
    return [*used, type(V.choices).__name__]


def is_taken_out() -> bool:
    """Return whether torch is restored. A table that a thread still holds must be empty."""
    from graphstash.tuning.targets.inductor_table import TeamChoices

    selector: Any = select_algorithm.AlgorithmSelectorCache
    kept = selector.do_autotuning
    is_torchs = kept.__module__ == "torch._inductor.select_algorithm"
    table: Any = TeamChoices()
    return bool(is_torchs and table._make_table({}, None, "mm") == {})
