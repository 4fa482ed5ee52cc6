"""Programs for torch.compile: a graph, code of the user, tables of Inductor, and settings."""
# mypy: disallow-untyped-calls=False, disallow-any-generics=False

import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch._decomp import decompositions_for_rng, global_decomposition_table
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._functorch._aot_autograd.schemas import AOTConfig
from torch._guards import TracingContext, tracing
from torch._higher_order_ops import effects
from torch._inductor import codecache, compile_fx, config, decomposition, lowering
from torch._inductor.codecache import BypassFxGraphCache
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import _side_effectful_functions

from compilers.wrong_hits.generated.programs import laid_out, named
from compilers.wrong_hits.generated.recorder import Answer
from compilers.wrong_hits.generated.values import HOLDERS, VALUES
from graphstash.hooks.inductor.fingerprint import entry_request
from graphstash.hooks.inductor.key_info import KeyInfo
from graphstash_schema import ArtifactKind

__all__ = ["AXES", "meaning", "prepare", "text"]

_NAMES = ("sin", "cos", "exp", "neg", "relu", "tanh", "sigmoid", "abs", "sinc", "silu")


OPERATIONS = {
    **{name: f"aten.{name}.default, (x,)" for name in _NAMES},
    **named(
        "aten.sum.dim_IntList, (x, [0])",
        "aten.sum.dim_IntList, (x, [1])",
        "aten.sum.dim_IntList, (x, [0], True)",
        "aten.sum.dim_IntList, (x, [0]), {'dtype': torch.float64}",
        "aten.amax.default, (x, [0])",
        "aten.amax.default, (x, [-1])",
        "aten.var.correction, (x, [0]), {'correction': 0}",
        "aten.var.correction, (x, [0]), {'correction': 1}",
        "aten._softmax.default, (x, 0, False)",
        "aten._softmax.default, (x, 1, False)",
        "aten.add.Tensor, (x, x)",
        "aten.add.Tensor, (x, x), {'alpha': 2}",
        "aten.add.Tensor, (x, x), {'alpha': 2.0}",
        "aten.mul.Tensor, (x, 0.0)",
        "aten.mul.Tensor, (x, -0.0)",
        "aten.mul.Tensor, (x, 1)",
        "aten.mul.Tensor, (x, True)",
        "aten.mul.Tensor, (x, 1.0)",
        "aten.mul.Tensor, (x, float('nan'))",
        "aten.mul.Tensor, (x, float('inf'))",
        "aten.clamp.default, (x, None, 1)",
        "aten.clamp.default, (x, 1, None)",
        "aten.gelu.default, (x,)",
        "aten.gelu.default, (x,), {'approximate': 'tanh'}",
        "aten.transpose.int, (x, 0, 1)",
        "aten.slice.Tensor, (x, 0, 0, 1)",
        "aten.slice.Tensor, (x, 0, 1, 2)",
        "aten.slice.Tensor, (x, 1, 0, 1)",
        "aten.roll.default, (x, [1], [0])",
        "aten.roll.default, (x, [1])",
        "aten.div.Tensor_mode, (x, 2), {'rounding_mode': 'floor'}",
        "aten.div.Tensor_mode, (x, 2), {'rounding_mode': 'trunc'}",
        "aten._to_copy.default, (x,), {'dtype': torch.float64}",
        "aten._to_copy.default, (x,), {'dtype': torch.bfloat16}",
        "aten.clone.default, (x,)",
        "aten.clone.default, (x,), {'memory_format': torch.contiguous_format}",
        "aten.native_dropout.default, (x, 0.5, True)",
        "aten.native_dropout.default, (x, 0.25, True)",
        "aten.bernoulli.p, (x, 0.5)",
        "aten.full_like.default, (x, 2)",
        "aten.full_like.default, (x, 2.0)",
        "aten.mm.default, (x, x)",
        "aten.cumsum.default, (x, 0)",
        "aten.cumsum.default, (x, 1)",
    ),
}

INPUTS = named(
    "torch.ones(4, 4)",
    "torch.ones(4, 4).t()",
    "torch.ones(4, 8)[:, ::2]",
    "torch.ones(8, 4)[4:]",
    "torch.ones(20)[4:].view(4, 4)",
    "torch.ones(2, 8)",
    "torch.ones(4, 4, 1)",
    "torch.ones(4, 4, dtype=torch.float64)",
    "torch.ones(4, 4, dtype=torch.bfloat16)",
    "torch.ones(4, 4, dtype=torch.complex64)",
    "torch.ones(4, 4, dtype=torch.complex64).conj()",
    "torch.ones(4, 4, requires_grad=True)",
    "torch.ones(4, 4, requires_grad=True) * 1",
    "torch.ones(1, 4).expand(4, 4)",
    "torch.ones(4, 4, device='meta')",
)

SECOND_INPUTS = named("", "torch.ones(4, 4)", "first", "first[:]", "first.detach()", "3", "3.0")

SWITCHES = named(
    *("contextlib.nullcontext()", "torch.no_grad()", "torch.inference_mode()"),
    "torch.autocast('cpu', dtype=torch.bfloat16)",
    "torch.autocast('cpu', dtype=torch.float16)",
    "torch.autocast('cpu', dtype=torch.bfloat16, cache_enabled=False)",
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)",
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)",
    "torch.autograd.set_detect_anomaly(True, check_nan=False)",
    "torch.backends.mkldnn.flags(enabled=False)",
    "torch.backends.mkldnn.flags(deterministic=True)",
    "torch.backends.cudnn.flags(benchmark=True)",
    "torch.backends.cudnn.flags(deterministic=True)",
    "torch.backends.cudnn.flags(allow_tf32=False)",
    "default_dtype(torch.float64)",
    "deterministic(True)",
    "deterministic(True, warn_only=True)",
    "precision('high')",
    "precision('medium')",
    "threads(2)",
    "torch.autograd.forward_ad._set_fwd_grad_enabled(False)",
    "torch.sparse.check_sparse_tensor_invariants(True)",
)

SETTINGS = named(
    "",
    *(
        f"config.{each}"
        for each in (
            *("epilogue_fusion = False", "fallback_random = True", "max_autotune = True"),
            *("cpp.simdlen = 1", "cpp.simdlen = 256", "cpp.threads = 3", "cpp_wrapper = True"),
            *("cpp.enable_floating_point_contract_flag = 'fast'", "size_asserts = False"),
            *("cpp.enable_unsafe_math_opt_flag = True", "joint_graph_constant_folding = False"),
            *("inplace_buffers = False", "permute_fusion = True", "pattern_matcher = False"),
            *("reorder_for_locality = False", "emulate_precision_casts = True"),
            *(
                "implicit_fallbacks = False",
                "realize_opcount_threshold = 1",
                "shape_padding = False",
            ),
            "post_grad_custom_post_pass = Pass()",
            "unroll_reductions_threshold = 2",
            "joint_custom_pre_pass = Pass()",
            "_pre_fusion_custom_pass = fusion_pass",
        )
    ),
    *(
        f"functorch_config.{each}"
        for each in (
            *("activation_memory_budget = 0.5", "functionalize_rng_ops = True"),
            "ban_recompute_used_far_apart = False",
            *("donated_buffer = False", "view_replay_for_aliased_outputs = False"),
        )
    ),
)

REGISTRATIONS = {
    "nothing": "",
    "backward": "scale.register_autograd(read)",
    "what is saved": "scale.register_autograd(lambda ctx, g: g, setup_context=read)",
    "fake": "scale.register_fake(read)",
    "kernel": "scale.register_kernel('cpu', read)",
    "vmap": "scale.register_vmap(read)",
    "dispatch": "scale.register_torch_dispatch(Mode, read)",
    "lowering": "lowering.lowerings[op] = read",
    "lowering of aten": "lowering.lowerings[aten.sin.default] = read",
    "decomposition": "decomposition.decompositions[op] = read",
    "decomposition of aten": "decomposition.decompositions[aten.sinc.default] = read",
    "decomposition for random numbers": (
        "decompositions_for_rng.extra_random_decomps[aten.sinc.default] = read"
    ),
    "kernel of aten": "set_kernel(aten.silu.default, read)",
    "pattern": "add_pattern(post_grad.pass_patterns[1], read)",
    "pattern in a joint graph": "add_pattern(joint_graph.patterns, read)",
    "constraint": "lowering.add_layout_constraint(op, read)",
    "constraint of aten": "lowering.add_layout_constraint(aten.sin.default, read)",
    "pass": "config.post_grad_custom_pre_pass = PassThatCalls(read)",
    "choices": "V.set_choices_handler(Choices(read))",
    "compiler of the backend": "given['fw_compiler'] = compiler_with(read)",
    "object as the compiler of the backend": "given['fw_compiler'] = compiler_with(Compiler(read))",
    "partition": "given['partition_fn'] = read",
    "decomposition of the backend": "given['decompositions'][aten.sin.default] = read",
}

_OFFSETS = ("torch.ones(8, 4)[4:]", "torch.ones(20)[4:].view(4, 4)")
"""Inputs with a storage offset, which neither torch's guards nor its keys contain. The hook's keys
contain the offset if another input of AOTAutograd shares the memory."""

_OF_BACKEND = frozenset(
    {
        *("compiler of the backend", "object as the compiler of the backend", "partition"),
        "decomposition of the backend",
    }
)

MARKS = {
    "": "",
    "side effect": "torch.fx.node.has_side_effect(op)",
    "side effect of aten": "torch.fx.node.has_side_effect(aten.sin.default)",
    "effect": "effect_of(op)",
    "disabled kernel": "disable(scale)",
    "autocast": "scale.register_autocast('cpu', torch.bfloat16)",
    "other autocast": "scale.register_autocast('cpu', torch.float16)",
    "no lowering": "lowering.lowerings.pop(aten.sin.default)",
    "no decomposition": "decomposition.decompositions.pop(aten.silu.default)",
    "constraint": "lowering.add_layout_constraint(op, lowering.require_contiguous)",
    "variable": "os.environ['UNKNOWN_TO_TORCH'] = '1'",
    "printing": "torch.set_printoptions(precision=3)",
    "seed": "torch.manual_seed(1)",
}

_WITHOUT_MEANING = frozenset({"variable", "printing", "seed"})

BODIES = named("x * 2", "x * 3", "x * 2.0", "x.mul(2)")

AXES: dict[str, dict[str, str]] = {
    "level": named("fx", "autograd"),
    "operation": OPERATIONS,
    "input": INPUTS,
    "second": SECOND_INPUTS,
    "switch": SWITCHES,
    "setting": SETTINGS,
    "mark": MARKS,
    "registration": REGISTRATIONS,
    "holder": HOLDERS,
    "value": VALUES,
    "body": BODIES,
}


def meaning(chosen: dict[str, str]) -> object:
    """Return the choices that affect the key."""
    found = dict(chosen)
    is_fx = found["level"] == "fx"
    if found["input"] in _OFFSETS and (is_fx or "first" not in found["second"]):
        found["input"] = "torch.ones(4, 4)"
    if is_fx and found["registration"] in _OF_BACKEND:
        found["registration"] = "nothing"
    if is_fx:
        found = _of_compiled_graph(found)
    if found["mark"] == found["registration"] == "constraint":  # the later one takes effect
        found["mark"] = ""
    if found["mark"] == "no lowering" and found["registration"] == "lowering of aten":
        found["mark"] = ""  # the registration replaces the removed lowering
    if found["mark"] == "side effect of aten" and found["operation"] != "sin":
        found["mark"] = ""
    if found["registration"] == "nothing":
        del found["holder"], found["value"]
    if found["mark"] in _WITHOUT_MEANING:
        found["mark"] = ""
    return found


def _of_compiled_graph(found: dict[str, str]) -> dict[str, str]:
    """Return the choices that affect a graph behind AOTAutograd, without gradients and views."""
    if found["second"] == "first[:]":
        found["second"] = "first"
    if found["second"] == "first.detach()" and "grad" not in found["input"]:
        found["second"] = "first"
    if found["second"] == "first" and found["input"] == "torch.ones(4, 4)":
        found["second"] = "torch.ones(4, 4)"
    if found["second"] == "first.detach()":
        found["second"] = "torch.ones(4, 4)"
    if found["input"] == "torch.ones(4, 4, requires_grad=True) * 1":
        found["input"] = "torch.ones(4, 4, requires_grad=True)"
    if found["setting"].startswith("functorch_config"):
        found["setting"] = ""
    return found


_DEFINITION = """
@torch.library.custom_op("generated::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return BODY
scale.register_fake(lambda x: torch.empty_like(x))
op = scale._opoverload
"""

_PASSES = """
class Pass(CustomGraphPass):
    def __call__(self, graph):
        return None
    def uuid(self):
        return "mine"

class PassThatCalls(Pass):
    def __init__(self, function):
        self.function = function
    def __call__(self, graph):
        self.function(graph)

def fusion_pass(nodes):
    return nodes

class Mode(TorchDispatchMode):
    pass

class Choices(InductorChoices):
    def __init__(self, function):
        self.function = function
    def should_use_cooperative_reduction(self, *_, **__):
        return bool(self.function())

class Compiler:
    def __init__(self, function):
        self.function = function
    def __call__(self, graph, inputs, **how):
        return self.function(graph)
"""

_REST = """
given = {"decompositions": {**decomposition.select_decomp_table()}}
MARK
SETTING
REGISTRATION
first = INPUT
inputs = [first, SECOND]
nodes = torch.fx.Graph()
x, *others = (nodes.placeholder(f"x{each}") for each in range(len(inputs)))
x = nodes.call_function(op, (x,))
nodes.output((nodes.call_function(OPERATION), *others))
graph = torch.fx.GraphModule(torch.nn.Module(), nodes)
with SWITCH:
    asked = key_of("LEVEL", graph, inputs, given)
"""


def text(parts: Mapping[str, str], layout: random.Random) -> str:
    holder = parts["holder"].replace("VALUE", parts["value"])
    definition = _DEFINITION.replace("BODY", parts["body"])
    rest = _REST
    for name in ("mark", "setting", "registration", "input", "second", "operation", "switch"):
        rest = rest.replace(name.upper(), parts[name])
    return laid_out([holder, definition, _PASSES], rest.replace("LEVEL", parts["level"]), layout)


def prepare() -> Callable[[CodeType, dict[str, Any]], Answer]:
    """Return a function that runs a program and returns its key, or the reason for none."""
    import contextlib
    import os

    from torch._inductor.choices import InductorChoices
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch.utils._python_dispatch import TorchDispatchMode

    torch.set_num_threads(1)
    config.cpp.vec_isa_ok = True
    names = {
        "aten": torch.ops.aten,
        "torch": torch,
        "os": os,
        "contextlib": contextlib,
        "V": V,
        "config": config,
        "functorch_config": functorch_config,
        "lowering": lowering,
        "decomposition": decomposition,
        "decompositions_for_rng": decompositions_for_rng,
        "joint_graph": joint_graph,
        "post_grad": post_grad,
        "CustomGraphPass": CustomGraphPass,
        "InductorChoices": InductorChoices,
        "TorchDispatchMode": TorchDispatchMode,
        "key_of": _key_of,
        "add_pattern": _add_pattern,
        "set_kernel": _set_kernel,
        "compiler_with": _compiler_with,
        "effect_of": _effect_of,
        "disable": _disable,
        "threads": _threads,
        "default_dtype": _default_dtype,
        "precision": _precision,
        "deterministic": _deterministic,
    }

    def ask(program: CodeType, own: dict[str, Any]) -> Answer:
        own |= names
        with _restored():
            exec(program, own)
        key, unshared = own["asked"]
        return key, unshared, ""

    return ask


def _key_of(level: str, graph: Any, inputs: list[Any], given: dict[str, Any]) -> tuple[str, str]:
    info = KeyInfo()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = [
        mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x
        for x in inputs
    ]
    try:
        with tracing(TracingContext(mode)):
            key = _torch_key(info, level, graph, fake, given)
    except (BypassFxGraphCache, BypassAOTAutogradCache) as error:
        return "", f"torch caches no graph like this one: {error}"
    return str(entry_request(ArtifactKind.INDUCTOR, key, variant=0).key), info.why_unshared(key)


def _torch_key(
    info: KeyInfo, level: str, graph: Any, inputs: list[Any], given: dict[str, Any]
) -> str:
    if level == "fx":
        key, _ = info.wrap_key_maker(codecache.compiled_fx_graph_hash)(graph, inputs, {}, [])
    else:
        inner = _compiler_with(compile_fx.compile_fx_inner)
        functions = {"fw_compiler": inner, "bw_compiler": inner, "partition_fn": None, **given}
        settings = AOTConfig(
            **functions, num_params_buffers=0, aot_id=0, keep_inference_input_mutations=True
        )
        how = {} if torch.__version__ < "2.8" else None
        make_key = info.wrap_key_maker(autograd_cache.autograd_cache_key)
        key, _ = make_key(graph, inputs, settings, how)
    return str(key)


def _compiler_with(inner: Any) -> Any:
    return functools.partial(compile_fx.compile_fx, inner_compile=inner)


def _add_pattern(patterns: Any, handler: Any) -> None:
    from torch._inductor.pattern_matcher import Arg, CallFunction, register_graph_pattern

    pattern = CallFunction(torch.ops.aten.sin.default, Arg())
    register_graph_pattern(pattern, pass_dict=patterns)(handler)


def _set_kernel(operation: Any, kernel: Any) -> None:
    operation.py_kernels[torch._C.DispatchKey.CompositeImplicitAutograd] = kernel


def _effect_of(operation: Any) -> None:
    kinds: Any = getattr(effects, "_EffectType", None) or effects.EffectType
    registration = effects._register_effectful_op(operation, kinds.ORDERED)
    if registration is not None:  # since 2.9, torch registers the operation's name permanently
        _registrations.append(registration)


_registrations: list[Any] = []
"""Registrations of the present program."""


def _disable(operation: Any) -> None:
    operation._disabled_kernel.add("cpu")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(1)


@contextmanager
def _default_dtype(dtype: Any) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def _precision(value: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(value)
    yield
    torch.set_float32_matmul_precision("highest")
    if (setter := getattr(torch._C, "_set_fp32_precision_setter", None)) is not None:
        # Since 2.9, "highest" is not the default of these backends.
        for backend in ("cuda", "mkldnn"):
            setter(backend, "matmul", "none")


@contextmanager
def _deterministic(*args: Any, **kwargs: Any) -> Iterator[None]:
    torch.use_deterministic_algorithms(*args, **kwargs)
    yield
    torch.use_deterministic_algorithms(mode=False)


@contextmanager
def _restored() -> Iterator[None]:
    """Undo the changes of a program in torch."""
    tables: list[Any] = [
        *(lowering.lowerings, decomposition.decompositions, _side_effectful_functions),
        *(decompositions_for_rng.extra_random_decomps, *global_decomposition_table.values()),
        lowering._maybe_layout_constraints,
        *(torch.ops.aten.silu.default.py_kernels,),
        *(each.patterns for each in (joint_graph.patterns, post_grad.pass_patterns[1])),
    ]
    before = [copy.copy(each) for each in tables]
    entries = [
        {key: list(held) for key, held in each.patterns.items()}
        for each in (joint_graph.patterns, post_grad.pass_patterns[1])
    ]
    choices = V.choices
    with config.patch({}), functorch_config.patch({}):
        settings = config.save_config(), functorch_config.save_config()
        functions = {
            name: getattr(config, name)
            for name in (
                *("post_grad_custom_post_pass", "post_grad_custom_pre_pass"),
                *("pre_grad_custom_pass", "joint_custom_pre_pass", "_pre_fusion_custom_pass"),
            )
        }
        try:
            yield
        finally:
            config.load_config(settings[0])
            functorch_config.load_config(settings[1])
            for name, value in functions.items():
                setattr(config, name, value)
            V.set_choices_handler(choices)
            for each, old in zip(tables, before, strict=True):
                each.clear()
                each.update(old)
            for one, held in zip(
                (joint_graph.patterns, post_grad.pass_patterns[1]), entries, strict=True
            ):
                for key, old_entries in held.items():
                    one.patterns[key][:] = old_entries
            decomposition.fast_random_decomps.cache_clear()
            while _registrations:
                _registrations.pop().destroy()
            with torch.library._scoped_library("generated", "FRAGMENT") as library:
                del library
