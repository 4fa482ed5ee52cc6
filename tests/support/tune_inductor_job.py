"""A job that compiles products of matrices with max-autotune, on a CPU.

The candidates are a C++ template and the library's kernel, built and run for real. Those of the
last product are Triton's templates as torch generates them for a GPU that is not there: their times
are made up, and nothing is compiled after torch has chosen.
"""

import argparse
import json
import os
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--other-graphs", action="store_true", help="the same products in others")
parser.add_argument("--fastest", nargs="*", default=[], help="whose times are next to nothing")
parser.add_argument("--refuse", help="at the second time, a candidate that does not compile here")
parser.add_argument("--broken", action="store_true", help="a product without the team's memory")
parser.add_argument("--triton", action="store_true")
options = parser.parse_args()

os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(options.report.parent / "inductor")

import torch
from torch._inductor import config, select_algorithm
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V

from graphstash.tuning.memory.team import TeamMemory
from graphstash.tuning.targets import inductor


class ChosenError(Exception):
    """Ends a compilation."""


class Driver:
    """Says that there is a GPU."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


def told(choice):
    made_of = choice.annotations.get("ktc")
    given = made_of.params.to_serializeable_dict() if made_of is not None else {}
    if not given:
        return choice.name.rstrip("0123456789_")
    numbers = (given[each] for each in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages"))
    return " ".join([made_of.template.name, *map(str, numbers)])


def observe():
    """Notes what torch generates, measures and chooses."""
    selector = select_algorithm.AlgorithmSelectorCache
    benchmark, choose = selector.benchmark, selector.__call__

    def noted(self, choices, *args, **more):
        seen["measured"] += map(told, choices)
        is_run = config.cpu_backend == "cpp"
        found = benchmark(self, choices, *args, **more) if is_run else dict.fromkeys(choices, 0.0)
        return {
            choice: 1e-9 if told(choice) in options.fastest else 1 + milliseconds
            for choice, milliseconds in found.items()
        }

    def chosen(self, name, choices, *args, **more):
        seen["generated"] = [told(choice) for choice in choices]
        for choice in choices:
            if config.cpu_backend == "triton":
                choice.precompile = lambda: None
            elif told(choice) == refused:
                choice.precompile = lambda: 1 // 0
        node, choice = choose(self, name, choices, *args, **more)
        seen["chosen"] = told(choice)
        if config.cpu_backend == "triton":
            raise ChosenError
        return node, choice

    selector.benchmark, selector.__call__ = noted, chosen


def compile_product(a, b, backends, views):
    """In graphs that differ in views, for which no kernel is compiled."""

    def product(a, b):
        result = torch.matmul(a, b)
        return result.mT if views == 1 else result[..., :8] if views == 2 else result

    seen.update(measured=[], generated=[], chosen=None)
    with config.patch(max_autotune=True, max_autotune_gemm_backends=backends):
        result = torch.compile(product, dynamic=False)(a, b)
    assert torch.allclose(result, product(a, b), atol=1e-4)
    return {**seen}


def choose_of_triton(columns):
    with config.patch(cpu_backend="triton", benchmark_template_fusion=False):
        try:
            compile_product(a[0], torch.ones(48, columns), "TRITON,ATEN", other)
        except Exception as error:
            if "ChosenError" not in str(error):
                raise
    return {**seen}


class ByHand(InductorChoices):
    """Has no uuid(), which torch asks for in all that it composes."""


def choices_by_hand():
    """What torch makes its choices by, where the user has set it, after install and close."""
    V.set_choices_handler(ByHand())
    again = inductor.install()
    used = [type(V.choices).__name__]
    again.close()
    again.close()
    return [*used, type(V.choices).__name__]


def is_taken_out():
    """Even a table that a thread still has is empty."""
    from graphstash.tuning.targets.inductor_table import TeamChoices

    kept = select_algorithm.AlgorithmSelectorCache.do_autotuning
    is_torchs = kept.__module__ == "torch._inductor.select_algorithm"
    return is_torchs and TeamChoices()._table({}, None, "mm") == {}


seen = {}
refused = None
torch.set_num_threads(1)
torch.manual_seed(0)
if installed := inductor.install():
    observe()
    # torch.get_float32_matmul_precision() raises from now on.
    torch.backends.cuda.matmul.fp32_precision = "tf32"
report = {"version": torch.__version__, "is_installed": installed is not None}
a, b = torch.randn(2, 32, 48), torch.randn(2, 48, 16)
other = int(options.other_graphs)
report["product"] = compile_product(a, b, "CPP,ATEN" if installed else "ATEN", other)
if options.refuse:
    refused = options.refuse
    report["refused"] = compile_product(a, b, "CPP,ATEN", 2)
if options.triton:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(Driver())
    report["triton"] = choose_of_triton(16)
if options.broken:
    TeamMemory.schedule = TeamMemory.find = lambda *_, **__: 1 // 0
    report["broken"] = choose_of_triton(32)
if installed:
    report["is_one"] = inductor.install() is installed
    installed.close()
    report["is_taken_out"] = is_taken_out()
    report["by_hand"] = choices_by_hand()
    config.inductor_choices_class = ByHand
    report["is_refused"] = inductor.install() is None and is_taken_out()
options.report.write_text(json.dumps(report))
