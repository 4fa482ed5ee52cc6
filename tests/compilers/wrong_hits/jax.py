"""Pairs of programs for JAX, on CPUs."""

import os
from typing import Any

from compilers.wrong_hits.pairs import OFF_AND_ON, Pair, Relation, all_in_one_process, pair

__all__ = ["PAIRS", "VERSIONS", "forget", "install", "prepare"]

VERSIONS = {"0.10.2": "", "0.4.31": "jax-oldest"}
"""Environment by JAX's version; empty is the tests' own."""


def prepare() -> None:
    """Import JAX, without a client, for four devices."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    import jax  # noqa: F401 - imported once, for all programs

    import graphstash.hooks.jax.hook  # noqa: F401 - imported once, for all programs


def install(cache: Any) -> None:
    """Install the hook in JAX. Every program is looked up by its own key, not in a pack."""
    from graphstash.hooks.jax import compiling
    from graphstash.hooks.jax.hook import install

    compiling.is_small = lambda _: False
    assert install(cache) is not None


def forget() -> None:
    """Drop nothing: each program defines its own functions."""


_START = """
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ONES = np.ones((8, 8), np.float32)


def flags(value):
    os.environ["XLA_FLAGS"] += " " + value


def spread(*shape, order=(0, 1, 2, 3), names=("a", "b")):
    devices = np.array([jax.devices()[each] for each in order]).reshape(shape)
    return Mesh(devices, names[: len(shape)])


"""


def _of(name: str, before: str, call: str, *values: str, **how: Any) -> Pair:
    """Return a pair that compiles one program."""
    return pair(name, f"{_START}{before}\n{call}", *values, **how)


def _function(name: str, body: str, *values: str, before: str = "", **how: Any) -> Pair:
    """Return a pair whose functions of `x` differ."""
    return _of(name, before, f"jax.jit(lambda x: {body})(ONES)", *values, **how)


def _setting(name: str, statement: str, *values: str, **how: Any) -> Pair:
    return _of(name, statement, "jax.jit(lambda x: x @ x + 1)(ONES)", *values, **how)


_FUNCTIONS = (
    _function("operation", "jnp.HERE(x)", "sin", "cos"),
    _function("sign of a zero", "x * HERE", "0.0", "-0.0"),
    _function(
        "large array that a function reads",
        "x * A",
        before="A = np.full((8, 8), 1, np.float32)\nA[7, 7] = HERE",
    ),
    _function("precision of a product", "lax.dot(x, x, precision='HERE')", "default", "highest"),
    _of(
        "donated argument",
        "f = jax.jit(lambda x: x + 1, donate_argnums=HERE)",
        "f(ONES)",
        "()",
        "(0,)",
    ),
    _of(
        "options of one program",
        "",
        "jax.jit(lambda x: x / 3).lower(ONES).compile("
        "compiler_options={'xla_cpu_enable_fast_math': HERE})",
        *OFF_AND_ON,
    ),
    _of(
        "attribute of a custom call",
        "",
        "jax.jit(lambda x: f(x)).lower(ONES).compile()".replace("f(x)", "lax.linalg.HERE(x)"),
        "cholesky",
        "lu",
    ),
)

_SETTINGS = (
    _setting(
        "precision of products",
        "jax.config.update('jax_default_matmul_precision', 'HERE')",
        "bfloat16",
        "float32",
    ),
    _setting("flags of XLA", "flags('HERE')", "", "--xla_cpu_enable_fast_math=true"),
    _setting(
        "flags of XLA before and after the client",
        "HERE",
        "flags('--xla_cpu_enable_fast_math=true'); jax.devices()",
        "jax.devices(); flags('--xla_cpu_enable_fast_math=true')",
    ),
    _setting(
        "flags of XLA while the client is created",
        "HERE",
        "jax.devices()",
        "flags('--xla_cpu_enable_fast_math=true'); jax.devices(); "
        "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'",
    ),
    _setting(
        "contents of a file that a flag names",
        "open('mine.ptx', 'w').write('HERE'); flags('--xla_gpu_ptx_file=mine.ptx')",
        "one",
        "another",
    ),
    _setting(
        "contents of a directory that a flag names",
        "os.mkdir('mine'); open('mine/profile', 'w').write('HERE'); "
        "flags('--xla_gpu_pgle_profile_file_or_directory_path=mine')",
        "one",
        "another",
    ),
    _of(
        "contents of a file that an option of one program names",
        "open('mine.ptx', 'w').write('HERE')",
        "jax.jit(lambda x: x / 3).lower(ONES).compile("
        "compiler_options={'xla_gpu_ptx_file': 'mine.ptx'})",
        "one",
        "another",
    ),
    _of(
        "files beside a program for more than 46 devices",
        "flags('--xla_force_host_platform_device_count=48'); open('HERE', 'w').close()",
        "sharding = NamedSharding(Mesh(jax.devices(), 'a'), PartitionSpec())\n"
        "jax.jit(lambda x: x / 3)(jax.device_put(ONES, sharding))",
        "one",
        "another",
        relation=Relation.EQUAL,
    ),
    _setting(
        "optimization",
        "jax.config.update('jax_disable_most_optimizations', HERE)",
        "False",
        "True",
    ),
)

_CALL = """
from jaxlib import xla_client

sharding = NamedSharding(spread(4), PartitionSpec("a"))


def register(by):
    partition = lambda shapes, shardings, shape, sharding, _: (by, shardings, sharding)
    infer = lambda shapes, shardings, *_: shardings[0]
    xla_client.register_custom_call_partitioner("mine", lambda *_: sharding, partition, infer, True)


def call(x):
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    try:
        return jax.ffi.ffi_call("mine", result)(x)
    except AttributeError:
        from jax.extend import ffi

        return ffi.ffi_call("mine", result, x)


def look_up():
    jax.jit(call, in_shardings=sharding, out_shardings=sharding).lower(ONES).compile()
"""

_PLUGIN = """
import xla_plugins.xla_cpu_pjrt as plugin
from jax._src import xla_bridge

library = plugin.__file__.replace("__init__.py", "xla_cpu_pjrt.so")
xla_bridge.register_plugin("other", library_path=library, options=HERE)
jax.config.update("jax_platforms", "other")
"""

_OPTIONS = (
    _setting("option of a plug-in's client", _PLUGIN, "{'mine': 1}", "{'mine': 2}", only_in=""),
    _setting(
        "rank in the options of a plug-in's client",
        _PLUGIN,
        "{'mine': 1, 'node_id': 0}",
        "lambda: {'mine': 1, 'node_id': 1}",
        only_in="",
        relation=Relation.EQUAL,
    ),
)

_DEVICES = (
    _of(
        "custom call that XLA partitions by rows",
        _CALL,
        "HERE\nlook_up()",
        "",
        "jax.ffi.register_ffi_target_as_batch_partitionable('mine')",
        only_in="",
    ),
    _of(
        "order of a mesh",
        "sharding = NamedSharding(spread(4, order=HERE), PartitionSpec('a'))",
        "jax.jit(lambda x: x @ x, in_shardings=sharding, out_shardings=sharding)(ONES)",
        "(0, 1, 2, 3)",
        "(0, 2, 1, 3)",
    ),
    _of(
        "device",
        "",
        "jax.jit(lambda x: x + 1)(jax.device_put(ONES, jax.devices()[HERE]))",
        "0",
        "1",
    ),
)

_PARTITIONED = """
from jax.experimental.custom_partitioning import custom_partitioning


@custom_partitioning
def f(x):
    return x * 2


def partition(mesh, arguments, result):
    return mesh, (lambda x: x * HERE), result.sharding, (arguments[0].sharding,)


def infer(mesh, arguments, result):
    return arguments[0].sharding


try:
    f.def_partition(
        infer_sharding_from_operands=infer,
        partition=partition,
        sharding_rule="i j -> i j",
    )
except TypeError:
    f.def_partition(infer_sharding_from_operands=infer, partition=partition)
jax.config.update("jax_use_shardy_partitioner", hasattr(jax, "shard_map"))
sharding = NamedSharding(spread(4), PartitionSpec("a"))
"""


def _unshared(name: str, reason: str, before: str, call: str, *values: str) -> Pair:
    return _of(name, before, call, *values, reason=reason)


_UNSHARED = (
    _unshared(
        "partitioning in Python",
        "is not shared: Python code partitions it",
        _PARTITIONED,
        "jax.jit(f, in_shardings=sharding, out_shardings=sharding)(ONES)",
        "2",
        "3",
    ),
    _unshared(
        "partitioning in Python of a custom call by name",
        "Python code partitions it",
        _CALL,
        "register(HERE)\nlook_up()",
        "2",
        "3",
    ),
    _unshared(
        "function that XLA calls back",
        "it calls back into Python",
        "",
        "jax.jit(lambda x: jax.pure_callback(lambda x: x * HERE, x, x))(ONES)",
    ),
    _unshared(
        "ordered function that XLA calls back",
        "it calls back into Python",
        "from jax.experimental import io_callback",
        "jax.jit(lambda x: io_callback(lambda x: x * HERE, x, x, ordered=True))(ONES)",
    ),
    _unshared(
        "printing",
        "it calls back into Python",
        "",
        "jax.jit(lambda x: (jax.debug.print('HERE'), x + 1)[1])(ONES)",
    ),
)

_EQUAL = Relation.EQUAL

_REVERSE = (
    _setting("nothing but the host", "", relation=_EQUAL),
    _setting("comment", "# HERE", "one", "another", relation=_EQUAL),
    _setting(
        "variable of the environment", "os.environ['MINE'] = 'HERE'", "1", "2", relation=_EQUAL
    ),
    _setting(
        "folder of a dump", "flags('--xla_dump_hlo_pass_re=HERE')", "one", "two", relation=_EQUAL
    ),
    _of(
        "contents of a dump that an option of one program names",
        "os.mkdir('mine'); open('mine/module', 'w').write('HERE')",
        "jax.jit(lambda x: x / 3).lower(ONES).compile(compiler_options={'xla_dump_to': 'mine'})",
        "one",
        "another",
        relation=_EQUAL,
    ),
    _setting(
        "contents of a dump",
        "os.mkdir('mine'); open('mine/module', 'w').write('HERE'); flags('--xla_dump_to=mine')",
        "one",
        "another",
        relation=_EQUAL,
    ),
    _setting(
        "directory of XLA's own caches",
        "jax.config.update('jax_compilation_cache_dir', 'HERE')\n"
        "if hasattr(jax.config, 'jax_persistent_cache_enable_xla_caches'):  # since 0.4.36\n"
        "    jax.config.update('jax_persistent_cache_enable_xla_caches', 'all')",
        "one",
        "two",
        relation=_EQUAL,
    ),
    _setting(
        "names of tracebacks",
        "jax.config.update('jax_traceback_filtering', 'HERE')",
        "off",
        "auto",
        relation=_EQUAL,
    ),
)

_BY_THREADS = """
import os

import jax
import jax.numpy as jnp

HERE
jax.jit(lambda x: jnp.sin(x).sum())(jnp.ones((4096, 512)))
"""
_ONE, _TWO = "os.environ['PJRT_NPROC'] = '1'", "os.environ['PJRT_NPROC'] = '2'"
_NPROC = "os.environ['NPROC'] = '1'"

_THREADS = (
    pair("number of threads for PJRT", _BY_THREADS, _ONE, _TWO),
    pair(
        "number of threads for PJRT before the other",
        _BY_THREADS,
        f"{_NPROC}; {_ONE}",
        f"{_NPROC}; {_TWO}",
    ),
    pair(
        "number of threads before and after the client",
        _BY_THREADS,
        "os.environ['NPROC'] = '1000'; jax.devices()",
        "jax.devices(); os.environ['NPROC'] = '1000'",
    ),
    pair(
        "number of threads",
        """
        import os

        os.environ["NPROC"] = "HERE"
        import jax
        import jax.numpy as jnp

        jax.jit(lambda x: jnp.sin(x).sum())(jnp.ones((4096, 512)))
        """,
        "1",
        "2",
    ),
)

PAIRS = (
    *all_in_one_process(_FUNCTIONS),
    *_THREADS,
    *_SETTINGS,
    *_OPTIONS,
    *all_in_one_process(_DEVICES, "custom call that XLA partitions by rows"),
    *all_in_one_process(
        _UNSHARED,
        "partitioning in Python",
        "partitioning in Python of a custom call by name",
    ),
    *all_in_one_process(
        _REVERSE,
        "directory of XLA's own caches",
        "folder of a dump",
        "contents of a dump",
        "contents of a dump that an option of one program names",
        "check for numbers that are none",
        "names of tracebacks",
    ),
)
