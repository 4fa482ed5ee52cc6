"""`graphstash quarantine list|release|delete`: review artifacts that were reported as wrong."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graphstash_schema import Namespace
from graphstash_server.actor import Actor
from graphstash_server.commands.running import (
    Json,
    NamespaceFilter,
    fail,
    format_bytes,
    parse,
    print_result,
    run_with_services,
)
from graphstash_server.keys import StoredKey

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext

__all__ = ["quarantine"]

quarantine = typer.Typer(
    help="Review artifacts that were reported as wrong. They are withheld until you decide. Run it "
    "on a host of the server, with its `GRAPHSTASH_*` variables.",
    no_args_is_help=True,
)

_Artifact = Annotated[
    str,
    typer.Argument(
        help="As shown by `list`: `<namespace>/<kind>/<device type>/<fingerprint>`.",
    ),
]


@quarantine.command("list")
def list_(
    *,
    namespace: NamespaceFilter = None,
    as_json: Json = False,
) -> None:
    """List withheld artifacts, newest report first."""
    where = parse(Namespace, namespace) if namespace is not None else None

    async def work(context: "ProcessContext") -> None:
        withheld = await context.quarantine.list_withheld(where)
        if as_json:
            typer.echo(withheld.model_dump_json(indent=2))
            return
        for each in withheld.artifacts:
            typer.echo(
                f"{each.reported_at:%Y-%m-%d %H:%M}  {each.reason:<13}  "
                f"{format_bytes(each.size_bytes):>9}  reported by {each.reported_by!r}, made by "
                f"{each.producer!r}\n  {each.namespace}/{each.key}\n  {each.digest}"
            )
        if not withheld.artifacts:
            typer.echo("nothing is withheld")

    run_with_services(work)


@quarantine.command()
def release(artifact: _Artifact, *, as_json: Json = False) -> None:
    """Serve a withheld artifact again, because the report was wrong."""
    _decide(artifact, "release", "served again", as_json=as_json)


@quarantine.command()
def delete(artifact: _Artifact, *, as_json: Json = False) -> None:
    """Delete a withheld artifact. The next job that needs it compiles it again."""
    _decide(artifact, "delete", "deleted", as_json=as_json)


def _decide(
    artifact: str, method: Literal["release", "delete"], done: str, *, as_json: bool
) -> None:
    key = parse(StoredKey.parse_path, artifact)

    async def work(context: "ProcessContext") -> None:
        if not await getattr(context.quarantine, method)(key, actor=Actor.local()):
            fail(f"{artifact} is not withheld: see `graphstash quarantine list`")
        record = {"artifact": artifact, "decision": method}
        print_result(f"{artifact} is {done}", record, as_json=as_json)

    run_with_services(work)
