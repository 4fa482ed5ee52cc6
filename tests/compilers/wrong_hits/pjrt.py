"""Pairs of programs for PJRT plug-ins, which JAX compiles for the CPU plug-in."""

import os
from pathlib import Path
from typing import Any

from compilers.wrong_hits.pairs import Pair, Relation, pair

__all__ = ["PAIRS", "SETTINGS", "VERSIONS", "install", "prepare"]

VERSIONS = {"xla-cpu-pjrt": ""}
"""Environment by version; empty is the tests' own."""

SETTINGS = {"hooks": ("pjrt",)}
"""Client settings. JAX's own hook must be off, because the pjrt hook leaves JAX to it."""


def prepare() -> None:
    """Import JAX for the plug-in, without a client."""
    import xla_plugins.xla_cpu_pjrt as plugin

    library = Path(plugin.__file__).with_name("xla_cpu_pjrt.so")
    os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"] = f"other:{library}"
    os.environ["JAX_PLATFORMS"] = "other"
    # Otherwise the key contains the source location of each operation, so any change of the text
    # would change the key.
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

    import jax  # noqa: F401 - imported once, for all programs

    import graphstash.hooks.pjrt.hook  # noqa: F401 - imported once, for all programs


def install(cache: Any) -> None:
    from graphstash.hooks.pjrt.hook import install

    assert install(cache) is not None


_PROGRAM = """
import os

import jax
import jax.numpy as jnp
import numpy as np


def flags(*values):
    os.environ["XLA_FLAGS"] = " ".join(values)


HERE
print(jax.jit(%s)(%s))
"""

_PARTITIONED = """
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec


@custom_partitioning
def f(x):
    return x * 2


f.def_partition(
    partition=lambda mesh, arguments, result: (
        mesh, lambda x: x * 2, result.sharding, (arguments[0].sharding,)
    ),
    infer_sharding_from_operands=lambda mesh, arguments, result: arguments[0].sharding,
    sharding_rule="i j -> i j",
)
flags("--xla_force_host_platform_device_count=2")
sharding = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("a",)), PartitionSpec("a"))
"""

_CUSTOM_CALL = "lambda x: jax.ffi.ffi_call('mine', jax.ShapeDtypeStruct(x.shape, x.dtype))(x)"

_ONE_CPU = "cpus = os.sched_getaffinity(0); os.sched_setaffinity(0, {min(cpus)})"
_ALL_CPUS = "os.sched_setaffinity(0, cpus)"
_FAST = "flags('--xla_cpu_enable_fast_math=true')"


def _options(**changed: str) -> str:
    """Return a statement that gives the client an option of each type."""
    given = {"list": "[1]", "number": "1", "fraction": "1.5", "text": "'text'", "yes": "True"}
    text = ", ".join(f"'{name}': {value}" for name, value in (given | changed).items())
    return f"jax.config.update('jax_pjrt_client_create_options', {{{text}}})"


def _setting(name: str, *values: str, **relation: Any) -> Pair:
    """Return a pair that differs in a setting before a program."""
    return pair(
        name, _PROGRAM % ("lambda x: x @ x / 3", "np.ones((4, 4), 'float32')"), *values, **relation
    )


def _program(
    name: str,
    function: str,
    *values: str,
    argument: str = "np.ones((4, 4), 'float32')",
    before: str = "",
    **relation: Any,
) -> Pair:
    text = _PROGRAM.replace("HERE", "%s") % (before, function, argument)
    return pair(name, text, *values, **relation)


PAIRS = (
    _program("operation", "lambda x: x HERE 3", "/", "*"),
    _program("precision", "lambda x: jnp.matmul(x, x, precision='HERE')", "default", "highest"),
    _program("donation", "lambda x: x / 3, donate_argnums=HERE", "()", "(0,)"),
    _program(
        "effort",
        "lambda x: x / 3, compiler_options=HERE",
        "None",
        "{'xla_cpu_enable_fast_math': True}",
    ),
    _program(
        "contents of a file that an option of one program names",
        "lambda x: x / 3, compiler_options={'xla_gpu_ptx_file': 'mine.ptx'}",
        "one",
        "another",
        before="open('mine.ptx', 'w').write('HERE')",
    ),
    _program(
        "callback",
        "lambda x: jax.pure_callback(lambda y: y * 2, x, x)",
        reason="calls a Python function",
    ),
    _program(
        "partitioning in Python",
        "f, in_shardings=sharding, out_shardings=sharding",
        before=_PARTITIONED,
        reason="calls a Python function",
    ),
    _program(
        "custom call that XLA partitions by rows",
        _CUSTOM_CALL,
        "",
        "jax.ffi.register_ffi_target_as_batch_partitionable('mine')",
        before="HERE",
    ),
    _program(
        "partitioning in Python of a custom call by name",
        _CUSTOM_CALL,
        before="from jaxlib import xla_client\n"
        "xla_client.register_custom_call_partitioner('mine', *3 * [lambda *_: HERE])",
        reason="calls a Python function",
    ),
    _setting("option of the client", _options(list="[1, 2]"), _options(list="[1, 3]")),
    _setting(
        "rank in the options of the client",
        _options(node_id="0"),
        _options(node_id="1"),
        relation=Relation.EQUAL,
    ),
    _setting("flags before the client", "jax.devices()", f"{_FAST}; jax.devices()"),
    _setting(
        "flags before and after the client",
        f"{_FAST}; jax.devices()",
        f"jax.devices(); {_FAST}",
    ),
    _setting("flags after the client", "jax.devices()", f"jax.devices(); {_FAST}"),
    _setting(
        "generator of random numbers",
        "",
        "jax.devices(); os.environ['XLA_RNG_BIT_GENERATOR'] = 'philox'",
    ),
    _setting("CPUs around the client", "jax.devices()", f"{_ONE_CPU}; jax.devices(); {_ALL_CPUS}"),
    _setting(
        "CPUs after the client",
        "jax.devices()",
        f"jax.devices(); {_ONE_CPU}",
        relation=Relation.EQUAL,
    ),
    _setting("number of threads", "", "os.environ['NPROC'] = '1000'"),
    _setting("nothing but the host", "", relation=Relation.EQUAL),
    _setting("threads", "", "os.environ['OMP_NUM_THREADS'] = '3'", relation=Relation.EQUAL),
    _setting(
        "order of flags",
        "flags('--xla_cpu_enable_fast_math=true', '--xla_cpu_enable_fast_min_max=true')",
        "flags('--xla_cpu_enable_fast_min_max=true', '--xla_cpu_enable_fast_math=true')",
        relation=Relation.EQUAL,
    ),
    _program(
        "values of data",
        "lambda x: x / 3",
        argument="np.asarray([HERE.0])",
        relation=Relation.EQUAL,
    ),
)
