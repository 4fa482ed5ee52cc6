"""`graphstash clock`: show whether the servers delete by age, and accept a clock that jumped."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from graphstash_server.commands.running import Json, run_with_services

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext

__all__ = ["clock"]


def clock(
    *,
    accept: Annotated[
        bool,
        typer.Option("--accept", help="Accept the clock as right, and delete by age again."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show whether the servers delete by age, or accept a clock that jumped.

    The servers delete nothing by age while their clock is more than an hour away from the time that
    they have recorded. Run it on a host of the server, with its `GRAPHSTASH_*` variables.
    """

    async def work(context: "ProcessContext") -> None:
        plausible = context.plausible_clock
        if accept:
            await plausible.accept()
        else:
            await plausible.observe()
        now = context.clock()
        if as_json:
            shown = {
                "clock": now.isoformat(),
                "recorded": (now - plausible.jump).isoformat(),
                "deletion_suspended": plausible.is_suspended,
            }
            typer.echo(json.dumps(shown, indent=2))
            return
        typer.echo(f"clock     {now:%Y-%m-%d %H:%M:%S} UTC")
        typer.echo(f"recorded  {now - plausible.jump:%Y-%m-%d %H:%M:%S} UTC")
        typer.echo(f"state     {plausible.state}")

    run_with_services(work)
