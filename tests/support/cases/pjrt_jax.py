"""JAX programs on the PJRT plug-in for the CPU, in the environments `jax-pjrt` and `.venv`.

`user` does not use graphstash, like a user's script: a program for one device and one for four. The
other cases install and uninstall the cache themselves, many times in one process.
"""

# mypy: disallow-untyped-calls=False
# JAX is partly typed.

import ctypes
import dataclasses
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import graphstash
from graphstash._process.session import Session
from graphstash_schema import ArtifactMetadata
from support.pjrt_plugin import LIBRARY, use_in_jax
from support.waiting import until

use_in_jax()
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

INPUT = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
CLIENT_COMPILE, COMPILE = 20, 89
compiles = [0]


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    compiles[0] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


def _from_one_place() -> None:
    """Omit the calling lines from programs, because these programs are called from many lines."""
    jax.config.update("jax_traceback_in_locations_limit", 1)


def _small() -> float:
    jax.clear_caches()
    return float(jax.jit(lambda x: jnp.tanh(x @ x).sum())(INPUT))


def _spread() -> list[Any]:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    x = jax.device_put(INPUT, NamedSharding(mesh, PartitionSpec("d")))
    value, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sin(x @ x).sum()))(x)
    return [float(value), np.asarray(gradient).tolist(), len(x.sharding.device_set)]


def _slots() -> list[Any]:
    """Return the present pointers in the plug-in's table."""
    library = ctypes.CDLL(str(LIBRARY))
    library.GetPjrtApi.restype = ctypes.c_void_p
    functions = library.GetPjrtApi() + 40
    return [
        ctypes.c_void_p.from_address(functions + 8 * n).value for n in (CLIENT_COMPILE, COMPILE)
    ]


def user() -> dict[str, Any]:
    """Compile a program for one device and one for four."""
    report: dict[str, Any] = {"small": _small(), "spread": _spread()}
    return report | {"compiles": compiles[0]}


class _Cache:
    """The cache of this process during a block, with an empty local tier."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {"hooks": ("pjrt",), "summary": False} | settings
        self.stats: dict[str, Any] = {}

    def __enter__(self) -> Self:
        graphstash.uninstall()
        self.directory = tempfile.TemporaryDirectory()
        session = graphstash.install(cache_dir=self.directory.name, **self.settings)
        assert isinstance(session, Session)
        self.session = session
        return self

    def __exit__(self, *_: object) -> None:
        graphstash.uninstall()
        self.directory.cleanup()
        self.stats |= dataclasses.asdict(self.session.stats())

    def interceptor(self) -> Any:
        hook: Any = self.session._hooks["pjrt"]
        (found,) = hook._interceptors.values()
        return found


def faults(*, urls: dict[str, str]) -> dict[str, Any]:
    """Run a program under every fault. Each time, the plug-in is loaded before the hook.

    Args:
        urls: servers and faulty proxies by name; `sound` is the server.
    """
    _from_one_place()
    report: dict[str, Any] = {"untouched": _slots()}

    def under(
        name: str, *, before: Callable[[_Cache], None] = lambda _: None, **settings: Any
    ) -> _Cache:
        with _Cache(**settings) as cache:
            before(cache)
            result, patched = _small(), _slots()
            again = _small()
        report[name] = {
            "results": [result, again],
            "stats": cache.stats,
            "patched": patched,
            "restored": _slots(),
        }
        return cache

    def noise(cache: _Cache) -> None:
        # The artifact under the key of the program is sound, but no executable.
        key = used.session.cache.used[0]
        metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=64)
        cache.session.cache.stash.put(key, os.urandom(64), metadata)

    def fail(*_: object, **__: object) -> NoReturn:
        raise ValueError("broken on purpose")

    def no_look_up(cache: _Cache) -> None:
        setattr(cache.session.cache, "fetch_or_start", fail)  # noqa: B010 - mypy refuses the assignment

    def no_publishing(cache: _Cache) -> None:
        setattr(cache.session.cache.publisher, "submit", fail)  # noqa: B010 - mypy refuses the assignment

    sound = urls.pop("sound")
    report["plain"] = _small()
    used = under("sound", url=sound)
    for name, url in urls.items():
        under(name, url=url)
    under("noise", url=sound, namespace="noise", before=noise)
    under("get raises", url=sound, before=no_look_up)
    under("publish raises", url=sound, namespace="publish", before=no_publishing)
    under("beside the jax hook", url=sound, hooks=("pjrt", "jax"))
    report["threads"] = [_in_threads(sound) for _ in range(2)]
    report["early"] = _uninstalled_meanwhile(sound)

    def stop(_: int, __: FrameType | None) -> NoReturn:
        raise SystemExit("stopped")

    usual = signal.getsignal(signal.SIGINT)
    moments = (("before", usual), ("after", usual), ("after", stop))
    report["interrupts"] = [
        _interrupted(sound, number, *moment) for number, moment in enumerate(moments)
    ]
    return report


def _in_threads(url: str) -> dict[str, Any]:
    """Compile six programs at once, each in a thread of its own."""

    def work(number: int) -> float:
        return float(jax.jit(lambda x: (jnp.cos(x) * number).sum())(INPUT))

    jax.clear_caches()
    namespace = f"threads-{jax.__version__}"
    with _Cache(url=url, namespace=namespace) as cache, ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(6)))
    return {"results": results, "stats": cache.stats}


def _uninstalled_meanwhile(url: str) -> dict[str, Any]:
    """Uninstall the cache while another thread compiles through it."""
    entered, go_on = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with _Cache(url=url, namespace="early") as cache:
            interceptor = cache.interceptor()
            compile_really = interceptor._compile

            def slowly(address: int) -> Any:
                entered.set()
                assert go_on.wait(60)
                return compile_really(address)

            interceptor._compile = slowly
            late = pool.submit(_small)
            assert entered.wait(60)
        before = _slots()
        go_on.set()
        return {"slots": before, "result": late.result(), "afterwards": _small()}


def _interrupted(url: str, number: int, moment: str, handler: Any) -> dict[str, Any]:
    """Raise SIGINT right before or right after the compiler runs."""
    signal.signal(signal.SIGINT, handler)
    with _Cache(url=url, namespace=f"interrupt-{number}") as cache:
        interceptor = cache.interceptor()
        compile_really = interceptor._compile
        calls: list[int] = []
        threads: list[threading.Thread] = []

        def compile_and_signal(address: int) -> Any:
            calls.append(address)
            threads.append(threading.current_thread())
            if len(calls) == 1 and moment == "before":
                signal.raise_signal(signal.SIGINT)
            error = compile_really(address)
            if len(calls) == 1 and moment == "after":
                signal.raise_signal(signal.SIGINT)
            return error

        interceptor._compile = compile_and_signal
        raised = None
        try:
            _small()
            for _ in range(600):
                threading.Event().wait(0.1)
        except (KeyboardInterrupt, SystemExit) as error:
            raised = repr(error)
        in_main_thread = set(threads) == {threading.main_thread()}
        if not in_main_thread:  # in another thread, the compilation continues
            until(lambda: cache.session.stats().published == 1)
        result = _small()
    return {
        "raised": raised,
        "result": result,
        "compiled": len(calls),
        "in_main_thread": in_main_thread,
        "stats": cache.stats,
    }


def fork() -> dict[str, Any]:
    """Compile in two children before JAX has a client. The second child has other XLA flags."""
    _from_one_place()
    context = multiprocessing.get_context("fork")
    report: dict[str, Any] = {}
    for name, flags in (("same", ""), ("other flags", " --xla_cpu_enable_fast_math=true")):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_send_from_child, args=(sender, flags))
        child.start()
        report[name] = receiver.recv()
        child.join()
        assert child.exitcode == 0
    return report | {"parent": user()}


def _send_from_child(sender: Connection, flags: str) -> None:
    sender.send(_in_child(flags))


def _in_child(flags: str) -> dict[str, Any]:
    os.environ["XLA_FLAGS"] += flags
    result = {"small": _small(), "spread": _spread()}
    stats = graphstash.stats()
    graphstash.uninstall()
    return result | {"hits": stats.hits, "misses": stats.misses}
