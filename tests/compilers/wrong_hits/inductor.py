"""Pairs of programs for torch.compile."""

import textwrap
from typing import Any

from compilers.wrong_hits.pairs import OFF_AND_ON, Pair, Relation, pair, with_extended

__all__ = ["PAIRS", "VERSIONS", "forget", "install", "prepare"]

VERSIONS = {"2.7.0": "", "2.15.0": "torch-newest"}
"""Environment by torch's version; empty is the tests' own."""


def prepare() -> None:
    """Import all modules that a compilation needs, by a compilation without C++ code."""
    import torch
    import torch._inductor.compile_fx
    from torch._inductor import config, cpu_vec_isa

    import graphstash.hooks.inductor.hook  # noqa: F401 - imported once, for all programs
    from graphstash.hooks.inductor.user_code import user_code_of

    torch.set_num_threads(1)
    config.cpp.vec_isa_ok = True
    config.compile_threads = 1
    cpu_vec_isa.valid_vec_isa_list()
    x = torch.ones(2, 2, requires_grad=True)
    torch.compile(lambda x: x @ x + torch.ones(2, 2))(x).sum().backward()
    torch._dynamo.reset()
    user_code_of(torch.fx.symbolic_trace(lambda x: x.sin()), [])  # searches torch's tables


def install(cache: Any) -> None:
    from graphstash.hooks.inductor.hook import install

    assert install(cache) is not None


def forget() -> None:
    """Drop the compiled functions."""
    import torch

    torch._dynamo.reset()


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

_REGISTERED = """
import torch

library = torch.library.Library("pairs", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: torch.HERE(x), "KEY")
torch.compile(lambda x: torch.ops.pairs.twice(x))(torch.ones(4))
"""

_WITH_FAKE = """
import torch

library = torch.library.Library("pairs", "DEF")
library.define("twice(Tensor x) -> Tensor", tags=())
library._register_fake("twice", torch.empty_like)
library.impl("twice", lambda x: torch.HERE(x), "CPU")
torch.compile(lambda x: torch.ops.pairs.twice(x))(torch.ones(4))
"""

_FREEZE = "from torch._inductor import config\nconfig.freezing = True"

_FROZEN = f"""
import torch
{_FREEZE}

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.by = torch.nn.Parameter(torch.full(SHAPE, HERE.0))

    def forward(self, x):
        return x * self.by

with torch.no_grad():
    torch.compile(Scale().eval())(torch.ones(64, 128))
"""
"""Inductor writes a frozen scalar into code, and may store packed frozen weights in an entry."""

_FOLD = """
import torch
from torch._inductor import config
from torch._inductor.constant_folding import constant_fold
from torch._inductor.custom_graph_pass import CustomGraphPass

class Fold(CustomGraphPass):
    def __call__(self, graph):
        constant_fold(graph.owning_module)

    def uuid(self):
        return "fold"

config.post_grad_custom_pre_pass = Fold()
"""

_NAMED_BY_FILE = (
    _FOLD.replace("import constant_fold", "import constant_fold as _")
    .replace("constant_fold(graph.owning_module)", "HERE")
    .replace("import CustomGraphPass", "import CustomGraphPass, get_hash_for_files")
    .replace('"fold"', "get_hash_for_files((__file__,))")
)

_COMPOSITE = "torch.ops.pairs.twice.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)"

_CALL = """
@torch.library.custom_op("pairs::calls", mutates_args=())
def calls(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.pairs.twice(x)

calls.register_fake(torch.empty_like)
torch.compile(lambda x: calls(torch.ops.pairs.twice(x)))"""

_REPLACED = """
import torch

def replace(namespace, operation, key, other_key):
    library = torch.library.Library(namespace, "IMPL")
    try:
        library.impl(operation, lambda *given: given[-1] * HERE, key)
    except RuntimeError:  # torch 2.7 replaces no kernel in Python
        library.impl(operation, lambda *given: given[-1] * HERE, other_key)
    return library
"""

_WRAPPED = """
import torch
from torch._functorch import config

config.enable_autograd_cache = config.enable_remote_autograd_cache = False
torch.ops.higher_order.auto_functionalized_v2._cacheable = True  # as in torch 2.13

library = torch.library.Library("pairs", "DEF")
library.define("fill(Tensor x, Tensor(a!) y) -> Tensor", tags=(torch.Tag.TAG,))
library._register_fake("fill", lambda x, y: torch.empty(FAKE))
torch.compile(lambda x, y: torch.ops.pairs.fill(x, y).sin())(torch.ones(4), torch.ones(4))
"""
"""Inductor's graph wraps the operation. Without results of AOTAutograd, its key comes first."""

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
    """Return a pair with different custom operations.

    Its programs share a process with the programs of other pairs. If they change torch, use
    `_changes`.
    """
    how = {"in_one_process": True} | how
    return pair(name, f"{_DEFINE}\n{before}\n{text}", *values, **how)


def _reads(name: str, before: str, expression: str, *values: str, **how: Any) -> Pair:
    """Return a pair of custom operations whose backward reads something."""
    backward = f"scale.register_autograd(lambda ctx, g: {expression})"
    return _code(name, f"{before}\n{backward}", *values, **how)


def _reads_changed(name: str, before: str, expression: str, *values: str, **how: Any) -> Pair:
    """Return a pair whose backward reads something that its programs change in torch."""
    return _reads(name, before, expression, *values, in_one_process=False, **how)


def _sine(name: str, before: str, *values: str, **how: Any) -> Pair:
    """Return a pair that compiles a sine after changes of torch."""
    compile_sine = "torch.compile(lambda x: x.sin())(torch.ones(4))"
    return pair(name, f"import torch\n{before}\n{compile_sine}", *values, **how)


def _changes(name: str, before: str, *values: str, **how: Any) -> Pair:
    """Return a pair with a custom operation whose programs change torch."""
    return _code(name, before, *values, in_one_process=False, **how)


def _around(name: str, *values: str, text: str = _MULTIPLY) -> Pair:
    """Return a pair whose switches hold only around the function."""
    return pair(name, text, *values, in_one_process=True)


def _switch(name: str, statement: str, *values: str, **how: Any) -> Pair:
    """Return a pair that differs in a switch of the process, by default off and on."""
    return pair(name, _SWITCH.replace("HERE", statement), *(values or OFF_AND_ON), **how)


_GRADIENT = "scale.register_autograd(lambda ctx, g: HERE)"

_OTHER = """
@torch.library.custom_op("pairs::other", mutates_args=())
def other(g: Tensor) -> Tensor:
    return g * HERE

other.register_fake(lambda g: torch.empty_like(g))
"""

_CODE = (
    _code("backward of a custom operation", _GRADIENT, "g * 2", "g * 3"),
    *(
        _reads(name, before, expression)
        for name, before, expression in (
            ("tensor that a backward reads", "FACTOR = torch.tensor(HERE.0)", "g * FACTOR"),
            (
                "tensor of bits that a backward reads",
                "FACTOR = torch.tensor([HERE], dtype=torch.uint8).view(torch.bits8)",
                "g * FACTOR.view(torch.uint8)",
            ),
            (
                "attribute of a tensor that a backward reads",
                "FACTOR = torch.tensor(1.0)\nFACTOR.by = HERE",
                "g * FACTOR.by",
            ),
            (
                "whether a tensor that a backward reads requires a gradient",
                "FACTOR = torch.tensor(2.0, requires_grad=HERE > 2)",
                "g * (1 + FACTOR.requires_grad)",
            ),
        )
    ),
    _reads_changed(
        "attribute that a program gives all tensors", "torch.Tensor.by = HERE", "g * g.by"
    ),
    _reads_changed(
        "attribute that a program gives all storages",
        "torch.UntypedStorage.by = HERE",
        "g * g.untyped_storage().by",
    ),
    _reads_changed(
        "method that a program gives all tensors",
        "torch.Tensor.scaled = lambda g: g * HERE",
        "g.scaled()",
    ),
    _reads_changed(
        "property that a method given to all tensors reads",
        "torch.Tensor.scaled = lambda g: g * g.by\ntorch.Tensor.by = property(lambda g: HERE)",
        "g.scaled()",
    ),
    _reads_changed(
        "operator of all tensors", "torch.Tensor.__matmul__ = lambda g, by: g * HERE", "g @ g"
    ),
    _reads_changed(
        "method of all tensors that is another one of torch",
        "torch.Tensor.norm = torch.Tensor.HERE",
        "g.norm()",
        "sin",
        "cos",
    ),
    _reads_changed(
        "attribute that a program gives all contexts",
        "torch.autograd.function.FunctionCtx.by = HERE",
        "g * ctx.by",
    ),
    _reads(
        "what is saved for the backward",
        "def keep(ctx, inputs, output):\n    ctx.by = HERE",
        "g * ctx.by, setup_context=keep",
    ),
    _code("fake kernel", "scale.register_fake(lambda x: torch.HERE(x))", "zeros_like", "ones_like"),
    *(
        kind(
            f"attribute of {name}",
            f"{name} = [HERE]\nscale.register_autograd(lambda ctx, g: g * {name}[0])",
        )
        for kind, name in (
            (_code, "torch.ops.pairs.scale.by"),
            (_code, "torch.ops.pairs.scale.default.by"),
            (_changes, "torch.ops.aten.sin.default.by"),  # the graph calls this operation
            (_changes, "torch.ops.aten.erfc.default.schema"),  # torch.prims has such attributes
        )
    ),
    _reads(
        "operation that is an attribute of another",
        "torch.ops.pairs.scale.default.by = torch.ops.aten.HERE.default",
        "torch.ops.pairs.scale.default.by(g)",
        "sin",
        "cos",
    ),
    _code("kernel for a device", "scale.register_kernel('cpu', lambda x: x * HERE)"),
    _changes(
        "type of autocast of an operation",
        "scale.register_autocast('cpu', torch.HERE)",
        "bfloat16",
        "float16",
    ),
    _code("vmap of an operation", "scale.register_vmap(lambda i, d, x: (x * HERE, d[0]))"),
    _reads("operation that a backward calls", _OTHER, "torch.ops.pairs.other(g)"),
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
    pair(
        "fake kernel of an operation that another one wraps",
        _WRAPPED.replace("TAG", "needs_fixed_stride_order").replace("FAKE", "HERE"),
    ),
    pair(
        "tag of an operation that another one wraps",
        _WRAPPED.replace("TAG", "HERE").replace("FAKE", "4"),
        "needs_fixed_stride_order",
        "flexible_layout",
    ),
    pair(
        "kernel of an operation that another one wraps",
        _WRAPPED.replace("TAG", "flexible_layout")
        .replace(
            "torch.compile", "library.impl('fill', lambda x, y: x + HERE, 'CPU')\ntorch.compile"
        )
        .replace("FAKE", "4"),
        relation=Relation.EQUAL,
    ),
    pair(
        "kernel for a device that an executable calls by name",
        _WITH_FAKE,
        "zeros_like",
        "ones_like",
        relation=Relation.EQUAL,
    ),
    pair(
        "pass with the hash of its file, as torch advises",
        f"{_NAMED_BY_FILE}\ntorch.compile(lambda x: x.sin())(torch.ones(4))",
        "pass",
        "graph.lint()",
    ),
    pair(
        "kernel for a device in a namespace of torch",
        _WITH_FAKE.replace("pairs", "ao"),
        "zeros_like",
        "ones_like",
        relation=Relation.EQUAL,
    ),
    pair(
        "kernel for a device of an operation without results",
        """
        import torch

        library = torch.library.Library("pairs", "DEF")
        library.define("fill(Tensor x, Tensor(a!) y) -> ()")
        library.impl("fill", lambda x, y: y.copy_(x * HERE), "CPU")
        x, y = torch.ones(4), torch.ones(4)
        torch.compile(lambda x, y: (torch.ops.pairs.fill(x, y), y.sin()))(x, y)
        """,
        relation=Relation.EQUAL,
    ),
    pair(
        "kernel for a device that an executable calls for a dynamic size",
        _WITH_FAKE.replace("torch.compile(", "torch.compile(dynamic=True, fullgraph=True)("),
        "zeros_like",
        "ones_like",
        relation=Relation.EQUAL,
    ),
    pair("fake kernel of an operation without a class", _LATE, "zeros_like", "ones_like"),
    pair(
        "fake kernel of an overload",
        _LATE.replace("pairs::late", "pairs::late.more").replace("late(x)", "late.more(x)"),
        "zeros_like",
        "ones_like",
    ),
    _changes(
        "type of autocast that comes before another one",
        "scale.register_autocast('cpu', torch.HERE)\nscale.register_autocast('cpu', torch.float16)",
        "bfloat16",
        "float16",
    ),
    pair(
        "backward of an operation in a namespace of torch",
        (_DEFINE + _GRADIENT + _BACKWARD).replace("pairs::", "prims::"),
        "g * 2",
        "g * 3",
    ),
    pair(
        "fake kernel of an operation in a namespace of torch",
        _LATE.replace("pairs", "quantized"),
        "zeros_like",
        "ones_like",
    ),
    pair(
        "fake kernel of an overload in a namespace of torch",
        _LATE.replace("pairs::late", "prims::late.more").replace(
            "pairs.late(x)", "prims.late.more(x)"
        ),
        "zeros_like",
        "ones_like",
    ),
    _sine(
        "backward of an operation of torch",
        "torch.library.register_autograd('prims::sin', lambda ctx, g: g * HERE)",
    ),
    _sine(
        "kernel that a program gives an operation of torch",
        "torch.library.register_kernel('prims::sin', 'cpu', lambda x: x * HERE)",
    ),
    _sine(
        "type of autocast of an operation of torch",
        "torch.library.register_autocast('prims::sin', 'cpu', torch.HERE)",
        "float16",
        "bfloat16",
    ),
    _sine(
        "fake kernel that a program gives an operation of torch",
        "torch.library.register_fake('quantized::add_relu', lambda *_: HERE)",
    ),
    _sine(
        "rule for a mode of dispatch and an operation of torch",
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "class Mode(TorchDispatchMode):\n    pass\n"
        "torch.library.register_torch_dispatch('aten::sin', Mode, lambda *given: HERE)",
    ),
    _sine(
        "implementation of an operation of torch in Python",
        "@torch.ops.prims.sin.default.py_impl(torch._C.DispatchKey.Autograd)\ndef sin(x):\n"
        "    return x * HERE",
    ),
    pair(
        "kernels that torch registers when it is used",
        """
        import torch
        import torch.distributed.fsdp
        import torch.distributed.tensor
        from torch.distributed import _functional_collectives, _symmetric_memory

        torch.vmap(lambda x: x.sin())(torch.ones(2, 2))
        torch.compile(lambda x: x.sin())(torch.ones(4))
        """,
        relation=Relation.EQUAL,
    ),
    pair("lowering of an operation", _LOWER, "cos", "exp"),
    pair(
        "decomposition of an operation",
        """
        import torch
        from torch._inductor.decomposition import decompositions

        decompositions[torch.ops.aten.sinc.default] = lambda x: x * HERE
        torch.compile(lambda x: torch.sinc(x))(torch.ones(4))
        """,
    ),
    pair("graph pass under the same identity", _PASS, "None", "graph"),
    *(
        pair(f"value of a frozen parameter with {label}", _FROZEN.replace("SHAPE", shape))
        for label, shape in (("one element", "()"), ("many elements", "(64, 128)"))
    ),
)

_RECORD = """
from graphstash.hooks.inductor import recorded

recorded.record()
"""

_CONSTANT = ("twice(x)", "twice(torch.tensor(2.0))")

_RECORDED = (
    *(
        pair(f"recorded {name}", f"{_RECORD}{text}", "zeros_like", "ones_like")
        for name, text in (
            ("composite operation", _REGISTERED.replace('"KEY"', '""')),
            *(
                (f"{key} kernel", _REGISTERED.replace("KEY", key))
                for key in ("CompositeExplicitAutograd", "Meta")
            ),
            (
                "Autograd kernel",
                _REGISTERED.replace(
                    "torch.compile",
                    "library._register_fake('twice', torch.empty_like)\ntorch.compile",
                ).replace("KEY", "Autograd"),
            ),
            (
                "CPU kernel that a compilation executes for a constant",
                _WITH_FAKE.replace(*_CONSTANT),
            ),
            (
                "CPU kernel that another CPU kernel calls during the compilation",
                _WITH_FAKE.replace(*_CONSTANT)
                .replace("lambda x: torch.HERE(x)", "lambda x: torch.ops.pairs.once(x)")
                .replace(
                    "library._reg",
                    'library.define("once(Tensor x) -> Tensor")\n'
                    'library._register_fake("once", torch.empty_like)\n'
                    'library.impl("once", lambda x: torch.HERE(x), "CPU")\nlibrary._reg',
                ),
            ),
        )
    ),
    *(
        pair(
            f"recorded {key} kernel that an executable calls by name",
            f"{_RECORD}{_WITH_FAKE}".replace('"CPU"', f'"{key}"'),
            "zeros_like",
            "ones_like",
            relation=Relation.EQUAL,
        )
        for key in ("CPU", "CompositeExplicitAutograd")
    ),
    pair(
        "key set that a recorded kernel gets",
        _RECORD
        + _WITH_FAKE.replace(*_CONSTANT).replace(
            'x: torch.HERE(x), "CPU"', '*given: given[-1] * 2, "CPU", with_keyset=HERE'
        ),
        *OFF_AND_ON,
    ),
    *(
        pair(
            f"recorded kernel that a pass {name}",
            _RECORD
            + _FOLD.replace("constant_fold(graph.owning_module)", call)
            + _WITH_FAKE.replace("torch.HERE(x)", "x * HERE"),
        )
        for name, call in (
            ("calls", "[each.target(torch.ones(2)) for each in graph.nodes if each.op[0] == 'c']"),
            (
                "calls by another name",
                "each = [*graph.nodes][1]; call = each.target; call(*[torch.ones(2)])",
            ),
            ("calls with arguments", "[*graph.nodes][1].target(*[torch.ones(2)])"),
        )
    ),
    pair(
        "backward in a kernel that torch makes",
        _RECORD
        + _WITH_FAKE.replace("HERE", "ones_like").replace(
            "torch.compile",
            "torch.library.register_autograd('pairs::twice', lambda ctx, g: g * HERE)\n"
            "torch.compile",
        ),
        "2",
        "3",
        reason="the Autograd kernel of pairs::twice",
    ),
    pair(
        "kernel from before the recording",
        _REGISTERED.replace("KEY", "Meta").replace("torch.compile", f"{_RECORD}torch.compile"),
        "zeros_like",
        "ones_like",
        reason="the Meta kernel of pairs::twice",
    ),
    pair(
        "recorded kernel in a library that was destroyed",
        _RECORD
        + _REGISTERED.replace("KEY", "Meta")
        .replace(
            "torch.compile",
            "other = torch.library.Library('pairs', 'IMPL')\n"
            "other.impl('twice', lambda x: x * HERE, 'CPU')\nother._destroy()\ntorch.compile",
        )
        .replace("torch.HERE", "torch.empty_like"),
        "2",
        "3",
        relation=Relation.EQUAL,
    ),
)

_UNSHARED = (
    pair(
        "composite operation in Python",
        _IMPLICIT,
        "2",
        "3",
        reason="Composite",
    ),
    *(
        pair(
            f"{key} kernel of a library",
            _REGISTERED.replace("KEY", key),
            "zeros_like",
            "ones_like",
            reason=f"the {key} kernel of pairs::twice",
        )
        for key in ("CompositeExplicitAutograd", "Meta")
    ),
    *(
        pair(
            f"{key} kernel of a library",
            _REGISTERED.replace(
                "torch.compile", "library._register_fake('twice', torch.empty_like)\ntorch.compile"
            ).replace("KEY", key),
            "zeros_like",
            "ones_like",
            reason=f"the {key} kernel of pairs::twice",
        )
        for key in ("Autograd", "AutogradCPU")
    ),
    *(
        pair(
            f"CPU kernel that a compilation may execute {when}",
            _WITH_FAKE.replace(*change),
            "zeros_like",
            "ones_like",
            reason="the CPU kernel of pairs::twice",
        )
        for when, change in (
            ("for a single element", ("ones(4)", "ones(1)")),
            ("for a constant", ("twice(x)", "twice(torch.tensor(2.0))")),
            ("for a constant, element by element", ("()", "(torch.Tag.pointwise,)")),
            ("to freeze a graph", ("import torch", f"import torch\n{_FREEZE}")),
            ("in a pass that folds constants", ("import torch", _FOLD)),
            (
                "or take apart",
                ("torch.compile", f"{_COMPOSITE}(lambda x: x.sin())\ntorch.compile"),
            ),
            ("for another operation", ("torch.compile(lambda x: torch.ops.pairs.twice(x))", _CALL)),
        )
    ),
    _changes(
        "kernel of autocast from a library",
        "torch.library.impl('pairs::scale', 'AutocastCPU', lambda x: x * HERE)",
        reason="the AutocastCPU kernel of pairs::scale",
    ),
    _changes(
        "kernel that replaces one of a custom operation",
        f"{_REPLACED}\nlibrary = replace('pairs', 'scale', 'Autograd', 'AutogradCPU')".replace(
            "HERE", "2 + HERE"
        ),
        reason=r"the Autograd(CPU)? kernel of pairs::scale",
    ),
    pair(
        "fake kernel of ATen from a library",
        f"{_REPLACED}\nlibrary = replace('aten', 'sin', 'Meta', 'AutogradCPU')\n"
        "torch.compile(lambda x: x.sin())(torch.ones(4))",
        "2",
        "3",
        reason="aten/sin/",
    ),
    pair(
        "kernel of ATen in place of one that torch registers for vmap",
        f"{_REPLACED}\ntorch.vmap(lambda x: x.sin())(torch.ones(2, 2))\n"
        "library = replace('aten', 'addr', 'FuncTorchBatched', 'AutogradCPU')\n"
        "torch.compile(lambda x: x.sin())(torch.ones(4))",
        "2",
        "3",
        reason="aten/addr/",
    ),
    *(
        pair(
            f"kernel of an operation in the namespace {namespace}",
            f"{_REPLACED}\nfrom torch.distributed import _functional_collectives\n"
            f"library = replace('{namespace}', '{operation}', 'Autograd', 'AutogradCPU')\n"
            "torch.compile(lambda x: x.sin())(torch.ones(4))",
            "2",
            "3",
            reason=f"{namespace}/{operation}/",
        )
        for namespace, operation in (
            *(("_c10d_functional", "all_reduce"), ("inductor", "_alloc_from_pool")),
            *(("prims", "sin"), ("quantized", "add_relu")),
        )
    ),
    _sine(
        "kernel for all operations",
        "library = torch.library.Library('_', 'IMPL')\n"
        "library.fallback(lambda op, *given: op(*given) * HERE, 'CPU')",
        reason="for all operations",
    ),
    _code(
        "backward without a source",
        "exec('def gradient(ctx, g): return g * HERE')\nscale.register_autograd(gradient)",
        reason="no readable source",
    ),
    _changes(
        "lowering from a prompt",
        "from torch._inductor import lowering\n"
        "exec('def lowered(x): return x * HERE')\n"
        "lowering.register_lowering(torch.ops.pairs.scale.default)(lowered)",
        reason="no readable source",
    ),
)

_LOWERINGS = """
import functools
import torch
from torch._inductor import lowering
from torch._inductor.decomposition import decompositions

sin, cos, exp = (getattr(torch.ops.aten, each).default for each in ("sin", "cos", "exp"))
BEFORE
torch.compile(lambda x: torch.nn.functional.silu(x.sin()))(torch.ones(4))
"""

_PATTERN = """
import torch
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.pattern_matcher import Arg, CallFunction, register_graph_pattern

pattern = CallFunction(torch.ops.aten.sin.default, Arg())

@register_graph_pattern(pattern, pass_dict=PASS)
def replace(match, x):
    match.replace_by_example(lambda x: torch.ops.aten.HERE.default(x), [x])

torch.compile(lambda x: x.sin())(torch.ones(4))
"""

_BACKEND = """
import torch
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table

aten = torch.ops.aten
BEFORE
def backend(graph, inputs):
    return compile_fx(graph, inputs, GIVEN)

torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(4))
"""

_GIVEN = """
from torch._inductor import codecache

key, _ = codecache.compiled_fx_graph_hash(graph, [x], {}, [])
codecache.FxGraphCache.get_remote_cache().get(key)
"""
"""Asks for a graph that programs of torch make only on a GPU."""

_KERNEL = f"""
import types

import torch
import triton
import triton.language as tl
from torch._higher_order_ops import triton_kernel_wrap as wrap

BEFORE

@triton.jit
def kernel(x, n: tl.constexpr):
    tl.store(x, tl.load(x) * EXPRESSION)

AROUND
x = torch.ones(4)
nodes = torch.fx.Graph()
argument = nodes.placeholder("x")
number = wrap.kernel_side_table.add_kernel(kernel)
constants = wrap.kernel_side_table.add_constant_args({{"n": CONSTANT}})
named = {{"kernel_idx": number, "constant_args_idx": constants, "grid": [(1, 1, 1)]}}
named |= {{"tma_descriptor_metadata": {{}}, "kwargs": {{"x": argument}}}}
nodes.call_function(wrap.triton_kernel_wrapper_mutation, (), named)
nodes.output((argument,))
graph = torch.fx.GraphModule(torch.nn.Module(), nodes)
{_GIVEN}
"""

_SUBCLASS = """
import torch
from torch.utils._pytree import tree_map_only

class Scaled(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Scaled(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        args = tree_map_only(Scaled, lambda each: each.inner, args)
        results = function(*args, **(kwargs or {}))
        return tree_map_only(torch.Tensor, lambda each: Scaled(each * HERE), results)

torch.compile(lambda x: x.sin())(Scaled(torch.ones(4)))
"""

_VISIBLE = f"""
import torch

x = torch.ones(4)
nodes = torch.fx.Graph()
argument = nodes.placeholder("x")
sin = nodes.call_function(torch.ops.aten.sin.default, (argument,))
nodes.output((argument, sin)).meta["user_visible_output_idxs"] = HERE
graph = torch.fx.GraphModule(torch.nn.Module(), nodes)
{_GIVEN}
"""

_DONATED = f"""
import types

import torch
from torch._guards import TracingContext, tracing

x = torch.ones(4)
graph = torch.fx.symbolic_trace(lambda x: torch.ops.aten.sin.default(x))
context = TracingContext(None)
context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=HERE)
with tracing(context):
    {_GIVEN.strip().replace(chr(10), chr(10) + "    ")}
"""

_NOTED = """
import torch
from torch._inductor import lowering
from torch._inductor.fx_passes import post_grad
from torch._inductor.pattern_matcher import Arg, CallFunction, register_graph_pattern
from graphstash.hooks.inductor.user_code import user_code_of

aten = torch.ops.aten
BEFORE
user_code_of(torch.fx.symbolic_trace(GRAPH), [])
AFTER
torch.compile(lambda x: torch.nn.functional.silu(x.sin()))(torch.ones(4))
"""
"""Changes an object that the hook has already searched."""

_OPERATOR = f"""
import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator

class Mine(HigherOrderOperator):
    def __init__(self):
        super().__init__("mine", cacheable=True)

    def __call__(self, x):
        return super().__call__(x)

mine = Mine()
mine.py_impl(DispatchKey.CompositeExplicitAutograd)(lambda x: x * HERE)
x = torch.ones(4)
nodes = torch.fx.Graph()
nodes.output((nodes.call_function(mine, (nodes.placeholder("x"),)),))
graph = torch.fx.GraphModule(torch.nn.Module(), nodes)
{_GIVEN}
"""

_BACKEND_OF_DEVICE = """
import torch
from torch._inductor.codegen import common
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

common.init_backend_registration()

class Mine(CppScheduling):
    def can_fuse_vertical(self, *_):
        return HERE

common.register_backend_for_device("cpu", Mine, PythonWrapperCodegen)
torch.compile(lambda x: x.sin())(torch.ones(4))
"""

_SHARED_MEMORY = """
import torch

memory = torch.ones(16)
first, second = HERE

def f(x, y):
    x.mul_(2)
    return x + y

torch.compile(f)(first, second)
"""

_DYNAMIC = """
import torch
from torch.fx.experimental import _config as config

x = torch.ones(4, 4)
BEFORE
torch.compile(lambda x: x.sum(0))(x)
"""


_PATCHED = """
import contextlib
import functools
import sys
import types
import unittest.mock
import torch
import torch._inductor.codegen.cpp as cpp
import torch._inductor.graph as lowered
from torch._inductor.codegen.cpp import CppKernel, CppVecKernel
from torch._inductor.graph import GraphLowering

BEFORE
torch.compile(lambda x: x.sin())(torch.ones(4))
"""


def _noted(name: str, before: str, graph: str, after: str, *values: str, **how: Any) -> Pair:
    """Return a pair that changes something after another graph."""
    text = _NOTED.replace("BEFORE", before).replace("GRAPH", graph).replace("AFTER", after)
    return pair(name, text, *values, **how)


def _patched(name: str, statement: str, *values: str, **how: Any) -> Pair:
    """Return a pair that replaces something inside torch's compiler."""
    text = _PATCHED.replace("BEFORE", statement)
    return pair(name, text, *values, **how)


def _lowers(name: str, before: str, *values: str, **how: Any) -> Pair:
    """Return a pair whose tables of lowerings or decompositions differ."""
    return pair(name, _LOWERINGS.replace("BEFORE", before), *values, **how)


def _runs(
    name: str,
    *values: str,
    before: str = "",
    expression: str = "1.0",
    around: str = "",
    constant: str = "1",
    relation: Relation = Relation.DIFFER,
) -> Pair:
    """Return a pair whose graphs contain Triton kernels."""
    text = _KERNEL.replace("BEFORE", before).replace("EXPRESSION", expression)
    text = text.replace("AROUND", around).replace("CONSTANT", constant)
    return pair(name, text, *values, relation=relation, in_one_process=True)


def _given(name: str, before: str, given: str, *values: str) -> Pair:
    """Return a pair whose backends pass other functions to AOTAutograd."""
    text = _BACKEND.replace("BEFORE", before).replace("GIVEN", given)
    return pair(name, text, *values, in_one_process=True)


_LOADED = f"""
import subprocess
from pathlib import Path

import torch

text = r'extern const char text[] = "\\0quantized\\0" "5torch7Library" "HERE";'
Path("library.cpp").write_text(text)
folder = Path(torch.__file__).with_name("lib")
build = ["g++", "-shared", "-fPIC", "-o", "library.so", "library.cpp"]
subprocess.run([*build, f"-L{{folder}}", "-Wl,--no-as-needed", "-lc10"], check=True)
torch.ops.load_library("library.so")
x = torch.ones(4)
graph = torch.fx.symbolic_trace(lambda x: torch.ops.quantized.add_relu.default(x, x, 1.0, 0))
{_GIVEN}
"""


_NEEDED = (
    _LOADED.replace(
        "build = ",
        """Path("needed.cpp").write_text("extern const int by = HERE;")
subprocess.run(["g++", "-shared", "-fPIC", "-o", "needed.so", "needed.cpp"], check=True)
build = """,
    )
    .replace(' "HERE";', ";")
    .replace('"-lc10"]', '"-lc10", "./needed.so"]')
)

_AROUND_CODE = (
    pair("library with kernels for a namespace of torch", _LOADED, "2", "3"),
    pair(
        "library in which a namespace is the end of another text",
        _LOADED.replace(r"\0quantized", "not quantized"),
        "2",
        "3",
    ),
    pair("library that another one needs", _NEEDED, "2", "3"),
    pair(
        "library that was deleted after loading",
        _LOADED.replace("x = torch", "Path('library.so').unlink()\nx = torch"),
        "2",
        "3",
        reason="library.so was replaced or deleted",
    ),
    pair(
        "library that another one needs and that was deleted",
        _NEEDED.replace("x = torch", "Path('needed.so').unlink()\nx = torch"),
        "2",
        "3",
        reason="needed.so was replaced or deleted",
    ),
    pair(
        "library in a directory of the system",
        _LOADED.replace(
            "text = ",
            "from graphstash.hooks.inductor import libraries\n"
            "libraries._OF_SYSTEM = (str(Path.cwd()),)\n\ntext = ",
        ),
        "2",
        "3",
    ),
    pair(
        "objects for a device that replace those of torch",
        """
        import torch
        from torch._inductor.codegen import common

        common.get_device_op_overrides("cpu")

        class Mine(type(common.device_op_overrides_dict["cpu"])):
            def device_guard(self, number):
                return HERE

        common.register_device_op_overrides("cpu", Mine())
        torch.compile(lambda x: x.sin())(torch.ones(4))
        """,
    ),
    _code(
        "operation of a module that a backward imports",
        f"{_OTHER}\ndef gradient(ctx, g):\n    import torch\n    return torch.ops.pairs.other(g)\n"
        "scale.register_autograd(gradient)",
    ),
    _changes(
        "rule for a mode of dispatch",
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "class Mode(TorchDispatchMode):\n    pass\n"
        "scale.register_torch_dispatch(Mode, lambda mode, f, types, args, kwargs: args[0] * HERE)",
    ),
    _changes(
        "effect of an operation",
        "from torch._higher_order_ops.effects import _EffectType, _register_effectful_op\n"
        "if HERE:\n"
        "    _register_effectful_op(torch.ops.pairs.scale.default, _EffectType.ORDERED)",
        *OFF_AND_ON,
    ),
    _changes(
        "whether an unused operation is kept",
        "if HERE:\n    torch.fx.node.has_side_effect(torch.ops.pairs.scale.default)",
        *OFF_AND_ON,
    ),
    _changes(
        "constraint of the layout of arguments",
        "from torch._inductor import lowering\nif HERE:\n"
        "    lowering.add_layout_constraint(\n"
        "        torch.ops.pairs.scale.default, lowering.require_contiguous\n    )",
        *OFF_AND_ON,
        text=_FORWARD,
    ),
    _lowers(
        "lowering that wraps one of torch",
        "old = lowering.lowerings[sin]\n@functools.wraps(old)\ndef lowered(x):\n"
        "    return lowering.lowerings[torch.ops.aten.mul.Tensor](old(x), HERE)\n"
        "lowering.lowerings[sin] = lowered",
    ),
    _lowers(
        "argument of a lowering of torch",
        "times = lowering.lowerings[torch.ops.aten.mul.Tensor]\n"
        "lowering.lowerings[sin] = functools.partial(times, HERE)",
    ),
    _lowers(
        "function that torch makes a lowering of",
        "made = lowering.make_pointwise(lambda x: lowering.ops.HERE(x))\n"
        "lowering.register_lowering(sin)(made)",
        "cos",
        "exp",
    ),
    _lowers(
        "operation without a lowering",
        "if HERE:\n    del lowering.lowerings[sin]\n"
        "    lowering.make_fallback(sin, override_decomp=True, warn=False)",
        *OFF_AND_ON,
    ),
    pair(
        "pattern behind AOTAutograd",
        _PATTERN.replace("PASS", "post_grad.pass_patterns[1]"),
        "cos",
        "exp",
    ),
    pair(
        "kernel of ATen in Python",
        """
        import torch

        silu = torch.ops.aten.silu.default
        silu.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(lambda x: x * HERE)
        torch.compile(lambda x: torch.nn.functional.silu(x))(torch.ones(4))
        """,
    ),
    pair(
        "choices of Inductor",
        """
        import torch
        from torch._inductor.choices import InductorChoices
        from torch._inductor.virtualized import V

        class Choices(InductorChoices):
            def should_use_cooperative_reduction(self, *_, **__):
                return HERE

        V.set_choices_handler(Choices())
        torch.compile(lambda x: x.sin())(torch.ones(4))
        """,
        *OFF_AND_ON,
    ),
    _given(
        "decomposition that a backend gives",
        "table = {**select_decomp_table(), aten.sin.default: lambda x: aten.HERE.default(x)}",
        "decompositions=table",
        "cos",
        "exp",
    ),
    _given(
        "compiler that a backend gives",
        "def inner(graph, inputs, **how):\n    for each in graph.graph.nodes:\n"
        "        if each.target is aten.sin.default:\n"
        "            each.target = aten.HERE.default\n"
        "    return compile_fx_inner(graph, inputs, **how)\n",
        "inner_compile=inner",
        "cos",
        "exp",
    ),
    pair("code of a kind of tensors", _SUBCLASS, "2", "3"),
    pair("outputs that a user sees", _VISIBLE, "[0]", "[0, 1]"),
    pair("inputs that a gradient overwrites", _DONATED, "[]", "[0]"),
    _runs("global of a kernel", "2", "3", before="by = tl.constexpr(HERE)", expression="by"),
    _runs(
        "attribute that a kernel reads",
        before="config = types.SimpleNamespace(by=HERE)",
        expression="config.by",
    ),
    _runs(
        "default of a function that a kernel calls",
        before="@triton.jit\ndef by(x, factor: tl.constexpr = HERE):\n    return x * factor",
        expression="by(1)",
    ),
    _runs("constant of a kernel", "2", "3", expression="n", constant="HERE"),
    _runs(
        "what runs before a kernel",
        around="configs = [triton.Config({}, pre_hook=lambda named: named['x'].fill_(HERE))]\n"
        "kernel = triton.autotune(configs, key=[], do_bench=lambda *_, **__: 1.0)(kernel)",
    ),
    _runs(
        "times that the team's tuner has measured",
        before="from graphstash.tuning.targets.triton import autotune",
        around="configs = [triton.Config({}, num_warps=warps) for warps in (4, 8)]\n"
        "kernel = autotune(configs, key=[], do_bench=lambda *_, **__: 1.0)(kernel)\n"
        "kernel.bench_time, kernel.cache[()] = HERE, configs[0]",
        relation=Relation.EQUAL,
    ),
)

_RANKS = """
import torch
import torch._inductor.config as config
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

dist.init_process_group("fake", store=dist.HashStore(), rank=HERE, world_size=2)
SETTING = True
torch.compile(lambda x: x.sin())(torch.ones(4))
"""


_SIZED = """
import torch
from torch._custom_class_base import CustomClassBase
from torch._library.opaque_object import MemberType, register_custom_class

class Size(CustomClassBase):
    def __init__(self, number):
        self.number = number

    def rows(self):
        return self.number * FACTOR

    def __eq__(self, other):
        return type(other) is Size and other.number == self.number

    def __hash__(self):
        return self.number

    def __fx_repr__(self):
        return f"Size({self.number})", {"Size": Size}

members = {"rows": MemberType.USE_REAL} if HOISTED else None
register_custom_class(Size, typ="constant", hoist=HOISTED, members=members)

SIZE = Size(NUMBER)

@torch.library.custom_op("pairs::sized", mutates_args=())
def sized(x: torch.Tensor, size: Size) -> torch.Tensor:
    return x.new_ones(size.rows())

sized.register_fake(lambda x, size: x.new_empty(size.rows()))
torch.compile(lambda x: sized(x, SIZE).sin())(torch.ones(4))
"""


def _sized(*, factor: str = "2", number: str = "2", is_hoisted: bool = False) -> str:
    """Return a program with an operation that gets an object."""
    text = _SIZED.replace("FACTOR", factor).replace("NUMBER", number)
    return text.replace("HOISTED", str(is_hoisted))


def _newest(name: str, text: str, *values: str, **how: Any) -> Pair:
    """Return a pair of programs with something that torch 2.7 lacks."""
    return pair(name, text, *values, only_in="torch-newest", **how)


_NEWEST = (
    _newest(
        "annotation of an operation",
        """
        import torch
        from torch.fx.traceback import annotate

        def function(x):
            with annotate({"fallback_to_eager": HERE}):
                y = torch.exp(x)
            return y.sin()

        torch.compile(function)(torch.ones(4))
        """,
        *OFF_AND_ON,
    ),
    _newest(
        "policy of checkpoints under the same hash",
        """
        import functools
        import torch
        from torch.utils import checkpoint

        def policy(context, operation, *_, **__):
            is_kept = operation == torch.ops.aten.HERE.default
            policies = checkpoint.CheckpointPolicy
            return policies.MUST_SAVE if is_kept else policies.PREFER_RECOMPUTE

        context = functools.partial(checkpoint.create_selective_checkpoint_contexts, policy)
        context.cache_hash = "mine"

        def function(x):
            return checkpoint.checkpoint(
                lambda x: x.sin().cos().exp(), x, use_reentrant=False, context_fn=context
            )

        torch.compile(function)(torch.ones(4, requires_grad=True))
        """,
        "sin",
        "cos",
    ),
    _newest(
        "implementations among which Inductor chooses",
        f"""{_DEFINE}
from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning

configs = [CustomOpConfig(lambda x: x * HERE), CustomOpConfig(lambda x: x + x)]
register_custom_op_autotuning(scale, configs=configs)
{_FORWARD}""",
        "2",
        "2.0",
    ),
    _newest(
        "pass for a device under the same identity",
        """
        import torch
        from torch._inductor.codegen import common
        from torch._inductor.codegen.cpp import CppScheduling
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
        from torch._inductor.custom_graph_pass import CustomGraphModulePass

        class Pass(CustomGraphModulePass):
            def __call__(self, graph):
                return HERE

            def uuid(self):
                return "mine"

        common.init_backend_registration()
        common.register_backend_for_device(
            "cpu", CppScheduling, PythonWrapperCodegen, device_custom_pass=Pass()
        )
        torch.compile(lambda x: x.sin())(torch.ones(4))
        """,
        "None",
        "graph",
    ),
    _newest(
        "program that is compiled ahead, under a random name",
        """
        import torch

        compiled = torch.compile(lambda x: x.sin() * HERE, fullgraph=True)
        compiled.aot_compile(((torch.ones(4),), {}))
        """,
    ),
    _newest("class of an object that an operation gets", _sized(factor="HERE")),
    _newest("class of an object that a graph gets", _sized(factor="HERE", is_hoisted=True)),
    _newest("object that a graph gets", _sized(number="HERE", is_hoisted=True)),
    *(
        _newest(
            f"rank with the setting {name}",
            _RANKS.replace("SETTING = True", f"config.{setting}"),
            "0",
            "1",
            reason=f"{name} writes the rank of the process",
        )
        for name, setting in {
            "bucket_all_gathers_fx": "bucket_all_gathers_fx = 'all'",
            "collective_bucketing": "aten_distributed_optimizations.collective_bucketing = True",
        }.items()
    ),
)

_SEEN_BEFORE = (
    _around(
        "memory that inputs share",
        "torch.ones(4)[:], torch.ones(4)[:]",
        "memory[:4], memory[:4]",
        text=_SHARED_MEMORY,
    ),
    _around(
        "offset in memory that inputs share",
        "memory[:8], memory[2:10]",
        "memory[:8], memory[4:12]",
        text=_SHARED_MEMORY,
    ),
    _around(
        "order of inputs in memory that they share",
        "memory[:8], memory[4:12]",
        "memory[4:12], memory[:8]",
        text=_SHARED_MEMORY,
    ),
    pair(
        "size of memory that inputs share",
        _SHARED_MEMORY.replace("16", "HERE").replace("= HERE\n", "= memory[:8], memory[4:12]\n"),
        "16",
        "20",
    ),
    pair(
        "range of a dynamic size",
        _DYNAMIC.replace("BEFORE", "torch._dynamo.mark_dynamic(x, 0, min=2, max=HERE)"),
        "8",
        "4000",
    ),
    pair(
        "score of flex_attention",
        """
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        q = torch.ones(1, 2, 128, 16)
        with torch.no_grad():
            torch.compile(flex_attention)(q, q, q, score_mod=lambda s, b, h, i, j: s * HERE)
        """,
    ),
    pair(
        "region that is compiled once",
        """
        import torch

        @torch.compiler.nested_compile_region
        def region(x):
            return x * HERE

        torch.compile(lambda x: region(x) + region(x + 1))(torch.ones(4))
        """,
        only_in="torch-newest",
    ),
    _switch(
        "variable that keeps arithmetic on numbers",
        "import os; os.environ['TENSORIFY_PYTHON_SCALARS'] = 'HERE'",
        "0",
        "1",
    ),
    pair(
        "setting of symbolic sizes",
        _DYNAMIC.replace(
            "BEFORE", "config.backed_size_oblivious = HERE\ntorch._dynamo.mark_dynamic(x, 0)"
        ),
        *OFF_AND_ON,
    ),
    pair(
        "history of an input",
        "import torch\ntorch.compile(lambda x: x.sin())(torch.ones(4, requires_grad=True)HERE)",
        "",
        " * 1",
    ),
    pair(
        "input that keeps its address",
        """
        import torch

        x = torch.ones(4)
        if HERE:
            torch._dynamo.mark_static_address(x, guard=False)
        torch.compile(lambda x: x.sin())(x)
        """,
        *OFF_AND_ON,
        in_one_process=True,
    ),
    pair(
        "alignment of an input on a GPU",
        """
        import inspect
        import torch
        from torch._functorch._aot_autograd import autograd_cache
        from torch._functorch._aot_autograd.schemas import AOTConfig
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._subclasses import FakeTensor, FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode = FakeTensorMode(shape_env=ShapeEnv())
        x = FakeTensor(mode, torch.empty(9, device="meta")[HERE:][:8], torch.device("cuda:0"))
        graph = torch.fx.symbolic_trace(lambda x: torch.sin(x))
        settings = AOTConfig(*[compile_fx_inner] * 3, {}, 1, 0, False)
        make_key = autograd_cache.autograd_cache_key
        more = [{}] if "fx_config" in inspect.signature(make_key).parameters else []
        with tracing(TracingContext(mode)):
            key, _ = make_key(graph, [x], settings, *more)
        autograd_cache.AOTAutogradCache.get_remote_cache().get(key)
        """,
        "0",
        "1",
    ),
    _lowers(
        "graph in place of a decomposition",
        "decompositions[torch.ops.aten.silu.default] = torch.fx.symbolic_trace(lambda x: x * HERE)",
        reason="OrderedDict",
    ),
    _lowers(
        "function of TorchScript in place of a decomposition",
        "made = torch.jit.trace(lambda x: x * HERE, torch.ones(4))\n"
        "decompositions[torch.ops.aten.silu.default] = made",
        reason="ScriptFunction",
    ),
    _given(
        "object that a backend gives as a compiler",
        "class Inner:\n    def __call__(self, graph, inputs, **how):\n"
        "        graph.graph.find_nodes(op='output')\n"
        "        print(aten.HERE.default)\n"
        "        return compile_fx_inner(graph, inputs, **how)\n",
        "inner_compile=Inner()",
        "cos",
        "exp",
    ),
    _lowers(
        "decomposition that comes after torch's copy of the table",
        "from torch._inductor.decomposition import fast_random_decomps\n"
        "fast_random_decomps.cache_clear()\nif HERE:\n    fast_random_decomps()\n"
        "decompositions[torch.ops.aten.silu.default] = lambda x: x * 3",
        *OFF_AND_ON,
    ),
    pair("kernel of an operator of the user", _OPERATOR, "2", "3"),
    pair(
        "attribute of an operator of the user",
        _OPERATOR.replace("HERE", "mine.by").replace(
            "mine = Mine()", "mine = Mine()\nmine.by = HERE"
        ),
    ),
    pair("generator of code for a device", _BACKEND_OF_DEVICE, "False", "True"),
    pair(
        "state of a graph pass",
        _PASS.replace("HERE", "self.by").replace(
            "    def __call__",
            "    by = 1\n\n    def __init__(self):\n        self.by = HERE\n\n    def __call__",
        ),
    ),
    _noted(
        "kernel of ATen in place of another one",
        "kernels = aten.silu.default.py_kernels\n"
        "key = torch._C.DispatchKey.CompositeImplicitAutograd\nkernels[key] = lambda x: x * 4",
        "lambda x: x.sin()",
        "kernels[key] = lambda x: x * HERE\naten.silu.default._dispatch_cache.clear()",
    ),
    pair(
        "pass of a pattern",
        _PATTERN.replace("HERE", "cos").replace("PASS", "post_grad.pass_patterns[HERE]"),
        "0",
        "1",
    ),
    _noted(
        "lowering that moves to another operation",
        "one, other = aten.silu.default, aten.relu.default\ntable = lowering.lowerings\n"
        "table.pop(other)\ntable[one] = lambda x: x",
        "lambda x: x.sin()",
        "if HERE:\n    table[other] = table.pop(one)",
        *OFF_AND_ON,
    ),
    _noted(
        "kernel of ATen that moves to another overload",
        "aten.silu.out.py_kernels.clear()\none, other = aten.silu.default, aten.silu.out\n"
        "key = torch._C.DispatchKey.CompositeImplicitAutograd\n"
        "one.py_kernels[key] = lambda x, **_: x",
        "lambda x: x.sin()",
        "if HERE:\n    other.py_kernels[key] = one.py_kernels.pop(key)",
        *OFF_AND_ON,
    ),
    _noted(
        "constraint of layouts that moves to another operation",
        "add, table = lowering.add_layout_constraint, lowering._maybe_layout_constraints\n"
        "one, other = aten.silu.default, aten.sin.default\n"
        "table.pop(one, None), table.pop(other, None)\nadd(one, lambda *_: None)",
        "lambda x: x.sin()",
        "if HERE:\n    table[other] = table.pop(one)",
        *OFF_AND_ON,
    ),
    _noted(
        "constraint of layouts that comes late",
        f"{_DEFINE}\nsin = torch.ops.pairs.scale.default",
        "lambda x: sin(x)",
        "if HERE:\n    lowering.add_layout_constraint(sin, lowering.require_contiguous)\n"
        "torch.compile(lambda x: scale(x))(torch.ones(4))",
        *OFF_AND_ON,
    ),
)

_SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
x = distribute_tensor(torch.ones(4, 4), mesh, [HERE])
torch.compile(lambda x: x @ x)(x)
"""

_REFUSED_CODE = (
    *(
        _reads(name, before, expression, reason=reason)
        for name, before, expression, reason in (
            (
                "large tensor",
                "FACTOR = torch.full((100, 100), HERE.0)",
                "g * FACTOR.sum()",
                "a tensor of 10000 elements, more than 4096",
            ),
            (
                "parameter",
                "FACTOR = torch.nn.Parameter(torch.tensor(HERE.0))",
                "g * FACTOR.detach()",
                "a tensor of the class Parameter",
            ),
            (
                "gradient of a tensor",
                "FACTOR = torch.ones((), requires_grad=True)\nFACTOR.grad = torch.tensor(HERE.0)",
                "g * FACTOR.grad",
                "a tensor with a gradient",
            ),
            (
                "rank of the process",
                "import torch.distributed as dist",
                "g * (dist.get_rank() + HERE)",
                "get_rank",
            ),
            ("file", "", "g * torch.load('HERE').item()", "torch.load"),
            (
                "program of TorchScript from a file",
                "",
                "torch.jit.load('HERE')(g)",
                "torch.jit._serialization.load reads",
            ),
            (
                "used memory of a GPU",
                "",
                "g * (torch.cuda.memory_allocated() + HERE)",
                "memory_allocated reads",
            ),
            ("seed", "", "g * (torch.initial_seed() + HERE)", "initial_seed"),
            ("operation by its name", _OTHER, "getattr(torch.ops.pairs, 'other')(g)", "as a whole"),
        )
    ),
    pair(
        "tensor in shards",
        _SHARDED,
        "Shard(0)",
        "Replicate()",
        reason="mesh differs in each process",
    ),
    _code(
        "operations under another name",
        f"{_OTHER}\ndef gradient(ctx, g):\n    ops = torch.ops\n    return ops.pairs.other(g)\n"
        "scale.register_autograd(gradient)",
        reason="read as a whole",
    ),
    pair(
        "table of operations that torch makes in place",
        """
        import torch
        from torch._inductor.fx_passes import reinplace

        del reinplace.inplaceable_ops[torch.ops.aten.index_put.default]
        x, at = torch.ones(4), torch.tensor([1])
        torch.compile(lambda x: torch.ops.aten.index_put(x.sin(), [at], x[:1] * HERE))(x)
        """,
        reason="a program changed the table torch._inductor.fx_passes.reinplace.inplaceable_ops",
    ),
    pair(
        "kernel of ATen that a library replaces",
        """
        import torch

        library = torch.library.Library("aten", "IMPL")
        library.impl("silu", lambda x: x * HERE, "AutogradCPU")
        torch.compile(lambda x: torch.nn.functional.silu(x))(torch.ones(4, requires_grad=True))
        """,
        reason="aten/silu/AutogradCPU",
    ),
    _noted(
        "kernel of ATen in place of one of another library",
        "library = torch.library.Library('pairs', 'DEF')\n"
        "library.define('spare(Tensor x) -> Tensor')\n"
        "library.impl('spare', lambda x: x, 'CPU')",
        "lambda x: x.sin()",
        "library._destroy()\nother = torch.library.Library('aten', 'IMPL')\n"
        "other.impl('silu', lambda x: x * HERE, 'AutogradCPU')",
        reason="aten/silu/AutogradCPU",
    ),
    _noted(
        "fake kernel in torch's own library",
        "from torch._meta_registrations import _meta_lib_dont_use_me_use_register_meta as fake",
        "lambda x: x.sin()",
        "fake.impl('binomial', lambda n, p: n * HERE, 'Meta')",
        reason="aten/binomial/Meta",
    ),
    _noted(
        "library that was destroyed",
        "library = torch.library.Library('aten', 'IMPL')",
        "lambda x: x.sin()",
        "library.impl('silu', lambda x: x * HERE, 'AutogradCPU')\nlibrary._destroy()",
        relation=Relation.EQUAL,
    ),
)

_SWITCHES = (
    _around(
        "type of autocast around the function",
        "torch.autocast('cpu', dtype=torch.bfloat16)",
        "torch.autocast('cpu', dtype=torch.float16)",
    ),
    _around(
        "autocast around the function",
        "contextlib.nullcontext()",
        "torch.autocast('cpu', dtype=torch.bfloat16)",
    ),
    _around(
        "cache of autocast",
        "torch.autocast('cpu', dtype=torch.bfloat16)",
        "torch.autocast('cpu', dtype=torch.bfloat16, cache_enabled=False)",
    ),
    _around("gradient mode", "contextlib.nullcontext()", "torch.no_grad()"),
    _around("kernels of attention", "SDPBackend.MATH", "SDPBackend.FLASH_ATTENTION", text=_ATTEND),
    _around(
        "flags of mkldnn",
        "torch.backends.mkldnn.flags(enabled=True)",
        "torch.backends.mkldnn.flags(enabled=False)",
    ),
    _around(
        "determinism of mkldnn",
        "torch.backends.mkldnn.flags(deterministic=False)",
        "torch.backends.mkldnn.flags(deterministic=True)",
    ),
    _around(
        "switches of cuDNN",
        "torch.backends.cudnn.flags(enabled=True)",
        "torch.backends.cudnn.flags(enabled=False)",
    ),
    _switch("default type", "torch.set_default_dtype(torch.HERE)", "float32", "float64"),
    _switch("threads within operations", "torch.set_num_threads(HERE)", "2", "3"),
    _switch("determinism", "torch.use_deterministic_algorithms(HERE)"),
    _switch("denormal numbers as zero", "torch.set_flush_denormal(HERE)"),
    _switch(
        "setting that replaces fake kernels",
        "import types; torch._dynamo.config._custom_ops_profile = HERE",
        "None",
        "types.SimpleNamespace(data={})",
        reason="_custom_ops_profile",
    ),
    _switch(
        "warnings instead of determinism",
        "torch.use_deterministic_algorithms(True, warn_only=HERE)",
    ),
    _switch("filling of memory", "torch.utils.deterministic.fill_uninitialized_memory = HERE"),
    _switch(
        "precision of products", "torch.set_float32_matmul_precision(HERE)", "'highest'", "'medium'"
    ),
    _switch(
        "reduced sums of half precision",
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = HERE",
    ),
    _switch(
        "reduced sums of bfloat16",
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = HERE",
    ),
    _switch("flash attention", "torch.backends.cuda.enable_flash_sdp(HERE)"),
    _switch("attention by mathematics", "torch.backends.cuda.enable_math_sdp(HERE)"),
    _switch(
        "engine of quantization", "torch.backends.quantized.engine = HERE", "'onednn'", "'fbgemm'"
    ),
    _switch("anomaly mode", "torch.autograd.set_detect_anomaly(HERE)"),
    _switch("choice of einsum's path", "torch.backends.opt_einsum.enabled = HERE"),
    _switch("fast path of attention", "torch.backends.mha.set_fastpath_enabled(HERE)"),
    *(
        _switch(f"setting {name} of {module}", f"import {module} as c; c.{name} = HERE", *values)
        for module, name, *values in (
            ("torch._inductor.config", "_micro_pipeline_tp"),
            ("torch._inductor.config", "_fuse_ddp_bucket_size", "25", "50"),
            ("torch._inductor.config", "_fuse_ddp_communication_passes", "['a']", "['b']"),
            ("torch._functorch.config", "activation_memory_budget_solver", "'dp'", "'greedy'"),
        )
    ),
    *(
        _switch(
            f"function in the setting {name}",
            f"import {module} as c\ndef chosen(*_): return HERE\nc.{name} = chosen",
            "2",
            "3",
        )
        for module, name in (
            ("torch._inductor.config", "estimate_op_runtime"),
            ("torch._functorch.config", "activation_memory_budget_runtime_estimator"),
        )
    ),
    _switch(
        "setting of Dynamo that Inductor reads",  # 2.15 has none
        "import torch._dynamo.config as c; import torch._inductor.config as d\n"
        "if 'skip_fsdp_hooks' in c._config:\n    c.skip_fsdp_hooks = HERE\n"
        "else:\n    d._micro_pipeline_tp = HERE",
    ),
    _switch(
        "flags of mkldnn when Inductor registered its fusions",
        "from torch._inductor.fx_passes import mkldnn_fusion, post_grad\n"
        "post_grad.lazy_init.cache_clear()\n"
        "mkldnn_fusion._mkldnn_fusion_init.cache_clear()\n"
        "for each in post_grad.pass_patterns:\n    each.patterns.clear()\n"
        "with torch.backends.mkldnn.flags(enabled=HERE):\n"
        "    mkldnn_fusion._mkldnn_fusion_init()",
    ),
    _switch("how torch was built", "torch.__config__.show = lambda: 'HERE'", "one", "another"),
    _switch("setting of Inductor", "import torch._inductor.config as c; c.epilogue_fusion = HERE"),
)

_EQUAL = Relation.EQUAL

_METHOD = "load = CppVecKernel.load\nCppVecKernel.load = lambda *given: [HERE, load(*given)][1]"

_IN_COMPILER = (
    _patched("method of a class of the compiler", _METHOD),
    _patched(
        "method of a class of the compiler, in one program",
        "if HERE:\n    CppVecKernel.load = lambda *given: None",
        *OFF_AND_ON,
    ),
    _patched(
        "function of a module of the compiler",
        "from torch._inductor.fx_passes import joint_graph\n"
        "joint_graph.joint_graph_passes = lambda graph: [HERE, graph][1]",
    ),
    _patched(
        "function of torch's references",
        "import torch._refs\ntorch._refs.sin = lambda x: x * HERE",
    ),
    _patched(
        "function that traces for torch.compile",
        "import torch._functorch.partitioners as made\n"
        "made.default_partition = lambda *given, **more: HERE",
    ),
    _patched(
        "function that a patch of the compiler calls",
        "helper = lambda: HERE\nGraphLowering.codegen = lambda self: helper()",
    ),
    _patched(
        "closure of a patch of the compiler",
        "def patch(number):\n    return lambda self: number\nGraphLowering.codegen = patch(HERE)",
    ),
    _patched(
        "patch that changes a setting while it runs",
        "from torch._inductor import config\nfrom torch._inductor.scheduler import Scheduler\n"
        "def patch(self):\n    with config.patch('triton.store_cubin', False):\n"
        "        self.scheduler = Scheduler(self.operations[HERE:])\n"
        "GraphLowering._update_scheduler = patch",
    ),
    _patched(
        "class of the compiler",
        "class Mine(GraphLowering):\n    def codegen(self):\n        return HERE\n"
        "lowered.GraphLowering = Mine",
    ),
    *(
        _patched(
            f"patch of the compiler in a {label}",
            "def patch(self):\n    return HERE\nGraphLowering.codegen = WRAPPED".replace(
                "WRAPPED", wrapped
            ),
        )
        for label, wrapped in {
            "wrapper of torch": "torch._dynamo.disable(patch)",
            "context of torch": "torch.no_grad()(patch)",
            "partial": "functools.partial(patch, None)",
            "cache": "functools.cache(patch)",
            "property": "property(patch)",
            "static method": "staticmethod(patch)",
            "context manager": "contextlib.contextmanager(patch)",
        }.items()
    ),
    _patched(
        "method of the compiler in place of another one",
        "CppVecKernel.load = HERE.load",
        "CppVecKernel",
        "CppKernel",
    ),
    _patched(
        "method of the compiler that is gone", "if HERE:\n    del CppVecKernel.load", *OFF_AND_ON
    ),
    _noted(
        "method of the compiler after the first key",
        "from torch._inductor.graph import GraphLowering",
        "lambda x: x.sin()",
        "GraphLowering.codegen = lambda self: HERE",
    ),
    _patched(
        "patch of the compiler without readable source",
        "made = {}\nexec('def patch(self): return HERE', made)\n"
        "GraphLowering.codegen = made['patch']",
        reason=r"torch\._inductor\.graph\.GraphLowering\.codegen: patch has no readable source",
    ),
    _patched(
        "patch that runs in a module of the compiler",
        "exec('def codegen(self): return HERE', vars(lowered))\n"
        "GraphLowering.codegen = lowered.codegen",
        reason=r"codegen runs as a part of torch\._inductor\.graph",
    ),
    _patched(
        "function of the compiler with other globals",
        "code = GraphLowering.codegen.__code__\n"
        "GraphLowering.codegen = types.FunctionType(code, {**vars(lowered), 'V': HERE})",
        reason=r"codegen runs as a part of torch\._inductor\.graph",
    ),
    _patched(
        "mock in the compiler",
        "GraphLowering.codegen = unittest.mock.MagicMock(return_value=HERE)",
        reason=r"torch\._inductor\.graph\.GraphLowering\.codegen: a unittest\.mock",
    ),
    _patched(
        "patch of the compiler that reads a file",
        "GraphLowering.codegen = lambda self: open('HERE').read()",
        reason=r"a program replaced torch\._inductor\.graph\.GraphLowering\.codegen: open",
    ),
)

_NOT_IN_COMPILER = tuple(
    _patched(name, f"if HERE:\n{textwrap.indent(statement, '    ')}", "0", "1", relation=_EQUAL)
    for name, statement in {
        "patch of the compiler that was undone": "codegen = GraphLowering.codegen\n"
        "GraphLowering.codegen = lambda self: None\nGraphLowering.codegen = codegen",
        "method that the compiler did not have and lost again": "CppVecKernel.mine = print\n"
        "del CppVecKernel.mine",
        "wrappers of torch around its own functions": "from torch._dynamo import eval_frame\n"
        "patcher = getattr(eval_frame, 'TorchPatcher', None)\n"
        "patcher.patch.__wrapped__() if patcher else None\n"
        "GraphLowering.codegen = torch._dynamo.disable(GraphLowering.codegen)",
        "graph that torch unpickled": "import pickle\n"
        "pickle.loads(pickle.dumps(torch.fx.symbolic_trace(lambda x: x.sin())))",
        "loader of a test runner": "class Loader:\n    def __call__(self):\n        pass\n"
        "lowered.__loader__ = Loader()",
        "cache of a function of the compiler": "import torch._inductor.utils as made\n"
        "for each in [*vars(made).values()]:\n    if hasattr(each, 'cache_clear'):\n"
        "        each.cache_clear()",
        "modules of the compiler that are imported late": "import torch._inductor.codegen.triton\n"
        "import torch._inductor.codegen.cpp_wrapper_gpu\nimport torch._inductor.comms\n"
        "import torch._dynamo.backends.debugging",
        "counters and data in the compiler": "import torch._inductor.metrics as metrics\n"
        "metrics.generated_kernel_count += 1\nlowered.mine = {'a': print}",
        "function of torch_xla in the compiler": "def sin(x):\n    return x\n"
        "made = types.FunctionType(sin.__code__, {'__name__': 'torch_xla.core'})\n"
        "lowered.getattr_recursive = made",
    }.items()
)

_REVERSE = (
    pair("nothing but the host", _SWITCH, _PLAIN, relation=_EQUAL),
    pair("comment", _SWITCH, "# one", "# another", relation=_EQUAL),
    _reads_changed(
        "method given to all tensors that no code of an operation reads",
        "torch.Tensor.shown = HERE",
        "g * 2",
        "lambda g: 2",
        "lambda g: 3",
        relation=_EQUAL,
    ),
    _lowers(
        "decompositions that are gone after torch's copy of the table",
        "from torch._inductor.decomposition import fast_random_decomps\n"
        "fast_random_decomps.cache_clear()\nfast_random_decomps()\n"
        "for each in [*decompositions][:20]:\n    del decompositions[each]",
        relation=_EQUAL,
    ),
    _switch(
        "operation that the graph does not name",
        "HERE",
        _PLAIN,
        "torch.library.define('pairs::spare', '(Tensor x) -> Tensor')",
        relation=_EQUAL,
    ),
    _switch(
        "settings that got their own values",
        "import torch._inductor.config as c; c.HERE",
        "_config",
        "load_config(c.save_config())",
        relation=_EQUAL,
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
    pair("lowering on another host", _LOWER, "cos", relation=_EQUAL),
    pair("graph pass on another host", _PASS, "None", relation=_EQUAL),
)

PAIRS = with_extended(
    (
        pair(
            "operation",
            _SWITCH.replace("x @ x", "x.HERE()").replace("HERE\n", "\n", 1),
            "sin",
            "cos",
        ),
        *_CODE,
        *_AROUND_CODE,
        *_NEWEST,
        *_SEEN_BEFORE,
        *_RECORDED,
        *_UNSHARED,
        *_REFUSED_CODE,
        *_SWITCHES,
        *_IN_COMPILER,
        *_NOT_IN_COMPILER,
        *_REVERSE,
    ),
    # Another pair above covers the same registrations and switches.
    *(
        "history of an input",
        "order of inputs in memory that they share",
        "size of memory that inputs share",
        "generator of code for a device",
        "state of a graph pass",
        "lowering from a prompt",
        "determinism of mkldnn",
        "reduced sums of bfloat16",
        "reduced sums of half precision",
        "warnings instead of determinism",
        "filling of memory",
        "flash attention",
        "attention by mathematics",
        "engine of quantization",
        "anomaly mode",
        "choice of einsum's path",
        "fast path of attention",
        "graph pass on another host",
        "patch of the compiler in a partial",
        "patch of the compiler in a static method",
        "patch of the compiler in a context manager",
        "lowering that moves to another operation",
        "kernel of ATen that moves to another overload",
        "constraint of layouts that moves to another operation",
        "fake kernel of an overload in a namespace of torch",
        "kernel of an operation in the namespace inductor",
        "kernel of an operation in the namespace quantized",
        "setting _fuse_ddp_bucket_size of torch._inductor.config",
        "setting _fuse_ddp_communication_passes of torch._inductor.config",
        "function in the setting activation_memory_budget_runtime_estimator",
        "property that a method given to all tensors reads",
        "type of autocast that comes before another one",
    ),
)
