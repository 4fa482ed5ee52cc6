"""`graphstash farm`: `prewarm` for several programs and topologies, on the hosts of a Ray cluster.

Ray queues the compilations, places them, and repeats those whose worker or host dies. The server's
leases let each artifact be compiled once, even if several farms run at the same time.
"""

import importlib
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated, Any, Final

import typer

from graphstash._cli.output import (
    Json,
    NamespaceOption,
    Url,
    count_progress,
    fail,
    format_bytes,
    format_seconds,
    load_config,
    print_json,
    print_table,
    say,
    shown,
)
from graphstash.config import ClientConfig
from graphstash.errors import GraphstashError, UnprovedError
from graphstash_schema.exit_status import ExitStatus

__all__ = ["farm"]

_FORWARDED: Final = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables of this host that the workers get, because keys contain them."""

_RETRIES: Final = 2
"""Further tries of a compilation whose worker or host has died."""

_GOOD: Final = frozenset({"compiled", "present"})


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of one request.

    Attributes:
        state: `compiled`, `present` (the server has it), `unproved` or `failed`.
        host: Name of the host that handled the request, or "" if it died.
        reason: Why nothing was compiled, or "".
    """

    target: str
    topology: str
    state: str
    host: str = ""
    reason: str = ""
    key: str = ""
    compile_seconds: float = 0.0
    size_bytes: int = 0


def farm(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="module:function or script.py:function, as for `graphstash prewarm`.",
        ),
    ],
    *,
    topology: Annotated[
        list[str], typer.Option(help="TPU topology to compile for, e.g. v5e:2x2. Repeatable.")
    ],
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Ray cluster, e.g. ray://head:10001. Default: RAY_ADDRESS, else this host.",
        ),
    ] = None,
    cpus: Annotated[int, typer.Option(min=1, help="CPUs for each compilation.")] = 1,
    url: Url = None,
    namespace: NamespaceOption = None,
    as_json: Json = False,
) -> None:
    """Compile JAX train steps for TPU topologies ahead of time, on the CPU hosts of a Ray cluster.

    Compiles a program only if a job on the device has proved that it makes the same keys. The
    hosts need graphstash, jax and libtpu in the job's versions, and a token. Ray copies the working
    directory to them. If a program has no proof or fails, the status is 1. Example:

        graphstash farm --ray ray://head:10001 --topology v5e:2x2 train.py:abstract_step
    """
    try:
        import ray as engine
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        fail(
            "farm needs Ray: pip install 'graphstash[ray] @ git+<repository>'",
            status=ExitStatus.USAGE,
        )
    config = load_config(url=url, namespace=namespace)
    if config.read_only:  # the hosts have settings of their own
        fail(
            "GRAPHSTASH_READ_ONLY is set: nothing could be published",
            status=ExitStatus.USAGE,
        )
    if ray is not None:
        os.environ["RAY_ADDRESS"] = ray
    requests = list(dict.fromkeys(product(targets, topology)))
    with redirect_stdout(sys.stderr):  # Ray prints to standard output that a worker has died
        outcomes = _outcomes(engine, config, requests, cpus=cpus)
    if as_json:
        print_json([asdict(each) for each in outcomes])
    else:
        _show(outcomes)
    if not all(each.state in _GOOD for each in outcomes):
        raise typer.Exit(int(ExitStatus.FAILED))


def _outcomes(
    engine: Any, config: ClientConfig, requests: Sequence[tuple[str, str]], *, cpus: int
) -> list[_Outcome]:
    """Run the requests on the cluster. Return what became of each."""
    from graphstash.tuning.measuring.ray_pool import join_cluster

    flags = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    try:
        # Set JAX_PLATFORMS before JAX starts, which must not initialize the devices of a worker.
        variables = flags | {"JAX_PLATFORMS": "cpu"}
        environment = {"working_dir": os.curdir, "env_vars": variables}
        # Without an address, Ray would join any cluster that was started on this host.
        address = os.environ.get("RAY_ADDRESS", "local")
        join_cluster(address=address, runtime_env=environment, logging_level=logging.ERROR)
    except Exception as error:  # noqa: BLE001 - Ray raises many types, and plain Exception
        fail(f"Ray cannot be used: {error}")
    settings = {
        "url": config.url if "url" in config.given else None,
        "namespace": str(config.namespace),
        "read_namespaces": ",".join(config.read_namespaces) or None,
    }
    # A worker ends after one compilation, because libtpu reads its flags once in a process.
    options = {"num_cpus": cpus, "max_retries": _RETRIES, "max_calls": 1}
    compile_there = engine.remote(scheduling_strategy="SPREAD", **options)(_compile)
    try:
        calls = {
            compile_there.remote(target, name, settings): (target, name)
            for target, name in requests
        }
        found = dict(_collected(engine, calls))
    finally:
        engine.shutdown()
    return [found[request] for request in requests]


def _collected(
    engine: Any, calls: Mapping[Any, tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], _Outcome]]:
    """Yield each request with its outcome. The request that ends first comes first."""
    left = list(calls)
    with count_progress() as progress:
        bar = progress.add_task("compiling", total=len(left))
        while left:
            (call,), left = engine.wait(left)
            target, topology = calls[call]
            try:
                result = engine.get(call)
            except engine.exceptions.RayError as error:
                result = {"state": "failed", "reason": " ".join(str(error).split())}
            yield calls[call], _Outcome(target=target, topology=topology, **result)
            progress.advance(bar)


def _compile(target: str, topology: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Compile one program on a host of the cluster. Return the fields of an `_Outcome`."""
    here = {"host": socket.gethostname()}
    try:
        # Import by name: only hooks may import a compiler.
        hook = importlib.import_module("graphstash.hooks.jax.prewarm")
        done = hook.prewarm(
            target,
            topology=topology,
            platform="tpu",
            config=ClientConfig.load(**settings),
            only_if_proved=True,
        )
    except GraphstashError as error:
        state = "unproved" if isinstance(error, UnprovedError) else "failed"
        return here | {"state": state, "reason": str(error)}
    except Exception as error:  # noqa: BLE001 - outermost frame: the user's function, or the compiler
        return here | {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
    return here | {
        "state": "compiled" if done.is_new else "present",
        "key": str(done.key),
        "compile_seconds": done.compile_seconds,
        "size_bytes": done.size_bytes,
    }


def _show(outcomes: Sequence[_Outcome]) -> None:
    print_table(
        ["state", "topology", "target", "host", ">compiled in", ">uploaded"],
        [
            [
                each.state,
                shown(each.topology),
                shown(each.target),
                shown(each.host),
                format_seconds(each.compile_seconds) if each.compile_seconds else "",
                format_bytes(each.size_bytes) if each.size_bytes else "",
            ]
            for each in outcomes
        ],
        flexible=2,
    )
    for each in outcomes:
        if each.reason:
            request = f"{shown(each.target)} for {shown(each.topology)}"
            say(f"{each.state}: {request}: {shown(each.reason, most=1000)}")
