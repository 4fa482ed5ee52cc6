"""A training job of JAX that is small enough for tests: a two-layer perceptron, plain SGD.

Knows nothing of graphstash unless told to install it by hand. Writes what happened as JSON.
"""

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--scale", type=float, default=1.0, help="another program of equal shapes")
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--install", action="store_true", help="call graphstash.install()")
parser.add_argument("--late", action="store_true", help="train once before that")
parser.add_argument("--pretend-features", help="instruction sets that this host's CPU has")
parser.add_argument("--pretend-version", help="what jax says of itself")
parser.add_argument("--without-zstandard", action="store_true", help="as where JAX finds none")
parser.add_argument("--rename", help="a name of its cache that JAX has no more")
parser.add_argument("--cache-dir", type=Path, help="as scripts for a bare JAX set it")
parser.add_argument("--sabotage", action="store_true", help="what the hook relies on raises")
parser.add_argument("--break-compiler", action="store_true", help="a compile that fails first")
parser.add_argument("--rank", type=int, default=0, help="in a job of several processes")
parser.add_argument("--callback", action="store_true", help="a program that calls back")
parser.add_argument("--uninstall", action="store_true", help="in the middle")
parser.add_argument("--fork", type=int, default=0, help="train in so many forked children")
parser.add_argument("--stats-url", help="report the leases that this server has in the end")
options = parser.parse_args()

import jax
from jax._src import compilation_cache, compiler

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_enable_xla_caches",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def state():
    """What the hook changes in JAX."""
    settings = {name: getattr(jax.config, name, None) for name in SETTINGS}
    functions = (
        getattr(
            compilation_cache, options.rename or "get_file_cache", compilation_cache.reset_cache
        ),
        jax._src.cache_key.get,
        compiler.compile_or_get_cached,
    )
    return settings | {"owners": [function.__code__.co_filename for function in functions]}


def rename(module, name):
    """Gives a function another name, for its callers too: JAX of another age."""
    function = getattr(module, name)
    delattr(module, name)
    setattr(module, f"{name}_", function)
    for caller in vars(module).values():
        code = getattr(caller, "__code__", None)
        if code is not None and name in code.co_names:
            names = tuple(f"{name}_" if known == name else known for known in code.co_names)
            caller.__code__ = code.replace(co_names=names)


compiled = []
for backend_compile in ("backend_compile_and_load", "backend_compile"):
    if hasattr(compiler, backend_compile):
        break
original_compile = getattr(compiler, backend_compile)


def counting(backend, module, *arguments, **named):
    name = str(module.operation.attributes["sym_name"])
    compiled.append(name)
    if options.break_compiler and "broken" in name:
        raise RuntimeError("the compiler fails")
    return original_compile(backend, module, *arguments, **named)


setattr(compiler, backend_compile, counting)

if options.pretend_version:
    jax.__version__ = options.pretend_version
if options.without_zstandard:
    compilation_cache.zstandard = None
if options.rename:
    rename(compilation_cache, options.rename)


def loss_of(parameters, x, y):
    first, second = parameters
    return (((jax.numpy.tanh(x @ first) @ second) * options.scale - y) ** 2).mean()


@jax.jit
def step(parameters, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
    return [p - 0.1 * g for p, g in zip(parameters, gradients, strict=True)], loss


def train():
    import numpy as np

    random = np.random.default_rng(0)
    parameters = [
        random.normal(size=(16, options.width)).astype(np.float32),
        random.normal(size=(options.width, 1)).astype(np.float32),
    ]
    x = random.normal(size=(8, 16)).astype(np.float32)
    losses = []
    for _ in range(3):
        parameters, loss = step(parameters, x, x.sum(1, keepdims=True))
        losses.append(float(loss))
    norm = sum(float(jax.numpy.linalg.norm(p)) for p in parameters)
    return [*losses, norm]


def leases_held():
    """How many the server counts: 0 as soon as it knows of the end of the last one."""
    import httpx

    deadline = time.monotonic() + 30
    while True:
        held = httpx.get(f"{options.stats_url}/v1/stats", timeout=10).json()["leases_held"]
        if held == 0 or time.monotonic() > deadline:
            return held
        time.sleep(0.02)


def main():
    extra = {}
    if options.break_compiler:

        @jax.jit
        def broken(x):
            return x + 1

        try:
            broken(1.0)
        except RuntimeError as error:
            extra["error"] = str(error)
    if options.callback:

        @jax.jit
        def calls(x):
            jax.debug.print("x is {}", x)
            return x * 3

        extra["callback"] = float(calls(2.0))
    losses = train()
    if options.uninstall:
        import graphstash

        extra["state_inside"] = state()
        extra["compiled_inside"] = len(compiled)
        graphstash.uninstall()
        jax.clear_caches()
        extra["losses_after"] = train()
    report = {
        "losses": losses,
        "compiled": compiled,
        "state": state(),
        "leases_held": leases_held() if options.stats_url else None,
        **extra,
    }
    options.report.write_text(json.dumps(report))


before = state() if not options.rename else {}
if options.late:
    train()
    jax.clear_caches()
    compiled.clear()
if options.install:
    import graphstash

    for _ in range(2):  # the second call must change nothing
        graphstash.install()
if (packs := sys.modules.get("graphstash._compile.packs")) is not None:
    packs.MAX_PACKED_SECONDS = 1e9  # however busy this machine is
if options.pretend_features:
    from graphstash.hooks import environment

    environment.cpu_features = options.pretend_features.split
if options.cache_dir:
    jax.config.update("jax_compilation_cache_dir", str(options.cache_dir))
if options.rank:
    from jax._src import distributed

    distributed.global_state.process_id = options.rank
if options.sabotage:
    from graphstash._process import session as _session

    def fail(*_, **__):
        raise ValueError("no exchange today")

    entries = _session._current._hooks["jax"]._entries
    entries._exchange.get = entries._exchange.put = entries._packs_for = fail
if options.fork:
    context = multiprocessing.get_context("fork")
    children = []
    report = options.report
    for number in range(options.fork):
        options.report = report.with_suffix(f".{number}.json")
        children.append(context.Process(target=main))
        children[-1].start()
    for child in children:
        child.join()
    sys.exit(max(abs(child.exitcode or 0) for child in children))
main()
if options.uninstall:
    report = json.loads(options.report.read_text())
    options.report.write_text(json.dumps(report | {"state_before": before}))
