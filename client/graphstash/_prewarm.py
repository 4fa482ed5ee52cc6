"""`graphstash prewarm`: compile for a TPU on a host that has none, before the job is there."""

import dataclasses
import importlib
import json
import os
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from graphstash._config import ClientConfig
from graphstash._errors import CacheError, ConfigError

if TYPE_CHECKING:
    from graphstash.hooks.jax.prewarm import Prewarmed

__all__ = ["prewarm"]

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)


def prewarm(
    target: Annotated[
        str,
        typer.Argument(
            help="module:function or script.py:function. It is called with the topology's devices "
            "and returns (jitted function, abstract arguments)"
        ),
    ],
    *,
    topology: Annotated[str, typer.Option(help="What to compile for, e.g. v5e:2x2")],
    platform: Annotated[str, typer.Option(help="Whose topology that is")] = "tpu",
    url: Annotated[str | None, typer.Option(help="Server, e.g. http://cache.internal:8077")] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace to write")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts")] = False,
) -> None:
    """Compile a JAX train step ahead of time, on a host without the device.

    Does nothing when the server has it. Needs jax and libtpu in this environment, in the job's
    versions. Example:

        graphstash prewarm --topology v5e:2x2 train.py:abstract_step
    """
    # Before JAX is imported: the devices of this host are not wanted.
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        # By name, because only hooks may import a compiler, and not before it is needed.
        hook = importlib.import_module("graphstash.hooks.jax.prewarm")
        config = ClientConfig.load(url=url, namespace=namespace)
        with _err.status("compiling"):
            done = hook.prewarm(target, topology=topology, platform=platform, config=config)
    except ModuleNotFoundError as error:
        if error.name not in {"jax", "jaxlib"}:
            raise
        _fail(f"no {error.name} in this environment: pip install jax libtpu", status=2)
    except ConfigError as error:
        _fail(str(error), status=2)
    except CacheError as error:
        _fail(str(error))
    if as_json:
        told = dataclasses.asdict(done) | {"key": str(done.key)}
        typer.echo(json.dumps(told, indent=2))
    else:
        _show(done)


def _show(done: "Prewarmed") -> None:
    if done.is_new:
        _out.print(
            f"[green]published[/green] after {done.compile_seconds:.1f} s: "
            f"{done.raw_size_bytes:,} bytes, {done.size_bytes:,} sent"
        )
    else:
        _out.print("[green]the server has it[/green]; nothing was compiled")
    _out.print(f"key      {done.key}", soft_wrap=True)
    _out.print(f"jax key  {escape(done.jax_key)}", soft_wrap=True)
    _out.print("its components; the job logs the same with JAX_LOGGING_LEVEL=DEBUG")
    for name, digest in done.components.items():
        _out.print(f"  {escape(name):20} {digest}", soft_wrap=True)


def _fail(message: str, *, status: int = 1) -> NoReturn:
    _err.print(f"[red]graphstash:[/red] {escape(message)}", soft_wrap=True)
    raise typer.Exit(status)
