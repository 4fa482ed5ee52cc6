"""`graphstash quarantine list|release|delete`: decides about artifacts that were reported."""

from typing import TYPE_CHECKING, Annotated

import typer

from graphstash_schema import InvalidValueError, Namespace
from graphstash_server.commands.running import fail, run_with_services, size_of
from graphstash_server.keys import StoredKey

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext

__all__ = ["quarantine"]

quarantine = typer.Typer(
    help="Decide about artifacts that a client reported as wrong: they are withheld until then. "
    "Run it with the settings of a server.",
    no_args_is_help=True,
)

_PARTS = 4

_Artifact = Annotated[
    str,
    typer.Argument(
        help="As `list` shows it: <namespace>/<kind>/<device type>/<fingerprint>.",
    ),
]


@quarantine.command("list")
def list_(
    *,
    namespace: Annotated[str | None, typer.Option(help="Only of this namespace.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for scripts.")] = False,
) -> None:
    """List what is withheld, the newest report first."""
    try:
        where = Namespace(namespace) if namespace is not None else None
    except InvalidValueError as error:
        fail(str(error), status=2)

    async def work(context: "ProcessContext") -> None:
        withheld = await context.quarantine.list_withheld(where)
        if as_json:
            typer.echo(withheld.model_dump_json(indent=2))
            return
        for each in withheld.artifacts:
            typer.echo(
                f"{each.reported_at:%Y-%m-%d %H:%M}  {each.reason:<13}  "
                f"{size_of(each.size_bytes):>9}  reported by {each.reported_by!r}, made by "
                f"{each.producer!r}\n  {each.namespace}/{each.key}\n  {each.digest}"
            )
        if not withheld.artifacts:
            typer.echo("nothing is withheld")

    run_with_services(work)


@quarantine.command()
def release(artifact: _Artifact) -> None:
    """Serve an artifact again: the report was wrong."""
    key = _parse(artifact)

    async def work(context: "ProcessContext") -> None:
        from graphstash_server.actor import Actor

        if not await context.quarantine.release(key, actor=Actor.local()):
            _refuse(artifact)
        typer.echo(f"{artifact} is served again")

    run_with_services(work)


@quarantine.command()
def delete(artifact: _Artifact) -> None:
    """Delete an artifact: the next job that needs it compiles it anew."""
    key = _parse(artifact)

    async def work(context: "ProcessContext") -> None:
        from graphstash_server.actor import Actor

        if not await context.quarantine.delete(key, actor=Actor.local()):
            _refuse(artifact)
        typer.echo(f"{artifact} is deleted")

    run_with_services(work)


def _parse(text: str) -> StoredKey:
    parts = text.split("/")
    if len(parts) != _PARTS:
        fail(
            f"{text!r} is no artifact: it takes <namespace>/<kind>/<device type>/<fingerprint>",
            status=2,
        )
    try:
        return StoredKey.parse(
            namespace=parts[0], kind=parts[1], device_type=parts[2], fingerprint=parts[3]
        )
    except InvalidValueError as error:
        fail(str(error), status=2)


def _refuse(artifact: str) -> None:
    fail(f"{artifact} is not withheld: see `graphstash quarantine list`")
