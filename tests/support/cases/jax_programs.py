"""JAX programs for the tests of the hook.

`training` is a two-layer perceptron with plain SGD, small enough for tests.
"""
# mypy: disallow-untyped-calls=False
# JAX is partly typed.

import logging
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

import httpx
import jax
import numpy as np
from jax import numpy as jnp
from jax._src import compilation_cache, compiler
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_enable_xla_caches",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def note_compiles(*, fails: str = "") -> list[str]:
    """Return a list to which JAX's compiler adds the name of each program from now on.

    Args:
        fails: part of the names of programs that fail to compile. Default: none.
    """
    compiled: list[str] = []
    names = ("backend_compile_and_load", "backend_compile")  # 0.4.31 has the second name
    name = next(name for name in names if hasattr(compiler, name))
    original = getattr(compiler, name)

    def noting(backend: Any, module: Any, *arguments: Any, **named: Any) -> Any:
        compiled.append(str(module.operation.attributes["sym_name"]))
        if fails and fails in compiled[-1]:
            raise RuntimeError("the compiler fails")
        return original(backend, module, *arguments, **named)

    setattr(compiler, name, noting)
    return compiled


def _state() -> dict[str, Any]:
    """Return the parts of JAX that the hook changes."""
    settings = {name: getattr(jax.config, name, None) for name in SETTINGS}
    functions: list[Any] = [
        getattr(compilation_cache, "get_file_cache", compilation_cache.reset_cache),
        sys.modules["jax._src.cache_key"].get,
        compiler.compile_or_get_cached,
    ]
    return settings | {"owners": [function.__code__.co_filename for function in functions]}


def _train(scale: float) -> list[float]:
    def loss_of(parameters: Any, x: Any, y: Any) -> Any:
        first, second = parameters
        return (((jnp.tanh(x @ first) @ second) * scale - y) ** 2).mean()

    @jax.jit
    def step(parameters: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
        return [p - 0.1 * g for p, g in zip(parameters, gradients, strict=True)], loss

    random = np.random.default_rng(0)
    parameters = [
        random.normal(size=(16, 32)).astype(np.float32),
        random.normal(size=(32, 1)).astype(np.float32),
    ]
    x = random.normal(size=(8, 16)).astype(np.float32)
    losses = []
    for _ in range(3):
        parameters, loss = step(parameters, x, x.sum(1, keepdims=True))
        losses.append(float(loss))
    norm = sum(float(jnp.linalg.norm(p)) for p in parameters)
    return [*losses, norm]


def _leases_held(url: str) -> int:
    """Return the number of leases in the namespace: 0 as soon as the last lease has ended."""
    namespace = os.environ["GRAPHSTASH_NAMESPACE"]
    deadline = time.monotonic() + 30
    while True:
        leases = httpx.get(f"{url}/v1/{namespace}/leases", timeout=60).json()["leases"]
        held = len(leases)
        if held == 0 or time.monotonic() > deadline:
            return held
        time.sleep(0.02)


def _install() -> None:
    """Install the cache twice. The second call changes nothing."""
    import graphstash

    for _ in range(2):
        graphstash.install()


def _break_hook() -> None:
    from graphstash._process import session

    def fail(*_: object, **__: object) -> NoReturn:
        raise ValueError("no exchange today")

    current: Any = session._current
    entries = current._hooks["jax"]._entries
    entries._exchange.get = entries._exchange.put = entries._packs_for = fail


def training(
    *,
    scale: float = 1.0,
    install: bool = False,
    late: bool = False,
    uninstall: bool = False,
    pretend_features: str = "",
    without_zstandard: bool = False,
    cache_dir: str = "",
    sabotage: bool = False,
    break_compiler: bool = False,
    rank: int = 0,
    callback: bool = False,
    stats_url: str = "",
) -> dict[str, Any]:
    """Train, and report the losses and the programs that JAX has compiled.

    Args:
        scale: a number in the program; another one gives another program of equal shapes.
        install: whether the program calls `graphstash.install()`.
        late: whether it trains once before the installation.
        uninstall: whether it uninstalls the cache and trains again.
        pretend_features: instruction sets that the CPU seems to have.
        without_zstandard: whether zstandard is missing for JAX.
        cache_dir: directory of JAX's own cache, as scripts set it for JAX alone.
        sabotage: whether the functions on which the hook relies raise.
        break_compiler: whether a compilation fails first.
        rank: rank of this process in a job of several.
        callback: whether a program with a callback runs first.
        stats_url: server whose leases the report counts at the end.
    """
    report: dict[str, Any] = {"state_before": _state()}
    compiled = note_compiles(fails="broken" if break_compiler else "")
    if without_zstandard:
        setattr(compilation_cache, "zstandard", None)  # noqa: B010 - mypy refuses the assignment
    if late:
        _train(scale)
        jax.clear_caches()
        compiled.clear()
    if install:
        _install()
    _settle(pretend_features, cache_dir=cache_dir, rank=rank)
    if sabotage:
        _break_hook()
    if break_compiler:
        report["error"] = _error_of(jax.jit(_broken))
    if callback:
        report["callback"] = float(jax.jit(calls)(2.0))
    report["losses"] = _train(scale)
    if uninstall:
        import graphstash

        report["state_inside"] = _state()
        report["compiled_inside"] = len(compiled)
        graphstash.uninstall()
        jax.clear_caches()
        report["losses_after"] = _train(scale)
    return report | {
        "compiled": compiled,
        "state": _state(),
        "leases_held": _leases_held(stats_url) if stats_url else None,
    }


def _settle(pretend_features: str, *, cache_dir: str, rank: int) -> None:
    """Make the hook independent of this machine's speed and CPU, and set up the job."""
    if (packs := sys.modules.get("graphstash._compile.packs")) is not None:
        packs.MAX_PACKED_SECONDS = 1e9  # type: ignore[attr-defined] # however busy it is
    if pretend_features:
        from graphstash.hooks import environment

        setattr(environment, "cpu_features", pretend_features.split)  # noqa: B010 - mypy refuses the assignment
    if cache_dir:
        jax.config.update("jax_compilation_cache_dir", cache_dir)
    if rank:
        from jax._src import distributed

        distributed.global_state.process_id = rank


def _broken(x: Any) -> Any:
    return x + 1


def calls(x: Any) -> Any:
    jax.debug.print("x is {}", x)
    return x * 3


def _error_of(function: Callable[[float], Any]) -> str:
    try:
        function(1.0)
    except RuntimeError as error:
        return str(error)
    return ""


def training_in_children(*, count: int) -> list[Any]:
    """Train in several forked children at once, and return their reports."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    children = [
        context.Process(target=lambda sender=sender: sender.send(training())) for _, sender in pipes
    ]
    for child in children:
        child.start()
    reports = [receiver.recv() for receiver, _ in pipes]
    for child in children:
        child.join()
        assert child.exitcode == 0
    return reports


def collective(*, rank: int, size: int, port: int) -> dict[str, Any]:
    """Compile a program and an array that span all processes of a job."""
    import graphstash
    from support.late_ranks import wait_for_late_ranks

    wait_for_late_ranks()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
    compiled = note_compiles()
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    split = NamedSharding(mesh, PartitionSpec("ranks"))
    whole = NamedSharding(mesh, PartitionSpec())
    local = np.arange(8.0, dtype=np.float32) + rank
    x = jax.make_array_from_process_local_data(split, local)

    def total_of(x: Any) -> Any:
        return jnp.sin(x).sum()

    total = jax.jit(total_of, out_shardings=whole)(x)
    return {
        "total": float(total).hex(),
        "compiled": sum("total_of" in name for name in compiled),
        "stats": asdict(graphstash.stats()),
    }


def ahead_of_time() -> str:
    """Compile a tiny program for an absent TPU, in the environment `jax-newest`."""
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    sharding = SingleDeviceSharding(topology.devices[0])
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=sharding)
    compiled = jax.jit(lambda x: jnp.tanh(x) * 2).lower(x).compile()
    return str(compiled.as_text())


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def prewarmed_by_hand() -> dict[str, Any]:
    """Compile `abstract_step` for a TPU as a user does, and return the key that JAX logs."""
    from support.jax_prewarm_job import abstract_step

    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    logged, logger = _Lines(), logging.getLogger("jax._src.cache_key")
    logger.addHandler(logged)
    logger.setLevel(logging.DEBUG)
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    step, arguments = abstract_step(devices)
    step.lower(*arguments).compile()
    found = [
        match.groups()
        for line in logged.lines
        if (match := re.search(r"hash (of|after) serializ\w+ (.+): (\w+)", line))
    ]
    return {
        "components": {name: digest for which, name, digest in found if which == "of"},
        "whole": [digest for which, _, digest in found if which == "after"][-1],
    }


def command_line(*, commands: list[list[str]]) -> list[Any]:
    """Run `graphstash` several times in one process, because the import of JAX takes seconds."""
    from typer.testing import CliRunner

    from graphstash._cli.main import complete_app

    results = [
        CliRunner().invoke(complete_app(), words, env={"COLUMNS": "300"}) for words in commands
    ]
    return [[result.exit_code, result.stdout, result.stderr] for result in results]
