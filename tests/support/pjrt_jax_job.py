"""JAX programs on the PJRT plug-in for the CPU; runs in `jax-pjrt` and `jax-newest`.

By default it knows nothing of graphstash, like a user's script: a program for one device and one
for four. The other modes install and uninstall the cache themselves, many times in one process.
"""

import argparse
import ctypes
import json
import os
import signal
import tempfile
import threading
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument(
    "--mode", choices=("user", "faults", "threads", "process", "fork"), default="user"
)
parser.add_argument("--url", action="append", default=[], help="fault=URL")
options = parser.parse_args()

# One package brings it, for whatever framework: wherever this Python has its packages.
import xla_plugins.xla_cpu_pjrt as plugin_package

LIBRARY = Path(plugin_package.__file__).with_name("xla_cpu_pjrt.so")
os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"] = f"other:{LIBRARY}"
os.environ["JAX_PLATFORMS"] = "other"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
if options.mode != "user":
    # A program's bytes tell from where it is called: here it is called from many lines.
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

INPUT = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
CLIENT_COMPILE, COMPILE = 20, 89
compiles = [0]


def count(event, duration_secs, **_):
    compiles[0] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(count)


def small(factor=1.0):
    jax.clear_caches()
    return float(jax.jit(lambda x: jnp.tanh(factor * x @ x).sum())(INPUT))


def spread():
    mesh = Mesh(np.array(jax.devices()), ("d",))
    x = jax.device_put(INPUT, NamedSharding(mesh, PartitionSpec("d")))
    value, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sin(x @ x).sum()))(x)
    return [float(value), np.asarray(gradient).tolist(), len(x.sharding.device_set)]


def slots():
    """The pointers that are in the plug-in's table now."""
    library = ctypes.CDLL(str(LIBRARY))
    library.GetPjrtApi.restype = ctypes.c_void_p
    functions = library.GetPjrtApi() + 40
    return [
        ctypes.c_void_p.from_address(functions + 8 * n).value for n in (CLIENT_COMPILE, COMPILE)
    ]


def user():
    report = {"small": small(), "spread": spread()}
    return report | {"compiles": compiles[0]}


class Cache:
    """The cache of this process for a while, with an empty local tier."""

    def __init__(self, **settings):
        self.settings = {"hooks": ("pjrt",), "summary": False} | settings
        self.stats = {}

    def __enter__(self):
        import graphstash
        from graphstash._process import session as _session

        graphstash.uninstall()
        self.directory = tempfile.TemporaryDirectory()
        self.session = graphstash.install(cache_dir=self.directory.name, **self.settings)
        assert _session._current is self.session
        return self

    def __exit__(self, *_):
        import dataclasses

        import graphstash

        graphstash.uninstall()
        self.directory.cleanup()
        self.stats |= dataclasses.asdict(self.session.stats())

    @property
    def hook(self):
        return self.session._hooks["pjrt"]

    def interceptor(self):
        (found,) = self.hook._interceptors.values()
        return found


def faults():
    """The same program under every fault; the plug-in is loaded before the hook, each time."""
    from graphstash_schema import ArtifactMetadata

    untouched = slots()
    report = {"untouched": untouched}

    def under(name, *, before=lambda cache: None, **settings):
        with Cache(**settings) as cache:
            before(cache)
            result, patched = small(), slots()
            again = small()
        report[name] = {
            "results": [result, again],
            "stats": cache.stats,
            "patched": patched,
            "restored": slots(),
        }
        return cache

    def noise(cache):
        # What is stored under the key of the program is sound, and no executable.
        key = used.session.cache.used[0]
        metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=64)
        cache.session.cache.stash.put(key, os.urandom(64), metadata)

    def fail(*_, **__):
        raise ValueError("broken on purpose")

    def no_look_up(cache):
        cache.session.cache.fetch_or_start = fail

    def no_publishing(cache):
        cache.session.cache.publisher.submit = fail

    urls = dict(entry.split("=", 1) for entry in options.url)
    sound = urls.pop("sound")
    report["plain"] = small()
    used = under("sound", url=sound)
    for name, url in urls.items():
        under(name, url=url)
    under("noise", url=sound, namespace="noise", before=noise)
    under("get raises", url=sound, before=no_look_up)
    under("publish raises", url=sound, namespace="publish", before=no_publishing)
    under("beside the jax hook", url=sound, hooks=("pjrt", "jax"))
    return report


def in_threads():
    """Six programs, each compiled in a thread of its own, while the others compile."""
    jax.clear_caches()
    results: list[float | None] = [None] * 6

    def work(number):
        function = jax.jit(lambda x: (jnp.cos(x) * number).sum())
        results[number] = float(function(INPUT))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def uninstalled_meanwhile(url):
    """The cache goes while another thread compiles through it."""
    with Cache(url=url, namespace="early") as cache:
        interceptor, entered, go_on = cache.interceptor(), threading.Event(), threading.Event()
        compile_really, late = interceptor._compile, []

        def slowly(address):
            entered.set()
            assert go_on.wait(60)
            return compile_really(address)

        interceptor._compile = slowly
        thread = threading.Thread(target=lambda: late.append(small(7.0)))
        thread.start()
        assert entered.wait(60)
    before = slots()
    go_on.set()
    thread.join()
    return {"slots": before, "result": late[0], "afterwards": small(7.0)}


def interrupted(url, number, moment, handler):
    """SIGINT comes right before or right after the compiler is at work."""
    signal.signal(signal.SIGINT, handler)
    with Cache(url=url, namespace=f"interrupt-{number}") as cache:
        interceptor = cache.interceptor()
        compile_really, calls, threads = interceptor._compile, [], []

        def compile_and_signal(address):
            calls.append(address)
            threads.append(threading.current_thread())
            if len(calls) == 1 and moment == "before":
                signal.raise_signal(signal.SIGINT)
            error = compile_really(address)
            if len(calls) == 1:
                signal.raise_signal(signal.SIGINT)
            return error

        interceptor._compile = compile_and_signal
        raised = None
        try:
            small(7.0)
            for _ in range(600):
                threading.Event().wait(0.1)
        except (KeyboardInterrupt, SystemExit) as error:
            raised = repr(error)
        result = small(7.0)
    return {
        "raised": raised,
        "result": result,
        "compiled": len(calls),
        "in_main_thread": set(threads) == {threading.main_thread()},
        "stats": cache.stats,
    }


def threads():
    """Many threads that compile at once, twice."""
    (url,) = (entry.split("=", 1)[1] for entry in options.url)
    report = []
    for _ in range(2):
        with Cache(url=url, namespace=f"threads-{jax.__version__}") as cache:
            results = in_threads()
        report.append({"results": results, "stats": cache.stats})
    return report


def process():
    """What a process does beside compiling: an early end of the cache, Ctrl-C."""
    (url,) = (entry.split("=", 1)[1] for entry in options.url)
    report = {"untouched": slots(), "plain": small(7.0)}
    report["early"] = uninstalled_meanwhile(url)

    def stop(*_):
        raise SystemExit("stopped")

    usual = signal.getsignal(signal.SIGINT)
    cases = (("before", usual), ("after", usual), ("after", stop))
    report["interrupts"] = [interrupted(url, number, *case) for number, case in enumerate(cases)]
    return report


def fork():
    """Two children before there is a client: one like the parent, one with other flags."""
    report = {}
    for name, flags in (("same", ""), ("other flags", " --xla_cpu_enable_fast_math=true")):
        path = options.report.with_suffix(f".{name}")
        child = os.fork()
        if not child:
            import graphstash

            os.environ["XLA_FLAGS"] += flags
            result = {"small": small(), "spread": spread()}
            stats = graphstash.stats()
            path.write_text(json.dumps(result | {"hits": stats.hits, "misses": stats.misses}))
            graphstash.uninstall()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        report[name] = json.loads(path.read_text())
    report["parent"] = user()
    return report


modes = {
    "user": user,
    "faults": faults,
    "threads": threads,
    "process": process,
    "fork": fork,
}
options.report.write_text(json.dumps(modes[options.mode]()))
