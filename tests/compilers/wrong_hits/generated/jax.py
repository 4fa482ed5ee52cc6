"""Programs for JAX: an operation, its tracing, the places of its arrays, and settings.

The meaning of a program follows from its construction. Unless `meaning` excludes a choice, the
choice changes the module that JAX compiles, or an option. How a function gets a number does not
matter, because JAX reads the number while it traces.
"""

import random
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import jax
from jax import lax

from compilers.wrong_hits import jax as pairs
from compilers.wrong_hits.generated.programs import laid_out, named
from compilers.wrong_hits.generated.recorder import Answer, asked_in_child
from compilers.wrong_hits.generated.values import HOLDERS

__all__ = ["AXES", "meaning", "prepare", "text"]

_CONVOLVED = "lax.conv_general_dilated(x[None, None], x[None, None, :3, :3], %s)"
_SUMMED = "lax.reduce_window(x, 0.0, lax.add, (2, 2), (%s), '%s')"
_AT = "x.at[jnp.array([1, 2])]"

OPERATIONS = named(
    *(f"jnp.{each}(x)" for each in ("sin", "cos", "tanh", "abs", "sign", "floor", "square")),
    *(f"lax.{each}(x)" for each in ("rsqrt", "cbrt", "logistic", "erf", "erf_inv", "digamma")),
    *(f"lax.round(x, lax.RoundingMethod.{each})" for each in ("AWAY_FROM_ZERO", "TO_NEAREST_EVEN")),
    "lax.dot_general(x, x, (((1,), (0,)), ((), ())))",
    "lax.dot_general(x, x, (((0,), (0,)), ((), ())))",
    "lax.dot_general(x, x, (((1,), (1,)), ((0,), (0,))))",
    *(f"lax.dot(x, x, precision='{each}')" for each in ("high", "highest")),
    "lax.dot(x, x, precision=('default', 'highest'))",
    "lax.dot(x, x, preferred_element_type=jnp.float32)",
    *(
        _CONVOLVED % each
        for each in (
            *("(1, 1), 'SAME'", "(2, 1), 'SAME'", "(1, 2), 'SAME'", "(1, 1), 'VALID'"),
            *("(1, 1), [(1, 1), (1, 1)], (2, 2)", "(1, 1), 'SAME', None, (2, 2)"),
            *("(1, 1), 'SAME', precision='highest'", "(1, 1), [(1, 0), (0, 1)]"),
            "(1, 1), 'SAME', dimension_numbers=('NCHW', 'IOHW', 'NCHW')",
        )
    ),
    *(_SUMMED % each for each in (("1, 1", "SAME"), ("1, 1", "VALID"), ("2, 1", "SAME"))),
    *(f"lax.reduce_precision(x, {each})" for each in ("5, 10", "5, 7", "4, 10")),
    *(f"lax.cumsum(x, axis={each})" for each in ("0", "1", "0, reverse=True")),
    *(f"lax.sort(x, dimension={each})" for each in ("0", "1", "1, is_stable=False")),
    *(f"lax.top_k(x, {each})[0]" for each in (2, 3)),
    *(f"jnp.argmax(x, axis={each})" for each in (0, 1)),
    *(f"lax.argmin(x, 0, jnp.{each})" for each in ("int32", "int8", "uint32")),
    *(f"lax.pad(x, x[0, 0], [({each}), (0, 0, 0)])" for each in ("1, 0, 0", "0, 1, 0", "0, 0, 1")),
    *(f"jnp.take(x, jnp.array([1, 2]), {each})" for each in ("1", "0, mode='clip'")),
    *(f"jnp.take(x, jnp.array([1, 2]), 0, mode='{each}')" for each in ("fill", "wrap")),
    *(f"{_AT}.{each}" for each in ("set(1.0)", "add(1.0)", "add(1.0, unique_indices=True)")),
    f"{_AT}.add(1.0, indices_are_sorted=True)",
    *(f"lax.dynamic_slice(x, (jnp.argmax(x[0]), 0), ({each}))" for each in ("2, 8", "3, 8")),
    *(f"lax.slice(x, (0, 0), {each})" for each in ("(4, 8)", "(8, 4)", "(8, 8), (2, 1)")),
    *(f"lax.broadcasted_iota(x.dtype, x.shape, {each}) * x" for each in (0, 1)),
    *(f"jnp.roll(x, {each}, 0)" for each in (1, 2)),
    *(f"lax.rev(x, ({each},))" for each in (0, 1)),
    *(f"jnp.clip(x, {each}, 2.0)" for each in ("0.0", "-0.0", "1.0")),
    *(f"jnp.where(x > 0, x, {each})" for each in ("0.0", "-0.0", "jnp.nan", "jnp.inf")),
    *(f"jnp.sum(x, axis={each}, keepdims=True) * x" for each in (0, 1)),
    *(f"jnp.var(x, axis=0, ddof={each})" for each in (0, 1)),
    *(f"x.astype(jnp.{each}).astype(x.dtype)" for each in ("int8", "uint8", "bool_")),
    *(f"jnp.float32(jnp.float32(x).astype(jnp.float8_{each}))" for each in ("e4m3fn", "e5m2")),
    *(f"lax.bitcast_convert_type(jnp.float32(x), jnp.{each})" for each in ("int32", "uint32")),
    *(f"jnp.fft.{each}(jnp.float32(x))" for each in ("fft", "ifft", "rfft", "hfft", "fft2")),
    *(f"jnp.fft.fft(jnp.float32(x), {each})" for each in ("4", "16", "axis=0")),
    *(f"jax.nn.gelu(x, approximate={each})" for each in (True, False)),
    *(f"jax.nn.{each}" for each in ("celu(x, 1.5)", "celu(x, 2.5)", "leaky_relu(x, 0.1)")),
    *(f"jax.nn.softmax(x, axis={each})" for each in (0, 1)),
    *(f"jax.nn.one_hot(jnp.int32(x[0]), {each})" for each in (4, 5)),
    *(f"jnp.einsum('{each}', x, x)" for each in ("ij,kj->ik", "ij,ij->j")),
    *(f"jax.random.uniform(jax.random.key({each}), (3,))" for each in (0, 1)),
    *(f"jax.random.bernoulli(jax.random.key(0), {each}, (3,))" for each in (0.5, 0.25)),
    "jax.random.uniform(jax.random.key(0, impl='rbg'), (3,))",
    *(
        f"lax.linalg.triangular_solve(jnp.float32(x), jnp.float32(x), {each}=True)"
        for each in ("left_side", "lower", "transpose_a", "unit_diagonal")
    ),
    *(f"lax.associative_scan(jnp.{each}, x)" for each in ("add", "maximum")),
    *(f"lax.reduce_and(x > 0, ({each},))" for each in (0, 1)),
    *(
        f"lax.exp(x, accuracy=lax.AccuracyMode.{each})"
        for each in ("HIGHEST", "DEFAULT")
        if hasattr(lax, "AccuracyMode")
    ),
)

_GRADIENT = "jax.value_and_grad(lambda y: %s.sum())(x)"

TRANSFORMS = named(
    "f(x)",
    "jax.jit(f)(x)",
    "jax.jit(f, inline=True)(x)",
    _GRADIENT % "f(y)",
    # Without the sine, many operations save nothing, and both would compile to one program.
    _GRADIENT % "jax.checkpoint(lambda z: jnp.sin(f(z)))(y)",
    _GRADIENT
    % "jax.checkpoint(lambda z: jnp.sin(f(z)), policy=EVERYTHING)(y)".replace(
        "EVERYTHING", "jax.checkpoint_policies.everything_saveable"
    ),
    *(_GRADIENT % f"with_vjp(f, {each})(y)" for each in ("2.0", "3.0", "-0.0")),
    *(f"jax.jvp(with_jvp(f, {each}), (x,), (x,))" for each in ("2.0", "3.0")),
    *(f"with_vjp(f, {each})(x)" for each in ("2.0", "3.0")),
    "jax.jvp(f, (x,), (x,))",
    "jax.vmap(f)(x[None])",
    "jax.vmap(f, 2, 2)(x[..., None])",
    "jax.vmap(f, 0, 2)(x[None])",
    *(f"lax.fori_loop(0, {each}, lambda n, y: f(y + n.astype(y.dtype)), x)" for each in (2, 3)),
    *(f"lax.while_loop(lambda y: y.sum() < {each}, f, x)" for each in (2, 3)),
    *(f"lax.scan(lambda y, _: (f(y), None), x, None, {each})[0]" for each in (2, 3)),
    "lax.scan(lambda y, _: (f(y), None), x, None, 2, unroll=2)[0]",
    *(f"lax.scan(lambda y, n: (f(y + n), n), x, x[0]{each})" for each in ("", ", reverse=True")),
    "lax.cond(x.sum() > 3, f, lambda y: y, x)",
    "lax.cond(x.sum() > 3, lambda y: y, f, x)",
    "lax.cond(x.sum() > 4, f, lambda y: y, x)",
    "lax.switch(jnp.argmax(x[0]), (f, jnp.sin, jnp.cos), x)",
    "lax.switch(jnp.argmax(x[0]), (f, jnp.cos, jnp.sin), x)",
    "lax.map(f, x[None])",
    "lax.optimization_barrier(f(x))",
    "lax.stop_gradient(f(x))",
    "jax.named_scope('one')(f)(x)",
    "jax.named_scope('other')(f)(x)",
)

_SAME_TRANSFORMS = {
    "jax.jit(f, inline=True)(x)": "f(x)",
    "lax.stop_gradient(f(x))": "f(x)",
    "jax.named_scope('one')(f)(x)": "f(x)",
    "jax.named_scope('other')(f)(x)": "f(x)",
    "with_vjp(f, 2.0)(x)": "f(x)",
    "with_vjp(f, 3.0)(x)": "f(x)",
}

INPUTS = named(
    "np.ones((8, 8), np.float32)",
    "np.full((8, 8), 2, np.float32)",
    "np.ones((8, 8), np.float32, order='F')",
    "np.ones((8, 8), jnp.bfloat16)",
    "np.ones((8, 8), np.float16)",
    "np.ones((16, 16), np.float32)",
    "np.ones((8, 16), np.float32)[:, ::2]",
)

_PLAIN_INPUT = "np.ones((8, 8), np.float32)"

_SAME_INPUTS = (
    "np.full((8, 8), 2, np.float32)",
    "np.ones((8, 8), np.float32, order='F')",
    "np.ones((8, 16), np.float32)[:, ::2]",
)

_SPREAD = "out_shardings=NamedSharding(spread(%s), PartitionSpec(%s))"

PLACES = named(
    "",
    "donate_argnums=0",
    "device=jax.devices()[0]",
    "device=jax.devices()[1]",
    "in_shardings=NamedSharding(spread(4), PartitionSpec('a'))",
    _SPREAD % ("4", "'a'"),
    _SPREAD % ("4", "None, 'a'"),
    _SPREAD % ("4, order=(0, 2, 1, 3)", "'a'"),
    _SPREAD % ("2, 2", "'a', 'b'"),
    _SPREAD % ("2, 2", "'b', 'a'"),
    _SPREAD % ("2, 2", "('a', 'b')"),
    _SPREAD % ("4, 1", "'a', 'b'"),
    _SPREAD % ("4", ""),
)
"""Options of `jax.jit`."""

OPTIONS = named(
    "",
    *(
        f"{{'xla_{each}}}"
        for each in (
            *("cpu_enable_fast_math': True", "cpu_enable_fast_min_max': True"),
            *("backend_optimization_level': 0", "backend_optimization_level': 1"),
            *("cpu_prefer_vector_width': 128", "llvm_disable_expensive_passes': True"),
            *(
                "allow_excess_precision': False",
                "cpu_enable_concurrency_optimized_scheduler': True",
            ),
        )
    ),
)
"""Options of one compilation."""

_INTEGERS = "jnp.sum(jnp.arange(3))"
_PRODUCT = "jnp.sum(x @ x)"
_RANDOM = "jnp.sum(jax.random.uniform(jax.random.split(jax.random.key(0))[0], (3,)))"


def _setting(name: str, value: str, extra: str = "x.sum()") -> str:
    return f"jax.config.update('jax_{name}', {value})\nextra = lambda x: {extra}"


SETTINGS = {
    "": "extra = lambda x: x.sum()",
    "integers": f"extra = lambda x: {_INTEGERS}",
    "product": f"extra = lambda x: {_PRODUCT}",
    "random": f"extra = lambda x: {_RANDOM}",
    "wide integers": _setting("enable_x64", "True", _INTEGERS),
    **{
        f"product in {each}": _setting("default_matmul_precision", f"'{each}'", _PRODUCT)
        for each in ("bfloat16", "highest", "tensorfloat32")
    },
    "other random": _setting("default_prng_impl", "'rbg'", _RANDOM),
    "unsafe random": _setting("default_prng_impl", "'unsafe_rbg'", _RANDOM),
    "random in order": _setting(
        "threefry_partitionable", repr(not jax.config.jax_threefry_partitionable), _RANDOM
    ),
    **{
        f"{name} {value}": _setting(name, value)
        for name, value in (
            *(("disable_most_optimizations", "True"), ("compiler_enable_remat_pass", "False")),
            *(("exec_time_optimization_effort", "0.5"), ("memory_fitting_effort", "0.5")),
            *(("optimization_level", "'O1'"), ("optimization_level", "'O2'")),
            *(("memory_fitting_level", "'O1'"), ("memory_fitting_level", "'O3'")),
        )
        if f"jax_{name}" in jax.config.values
    },
    **{
        f"{name} = {value}": _setting(name, value)
        for name, value in (
            *(("log_compiles", "True"), ("explain_cache_misses", "True"), ("debug_nans", "True")),
            *(("traceback_filtering", "'off'"), ("numpy_rank_promotion", "'warn'")),
            *(("include_full_tracebacks_in_locations", "False"), ("debug_infs", "True")),
            *(("traceback_in_locations_limit", "2"), ("check_tracer_leaks", "True")),
            *(("hlo_source_file_canonicalization_regex", "'/.*'"), ("enable_checks", "True")),
        )
        if f"jax_{name}" in jax.config.values
    },
}

_FAST = "--xla_cpu_enable_fast_math=true"
_SHORT = "--xla_cpu_enable_fast_min_max=true"

ENVIRONMENTS = {
    "": "",
    "client": "jax.devices()",
    "fast": f"flags('{_FAST}')",
    "fast, then client": f"flags('{_FAST}'); jax.devices()",
    "client, then fast": f"jax.devices(); flags('{_FAST}')",
    "fast at the start": f"plain = os.environ.get('XLA_FLAGS', ''); flags('{_FAST}'); "
    "jax.devices(); os.environ['XLA_FLAGS'] = plain",
    "not fast": f"flags('{_FAST.replace('true', 'false')}')",
    "fast twice": f"flags('{_FAST} {_FAST.replace('true', 'false')}')",
    "fast and short": f"flags('{_FAST} {_SHORT}')",
    "short and fast": f"flags('{_SHORT} {_FAST}')",
    "file": f"flags('{_FAST}'); open('flags', 'w').write(os.environ['XLA_FLAGS']); "
    "os.environ['XLA_FLAGS'] = 'flags'",
    "dump": "flags('--xla_dump_hlo_pass_re=one')",
    "of no compiler": "os.environ['MINE'] = '1'",
    "threads": "os.environ['OMP_NUM_THREADS'] = '3'",
    "late": "os.environ['JAX_ENABLE_X64'] = '1'",
    "of torch_xla": "os.environ['XLA_RNG_BIT_GENERATOR'] = 'philox'",
}

_SAME_ENVIRONMENTS = {
    "client": "",
    "fast, then client": "fast",
    "short and fast": "fast and short",
    **dict.fromkeys(("dump", "of no compiler", "of torch_xla", "threads", "late"), ""),
}

EFFECTS = named(
    "y",
    "jax.pure_callback(lambda y: y, y, y)",
    *(
        f"jax.ffi.ffi_call({each}"
        for each in (
            *("'one', of(y))(y)", "'other', of(y))(y)", "'one', of(y))(y, by=np.int32(1))"),
            *("'one', of(y))(y, by=np.int32(2))", "'one', of(y))(y, by=np.float32(1))"),
            *("'one', of(y))(y, by='1')", "'one', of(y), has_side_effect=True)(y)"),
            "'one', of(y), input_layouts=[(1, 0)])(y)",
        )
        if hasattr(jax, "ffi")
    ),
)

_UNFIT_HOLDERS = ("nonlocal", "enumeration", "global in a comprehension")
"""Holders that return their value once, or in a list."""

AXES: dict[str, dict[str, str]] = {
    "operation": OPERATIONS,
    "transform": TRANSFORMS,
    "input": INPUTS,
    "place": PLACES,
    "option": OPTIONS,
    "setting": SETTINGS,
    "environment": ENVIRONMENTS,
    "effect": EFFECTS,
    "holder": {name: text for name, text in HOLDERS.items() if name not in _UNFIT_HOLDERS},
    "number": named("0.0", "-0.0", "1.0", "2.0", "0.1", "-2.0", "float('inf')", "float('nan')"),
    "call": named("traced(x)", "traced.lower(x).compile(OPTION)"),
}


def meaning(chosen: dict[str, str]) -> object:
    """Return the choices that affect the key."""
    found = dict(chosen)
    if found["call"] == "traced(x)":
        found["option"] = ""
    del found["holder"], found["call"]
    found["transform"] = _SAME_TRANSFORMS.get(found["transform"], found["transform"])
    found["environment"] = _SAME_ENVIRONMENTS.get(found["environment"], found["environment"])
    if found["input"] in _SAME_INPUTS:
        found["input"] = _PLAIN_INPUT
    if (found["setting"], found["place"]) == ("debug_nans = True", "donate_argnums=0"):
        found["place"] = ""  # JAX then donates nothing
    if " = " in found["setting"]:
        found["setting"] = ""
    if "preferred_element_type" in found["operation"] and "float32" in found["input"]:
        found["operation"] = "lax.dot_general(x, x, (((1,), (0,)), ((), ())))"
    return found


_HELPERS = """
def flags(value):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " " + value


def spread(*shape, order=(0, 1, 2, 3)):
    devices = np.array([jax.devices()[each] for each in order]).reshape(shape)
    return Mesh(devices, ("a", "b")[: len(shape)])


def of(y):
    return jax.ShapeDtypeStruct(y.shape, y.dtype)


def with_vjp(f, by):
    function = jax.custom_vjp(f)
    function.defvjp(lambda x: (f(x), x), lambda x, g: (x * g * by,))
    return function


def with_jvp(f, by):
    function = jax.custom_jvp(f)
    function.defjvps(lambda t, _, x: t * by)
    return function
"""

_FUNCTION = """
def f(x):
    return x * read() + jnp.sum(jnp.real(OPERATION)).astype(x.dtype)
"""

_REST = """
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ENVIRONMENT
SETTING


def traced(x):
    y = x + sum(each.sum() for each in jax.tree.leaves(TRANSFORM)).astype(x.dtype)
    y = y + extra(x).astype(x.dtype)
    return EFFECT


x = INPUT
traced = jax.jit(traced, PLACE)
CALL
"""


def text(parts: Mapping[str, str], layout: random.Random) -> str:
    rest = _REST
    for name in (
        "environment",
        "setting",
        "transform",
        "effect",
        "input",
        "place",
        "call",
        "option",
    ):
        rest = rest.replace(name.upper(), parts[name])
    function = _FUNCTION.replace("OPERATION", parts["operation"])
    holder = parts["holder"].replace("VALUE", parts["number"])
    return laid_out([holder, function, _HELPERS], rest, layout)


def prepare() -> Callable[[CodeType, dict[str, Any]], Answer]:
    """Return a function that runs a program and returns its key, or the reason for none."""
    return asked_in_child(pairs)
