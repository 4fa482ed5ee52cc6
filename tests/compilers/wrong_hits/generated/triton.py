"""Triton kernels: their code, the values that they read, and their compile options."""

import os
import random
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compilers.wrong_hits.generated.programs import laid_out, named
from compilers.wrong_hits.generated.recorder import Answer, asked_by
from compilers.wrong_hits.generated.values import HOLDERS, VALUES
from compilers.wrong_hits.runner import Recorder
from graphstash.hooks.triton.hook import install

__all__ = ["AXES", "meaning", "prepare", "text"]


_AT_COMPILATION = {
    f"function with {name}": HOLDERS[name].replace(
        "\ndef read(*_):", "\n@constexpr_function\ndef read(x):"
    )
    + "EXPRESSION read(x)"
    for name in (
        *("global", "constant", "list", "dictionary", "namespace", "dataclass", "named tuple"),
        *("frozen dataclass", "enumeration", "attribute of a class", "property"),
    )
}
"""Functions that Triton runs, since 3.4. Triton refuses attributes that are methods."""

_RUNS_FUNCTIONS = hasattr(triton, "constexpr_function")

_FUNCTION_IN_TABLE = (
    "@triton.jit\ndef inner(x, factor: tl.constexpr = VALUE):\n    return x * factor\n"
    "held = types.SimpleNamespace(by=inner)\nEXPRESSION held.by(x)"
)
"""Only before 3.4: later versions copy the values that a kernel reads, and cannot copy a kernel."""

READS = {
    "nothing": "EXPRESSION x",
    "global": "NUMBER = tl.constexpr(VALUE)\nEXPRESSION x * NUMBER",
    "global without a mark": "NUMBER = VALUE\nEXPRESSION x * NUMBER",
    "attribute": "held = types.SimpleNamespace(by=VALUE)\nEXPRESSION x * held.by",
    "attribute of a class": "class Held:\n    by = VALUE\nEXPRESSION x * Held.by",
    "element": "PAIR = (tl.constexpr(1), VALUE)\nEXPRESSION x * PAIR[1]",
    "type": "KIND = [VALUE]\nEXPRESSION x * KIND[0]",
    "default": (
        "@triton.jit\ndef by(x, factor: tl.constexpr = VALUE):\n    return x * factor\n"
        "EXPRESSION by(x)"
    ),
    "closure": (
        "def make(value):\n    @triton.jit\n    def by(x):\n        return x * value\n"
        "    return by\nby = make(tl.constexpr(VALUE))\nEXPRESSION by(x)"
    ),
    "two calls away": (
        "FACTOR = tl.constexpr(VALUE)\n@triton.jit\ndef inner(x):\n    return x * FACTOR\n"
        "@triton.jit\ndef outer(x):\n    return inner(x)\nEXPRESSION outer(x)"
    ),
    "hidden by a local": (
        "factor = tl.constexpr(VALUE)\n@triton.jit\ndef by(x):\n    y = x * factor\n"
        "    factor = y\n    return factor\nEXPRESSION by(x)"
    ),
    "branch": (
        "IS_ON = tl.constexpr(VALUE)\n@triton.jit\ndef by(x):\n    if IS_ON:\n        return x\n"
        "    else:\n        return x * 2\nEXPRESSION by(x)"
    ),
    **(_AT_COMPILATION if _RUNS_FUNCTIONS else {"function in a table": _FUNCTION_IN_TABLE}),
}

AXES: dict[str, dict[str, str]] = {
    "read": READS,
    "value": {name: text for name, text in VALUES.items() if name != "len"},  # 3.9 refuses it
    "body": named(
        *(
            "y * 2.0",
            "y * 2",
            "y * 3",
            "y + 2",
            "tl.exp(y)",
            "tl.sqrt(y)",
            "-y",
            "y.to(tl.float16)",
        ),
        *("tl.where(y > 0, y, 0.0)", "tl.where(y > 0, y, -0.0)", "tl.sum(y, axis=0)"),
        *("tl.max(y, axis=0)", "y.to(tl.float32)", "tl.cast(y, tl.float64)"),
    ),
    "load": named(
        *(
            "tl.load(x)",
            "tl.load(x, cache_modifier='.cg')",
            "tl.load(x, eviction_policy='evict_last')",
        ),
        *("tl.load(x, volatile=True)", "tl.load(x + n)", "tl.load(x + 1)"),
    ),
    "kind": named("*fp32", "*fp16", "*bf16", "*i32", "*i64"),
    "arch": named("80", "90", "100"),
    "options": named(
        *("{}", "{'num_warps': 8}", "{'num_warps': 2}", "{'num_stages': 2}", "{'num_stages': 4}"),
        "{'maxnreg': 64}",
        "{'allow_fp8e4nv': True}" if triton.__version__ < "3.3" else "{'debug': True}",
        *("{'default_dot_input_precision': 'ieee'}", "{'sanitize_overflow': False}"),
    ),
    "constant": named("1", "2", "True", "1.0", "0.0", "-0.0", "None", "'1'", "(1, 2)"),
    "divisible": named("{}", "{(0,): [['tt.divisibility', 16]]}"),
    "decorated": named(
        "triton.jit", "triton.jit(do_not_specialize=['n'])", "triton.jit(debug=True)"
    ),
    "variables": named(
        *("{}", "{'TRITON_F32_DEFAULT': 'ieee'}", "{'DISABLE_LLVM_OPT': '1'}"),
        *("{'TRITON_DEFAULT_FP_FUSION': '0'}", "{'TRITON_DISABLE_LINE_INFO': '1'}"),
        *("{'MINE': '1'}", "{'TRITON_PRINT_AUTOTUNING': '1'}", "{'DISABLE_MMA_V3': '1'}"),
    ),
}

_WITHOUT_MEANING = ("{'MINE': '1'}", "{'TRITON_PRINT_AUTOTUNING': '1'}")


def meaning(chosen: dict[str, str]) -> object:
    """Return the choices that affect the key."""
    found = dict(chosen)
    if found["read"] == "nothing":
        del found["value"]
    if found["variables"] in _WITHOUT_MEANING:
        found["variables"] = "{}"
    return found


_KERNEL = """
@DECORATED
def kernel(x, n: tl.constexpr):
    y = LOAD
    tl.store(x, BODY)

@triton.jit
def through(x):
    return EXPRESSION
"""

_REST = """
signature = {"x": KIND, "n": "constexpr"}
source = ASTSource(fn=kernel, signature=signature, constexprs={"n": CONSTANT}, attrs=DIVISIBLE)
with environment(VARIABLES):
    triton.compile(source, target=GPUTarget("cuda", ARCH, 32), options=OPTIONS)
"""


def text(parts: Mapping[str, str], layout: random.Random) -> str:
    read, _, expression = parts["read"].replace("VALUE", parts["value"]).rpartition("EXPRESSION ")
    # The kernels come first, because Triton's key contains the line number of a function.
    kernel = _KERNEL.replace("DECORATED", parts["decorated"]).replace("EXPRESSION", expression)
    kernel = kernel.replace("BODY", parts["body"].replace("y", "through(y)", 1))
    rest = _REST.replace("KIND", repr(parts["kind"]))
    for name in ("constant", "divisible", "variables", "arch", "options"):
        rest = rest.replace(name.upper(), parts[name])
    kernel = kernel.replace("LOAD", parts["load"])
    return f"{kernel}\n{read}\n" + laid_out([], rest, layout)


def prepare() -> Callable[[CodeType, dict[str, Any]], Answer]:
    """Return a function that runs a program and returns its key, or the reason for none."""
    recorder = Recorder(-1)
    assert install(recorder) is not None
    names = {"triton": triton, "tl": tl, "types": types, "ASTSource": ASTSource}
    names |= {"GPUTarget": GPUTarget, "environment": _environment}
    names["constexpr_function"] = getattr(triton, "constexpr_function", None)
    return asked_by(recorder, names)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
