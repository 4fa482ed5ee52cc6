"""Pairs of programs for torch.compile."""

from typing import Any

from compilers.wrong_hits.pairs import Pair, Relation, pair

__all__ = ["PAIRS", "VERSIONS", "install", "prepare"]

VERSIONS = {"2.7.0": "", "2.15.0": "torch-newest"}
"""Environment by torch's version; empty is the one of the tests."""


def prepare() -> None:
    """Imports and loads all that a compilation needs, by a compilation without C++ code."""
    import torch
    import torch._inductor.compile_fx
    from torch._inductor import config, cpu_vec_isa

    import graphstash.hooks.inductor  # noqa: F401 - imported once, for all programs

    torch.set_num_threads(1)
    config.cpp.vec_isa_ok = True
    config.compile_threads = 1
    cpu_vec_isa.valid_vec_isa_list()
    x = torch.ones(2, 2, requires_grad=True)
    torch.compile(lambda x: x @ x)(x).sum().backward()
    torch._dynamo.reset()


def install(cache: Any) -> None:
    """Puts the hook into torch."""
    from graphstash.hooks import inductor

    assert inductor.install(cache) is not None


_DEFINE = """
import torch
from torch import Tensor

@torch.library.custom_op("pairs::scale", mutates_args=())
def scale(x: Tensor) -> Tensor:
    return x * 2

scale.register_fake(lambda x: torch.empty_like(x))
"""

_FORWARD = """
torch.compile(lambda x: scale(x).sin())(torch.ones(4))
"""

_BACKWARD = """
torch.compile(lambda x: scale(x).sum())(torch.ones(4, requires_grad=True))
"""

_MULTIPLY = """
import contextlib
import torch

x = torch.ones(4, 4, requires_grad=True)
with HERE:
    torch.compile(lambda x: x @ x)(x)
"""

_ATTEND = """
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

q = torch.ones(1, 2, 8, 16)
with sdpa_kernel(HERE):
    torch.compile(torch.nn.functional.scaled_dot_product_attention)(q, q, q)
"""

_SWITCH = """
import torch

HERE
torch.compile(lambda x: x @ x + torch.ones(4, 4))(torch.ones(4, 4))
"""

_PLAIN = "torch.get_num_threads()"

_LOWER = """
import torch
from torch._inductor import lowering

FACTOR = 3

@lowering.register_lowering(torch.ops.aten.sin.default)
def lowered(x):
    return lowering.lowerings[torch.ops.aten.HERE.default](x)

torch.compile(lambda x: x.sin())(torch.ones(4))
"""

_IMPLICIT = """
import torch

library = torch.library.Library("pairs", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * HERE, "CompositeImplicitAutograd")
torch.compile(lambda x: torch.ops.pairs.twice(x))(torch.ones(4))
"""

_LATE = """
import torch

torch.library.define("pairs::late", "(Tensor x) -> Tensor")
torch.library.register_fake("pairs::late", lambda x: torch.HERE(x))
torch.compile(lambda x: torch.ops.pairs.late(x))(torch.ones(4))
"""

_PASS = """
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

class Pass(CustomGraphPass):
    def __call__(self, graph):
        return HERE

    def uuid(self):
        return "mine"

config.post_grad_custom_post_pass = Pass()
torch.compile(lambda x: x.sin())(torch.ones(4))
"""


def _code(name: str, before: str, *values: str, text: str = _BACKWARD, **how: Any) -> Pair:
    """A pair whose custom operations differ."""
    return pair(name, f"{_DEFINE}\n{before}\n{text}", *values, **how)


def _switch(name: str, statement: str, *values: str, **how: Any) -> Pair:
    """A pair that differs in a switch of the process."""
    return pair(name, _SWITCH.replace("HERE", statement), *values, **how)


_GRADIENT = "scale.register_autograd(lambda ctx, g: HERE)"

_CODE = (
    _code("backward of a custom operation", _GRADIENT, "g * 2", "g * 3"),
    _code(
        "closure of a backward",
        """
def gradient(by):
    return lambda ctx, g: g * by

scale.register_autograd(gradient(HERE))
""",
        "2",
        "3",
    ),
    _code(
        "global of a backward",
        f"FACTOR = HERE\n{_GRADIENT}".replace("HERE)", "g * FACTOR)"),
        "2",
        "3",
    ),
    _code(
        "entry of a dictionary that a backward reads",
        "FACTORS = {'k': HERE}\nscale.register_autograd(lambda ctx, g: g * FACTORS['k'])",
        "2",
        "3",
    ),
    _code(
        "tensor that a backward reads",
        "FACTOR = torch.tensor(HERE)\nscale.register_autograd(lambda ctx, g: g * FACTOR)",
        "2.0",
        "3.0",
    ),
    _code(
        "function that a backward calls",
        "helper = lambda g: g * HERE\nscale.register_autograd(lambda ctx, g: helper(g))",
        "2",
        "3",
    ),
    _code(
        "function two calls away",
        "inner = lambda g: g * HERE\nouter = lambda g: inner(g)\n"
        "scale.register_autograd(lambda ctx, g: outer(g))",
        "2",
        "3",
    ),
    _code(
        "default of a backward",
        "def gradient(ctx, g, by=HERE):\n    return g * by\nscale.register_autograd(gradient)",
        "2",
        "3",
    ),
    _code(
        "keyword default of a backward",
        "def gradient(ctx, g, *, by=HERE):\n    return g * by\nscale.register_autograd(gradient)",
        "2",
        "3",
    ),
    _code(
        "partial as a backward",
        "import functools\ndef gradient(by, ctx, g):\n    return g * by\n"
        "scale.register_autograd(functools.partial(gradient, HERE))",
        "2",
        "3",
    ),
    _code(
        "attribute of an object that a backward reads",
        "class Factor:\n    def __init__(self, by):\n        self.by = by\n"
        "factor = Factor(HERE)\nscale.register_autograd(lambda ctx, g: g * factor.by)",
        "2",
        "3",
    ),
    _code(
        "method of a class that a backward uses",
        "class Factor:\n    def by(self):\n        return HERE\n"
        "factor = Factor()\nscale.register_autograd(lambda ctx, g: g * factor.by())",
        "2",
        "3",
    ),
    _code(
        "what is saved for the backward",
        "def keep(ctx, inputs, output):\n    ctx.by = HERE\n"
        "scale.register_autograd(lambda ctx, g: g * ctx.by, setup_context=keep)",
        "2",
        "3",
    ),
    _code("fake kernel", "scale.register_fake(lambda x: torch.HERE(x))", "zeros_like", "ones_like"),
    _code("kernel for a device", "scale.register_kernel('cpu', lambda x: x * HERE)", "2", "3"),
    _code(
        "type of autocast of an operation",
        "scale.register_autocast('cpu', torch.HERE)",
        "bfloat16",
        "float16",
    ),
    _code(
        "vmap of an operation", "scale.register_vmap(lambda i, d, x: (x * HERE, d[0]))", "2", "3"
    ),
    _code(
        "operation that a backward calls",
        """
@torch.library.custom_op("pairs::other", mutates_args=())
def other(g: Tensor) -> Tensor:
    return g * HERE

other.register_fake(lambda g: torch.empty_like(g))
scale.register_autograd(lambda ctx, g: torch.ops.pairs.other(g))
""",
        "2",
        "3",
    ),
    pair(
        "forward of a custom operation",
        (_DEFINE + _FORWARD).replace("x * 2", "HERE"),
        "x * 2",
        "x * 3",
    ),
    pair(
        "arguments that an operation changes",
        """
        import torch
        from torch import Tensor

        @torch.library.custom_op("pairs::fill", mutates_args=HERE)
        def fill(x: Tensor, y: Tensor) -> None:
            x.fill_(1)

        torch.compile(lambda x, y: (fill(x, y), x + y)[1])(torch.ones(4), torch.ones(4))
        """,
        '("x",)',
        '("x", "y")',
    ),
    pair("fake kernel of an operation without a class", _LATE, "zeros_like", "ones_like"),
    pair("lowering of an operation", _LOWER, "cos", "exp"),
    pair(
        "decomposition of an operation",
        """
        import torch
        from torch._inductor.decomposition import decompositions

        decompositions[torch.ops.aten.sinc.default] = lambda x: x * HERE
        torch.compile(lambda x: torch.sinc(x))(torch.ones(4))
        """,
        "2",
        "3",
    ),
    pair("graph pass under the same identity", _PASS, "None", "graph"),
)

_UNSHARED = (
    pair(
        "composite operation in Python",
        _IMPLICIT,
        "2",
        "3",
        relation=Relation.UNSHARED,
        reason="Composite",
    ),
    _code(
        "backward without a source",
        "exec('def gradient(ctx, g): return g * HERE')\nscale.register_autograd(gradient)",
        "2",
        "3",
        relation=Relation.UNSHARED,
        reason="no readable source",
    ),
    _code(
        "lowering from a prompt",
        "from torch._inductor import lowering\n"
        "exec('def lowered(x): return x * HERE')\n"
        "lowering.register_lowering(torch.ops.pairs.scale.default)(lowered)",
        "2",
        "3",
        relation=Relation.UNSHARED,
        reason="no readable source",
    ),
    _code(
        "backward that reads the environment",
        "import os\nscale.register_autograd(lambda ctx, g: g * int(os.environ.get('BY', 'HERE')))",
        "2",
        "3",
        relation=Relation.UNSHARED,
        reason="environ",
    ),
    _code(
        "backward that assigns to a global",
        "count = HERE\ndef gradient(ctx, g):\n    global count\n    count += 1\n"
        "    return g * count\n"
        "scale.register_autograd(gradient)",
        "2",
        "3",
        relation=Relation.UNSHARED,
        reason="assigns to a global",
    ),
    _code(
        "large tensor that a backward reads",
        "FACTOR = torch.full((100, 100), HERE)\n"
        "scale.register_autograd(lambda ctx, g: g * FACTOR.sum())",
        "2.0",
        "3.0",
        relation=Relation.UNSHARED,
        reason="a tensor of 10000 elements",
    ),
)

_SWITCHES = (
    pair(
        "type of autocast around the function",
        _MULTIPLY,
        "torch.autocast('cpu', dtype=torch.bfloat16)",
        "torch.autocast('cpu', dtype=torch.float16)",
    ),
    pair(
        "autocast around the function",
        _MULTIPLY,
        "contextlib.nullcontext()",
        "torch.autocast('cpu', dtype=torch.bfloat16)",
    ),
    pair(
        "cache of autocast",
        _MULTIPLY,
        "torch.autocast('cpu', dtype=torch.bfloat16)",
        "torch.autocast('cpu', dtype=torch.bfloat16, cache_enabled=False)",
    ),
    pair("gradient mode", _MULTIPLY, "contextlib.nullcontext()", "torch.no_grad()"),
    pair("kernels of attention", _ATTEND, "SDPBackend.MATH", "SDPBackend.FLASH_ATTENTION"),
    pair(
        "flags of mkldnn",
        _MULTIPLY,
        "torch.backends.mkldnn.flags(enabled=True)",
        "torch.backends.mkldnn.flags(enabled=False)",
    ),
    pair(
        "determinism of mkldnn",
        _MULTIPLY,
        "torch.backends.mkldnn.flags(deterministic=False)",
        "torch.backends.mkldnn.flags(deterministic=True)",
    ),
    pair(
        "switches of cuDNN",
        _MULTIPLY,
        "torch.backends.cudnn.flags(enabled=True)",
        "torch.backends.cudnn.flags(enabled=False)",
    ),
    _switch("default type", "torch.set_default_dtype(torch.HERE)", "float32", "float64"),
    _switch("determinism", "torch.use_deterministic_algorithms(HERE)", "False", "True"),
    _switch(
        "warnings instead of determinism",
        "torch.use_deterministic_algorithms(True, warn_only=HERE)",
        "False",
        "True",
    ),
    _switch(
        "filling of memory",
        "torch.utils.deterministic.fill_uninitialized_memory = HERE",
        "True",
        "False",
    ),
    _switch(
        "precision of products", "torch.set_float32_matmul_precision(HERE)", "'highest'", "'medium'"
    ),
    _switch(
        "reduced sums of half precision",
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = HERE",
        "True",
        "False",
    ),
    _switch(
        "reduced sums of bfloat16",
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = HERE",
        "True",
        "False",
    ),
    _switch("flash attention", "torch.backends.cuda.enable_flash_sdp(HERE)", "True", "False"),
    _switch(
        "attention by mathematics", "torch.backends.cuda.enable_math_sdp(HERE)", "True", "False"
    ),
    _switch(
        "engine of quantization", "torch.backends.quantized.engine = HERE", "'onednn'", "'fbgemm'"
    ),
    _switch("anomaly mode", "torch.autograd.set_detect_anomaly(HERE)", "False", "True"),
    _switch("choice of einsum's path", "torch.backends.opt_einsum.enabled = HERE", "False", "True"),
    _switch(
        "fast path of attention", "torch.backends.mha.set_fastpath_enabled(HERE)", "True", "False"
    ),
    _switch(
        "setting of Inductor",
        "import torch._inductor.config as c; c.epilogue_fusion = HERE",
        "True",
        "False",
    ),
)

_EQUAL = Relation.EQUAL

_REVERSE = (
    pair("nothing but the host", _SWITCH, _PLAIN, relation=_EQUAL),
    pair("comment", _SWITCH, "# one", "# another", relation=_EQUAL),
    pair(
        "empty lines before the program",
        "HERE\n" + _SWITCH.replace("HERE", ""),
        "",
        "\n\n",
        relation=_EQUAL,
    ),
    _switch(
        "operation that the graph does not name",
        "HERE",
        _PLAIN,
        "torch.library.define('pairs::spare', '(Tensor x) -> Tensor')",
        relation=_EQUAL,
    ),
    _switch("warnings", "torch.set_warn_always(HERE)", "False", "True", relation=_EQUAL),
    _switch("seed of random numbers", "torch.manual_seed(HERE)", "1", "2", relation=_EQUAL),
    _switch(
        "options of printing", "torch.set_printoptions(precision=HERE)", "4", "6", relation=_EQUAL
    ),
    _switch(
        "variable of the environment",
        "import os; os.environ['MINE'] = 'HERE'",
        "1",
        "2",
        relation=_EQUAL,
    ),
    _switch(
        "threads between operations",
        "HERE",
        _PLAIN,
        "torch.set_num_interop_threads(2)",
        relation=_EQUAL,
    ),
    _code("custom operation on another host", _GRADIENT, "g * 2", relation=_EQUAL),
    _code(
        "line of a custom operation",
        f"HERE\n{_GRADIENT.replace('HERE', 'g * 2')}",
        "",
        "\n\n# moved",
        relation=_EQUAL,
    ),
    _code(
        "documentation of a backward",
        "def gradient(ctx, g):\n    # HERE\n    return g * 2\nscale.register_autograd(gradient)",
        "one",
        "another",
        relation=_EQUAL,
    ),
    _code(
        "global that no code reads",
        f"SPARE = HERE\n{_GRADIENT.replace('HERE', 'g * 2')}",
        "1",
        "2",
        relation=_EQUAL,
    ),
    _code(
        "set of strings that a backward reads",
        "NAMES = {'a', 'b', 'c'}\nscale.register_autograd(lambda ctx, g: g * len(NAMES) + HERE)",
        "0",
        relation=_EQUAL,
    ),
    pair("lowering on another host", _LOWER, "cos", relation=_EQUAL),
    pair("graph pass on another host", _PASS, "None", relation=_EQUAL),
)

PAIRS = (
    pair(
        "operation", _SWITCH.replace("x @ x", "x.HERE()").replace("HERE\n", "\n", 1), "sin", "cos"
    ),
    *_CODE,
    *_UNSHARED,
    *_SWITCHES,
    *_REVERSE,
)
