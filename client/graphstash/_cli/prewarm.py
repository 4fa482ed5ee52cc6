"""`graphstash prewarm`: compile for a TPU on a host without a TPU, before the job starts."""

import dataclasses
import importlib
import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from graphstash._cli.output import (
    Json,
    Url,
    err,
    fail,
    format_bytes,
    format_seconds,
    load_config,
    out,
    print_json,
)
from graphstash_schema.exit_status import ExitStatus

if TYPE_CHECKING:
    from graphstash.hooks.jax.prewarm import Prewarmed

__all__ = ["prewarm"]


def prewarm(
    target: Annotated[
        str,
        typer.Argument(
            help="module:function or script.py:function. It is called with the topology's devices "
            "and returns (jitted function, abstract arguments)."
        ),
    ],
    *,
    topology: Annotated[str, typer.Option(help="Topology to compile for, e.g. v5e:2x2.")],
    platform: Annotated[str, typer.Option(help="Platform of the topology.")] = "tpu",
    url: Url = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace to publish to.")] = None,
    as_json: Json = False,
) -> None:
    """Compile a JAX train step ahead of time, on a host without the device.

    Skips artifacts that the server already has. Needs jax and libtpu in this environment, in the
    job's versions. Example:

        graphstash prewarm --topology v5e:2x2 train.py:abstract_step
    """
    # Set this before importing JAX, which must not initialize the devices of this host.
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        # Import by name: only hooks may import a compiler, and only when it is needed.
        hook = importlib.import_module("graphstash.hooks.jax.prewarm")
        config = load_config(url=url, namespace=namespace)
        with err.status("compiling"):
            done = hook.prewarm(target, topology=topology, platform=platform, config=config)
    except ModuleNotFoundError as error:
        if error.name not in {"jax", "jaxlib"}:
            raise
        fail(
            f"{error.name} is not installed in this environment: pip install jax libtpu",
            status=ExitStatus.USAGE,
        )
    if as_json:
        print_json(dataclasses.asdict(done) | {"key": str(done.key)})
    else:
        _show(done)


def _show(done: "Prewarmed") -> None:
    if done.is_new:
        out.print(
            f"[green]published[/green] after compiling for {format_seconds(done.compile_seconds)}: "
            f"{format_bytes(done.raw_size_bytes)}, {format_bytes(done.size_bytes)} uploaded"
        )
    else:
        out.print("[green]the server already has it[/green]; nothing was compiled")
    out.print(f"key      {done.key}", soft_wrap=True)
    out.print(f"jax key  {escape(done.jax_key)}", soft_wrap=True)
    out.print("components (a job logs the same with JAX_LOGGING_LEVEL=DEBUG):")
    for name, digest in done.components.items():
        out.print(f"  {escape(name):20} {digest}", soft_wrap=True)
