"""`graphstash namespace list|show|set|remove|clear`: manage policies and contents of namespaces."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from graphstash_schema import (
    Namespace,
    NamespaceInfo,
    NamespacePolicy,
    WriteMode,
)
from graphstash_server.actor import Actor
from graphstash_server.commands.running import (
    Json,
    fail,
    format_bytes,
    parse,
    plural,
    print_result,
    run_with_services,
)

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext

__all__ = ["namespace"]

namespace = typer.Typer(
    help="Manage namespace policies: who may write, how much, and whether artifacts may be "
    "replaced. Run it on a host of the server, with its `GRAPHSTASH_*` variables. Servers apply "
    "changes within two seconds.",
    no_args_is_help=True,
)

_NONE = "none"
_LIMITS = "Limits"  # a panel of its own: at 80 columns, one panel would cut option names

_Name = Annotated[str, typer.Argument(help="The namespace.")]


@namespace.command("list")
def list_(*, as_json: Json = False) -> None:
    """List the namespaces that have a policy of their own."""

    async def work(context: "ProcessContext") -> None:
        infos = await context.policies.list_all()
        _show(infos, as_json=as_json)
        if not infos and not as_json:
            typer.echo("no namespace has a policy of its own: the defaults apply to all")

    run_with_services(work)


@namespace.command()
def show(name: _Name, *, as_json: Json = False) -> None:
    """Show the policy of a namespace."""
    where = parse(Namespace, name)

    async def work(context: "ProcessContext") -> None:
        info = await context.policies.find(where)
        if info is None:
            fail(f"the namespace {where} has no policy of its own: the defaults apply")
        _show([info], as_json=as_json)

    run_with_services(work)


@namespace.command("set")
def set_(
    name: _Name,
    *,
    mode: Annotated[
        WriteMode | None,
        typer.Option(
            metavar="MODE",
            help="read_only: write nothing. write_once: keep the first artifact of a key. "
            "overwrite: keep the last one.",
        ),
    ] = None,
    trusted: Annotated[
        bool | None,
        typer.Option(help="Accept writes only from grants that name the namespace without *."),
    ] = None,
    anonymous_read: Annotated[
        bool | None, typer.Option(help="Allow reading without a token.")
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(rich_help_panel=_LIMITS, help="Limit for all artifacts, e.g. 10GiB, or none."),
    ] = None,
    max_artifact: Annotated[
        str | None,
        typer.Option(rich_help_panel=_LIMITS, help="Limit for one artifact, e.g. 1GiB, or none."),
    ] = None,
    requests_per_second: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_LIMITS,
            help="Limit for each server with all its workers, e.g. 100, or none.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Change the policy of a namespace. Omitted options keep their value."""
    where = parse(Namespace, name)
    given: dict[str, Any] = {
        "mode": mode,
        "trusted": trusted,
        "anonymous_read": anonymous_read,
        "limit_bytes": _bytes(limit),
        "max_artifact_bytes": _bytes(max_artifact),
        "requests_per_second": requests_per_second,
    }
    changes = {
        field: None if value == _NONE else value
        for field, value in given.items()
        if value is not None
    }
    if not changes:
        fail("nothing to change: give at least one option, see --help", status=2)

    async def work(context: "ProcessContext") -> None:
        await context.ownership.require_in_database()
        try:
            info = await context.policies.change(where, changes, Actor.local())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            fail(f"{first['loc'][0]}={first['input']} is not valid: {first['msg']}", status=2)
        _show([info], as_json=as_json)

    run_with_services(work)


@namespace.command()
def remove(name: _Name, *, as_json: Json = False) -> None:
    """Remove a policy, so that the defaults apply. Deletes no artifacts."""
    where = parse(Namespace, name)

    async def work(context: "ProcessContext") -> None:
        await context.ownership.require_in_database()
        if not await context.policies.remove(where, Actor.local()):
            fail(f"the namespace {where} has no policy of its own")
        record = {"namespace": where, "removed": True}
        print_result(f"{where}: the defaults apply", record, as_json=as_json)

    run_with_services(work)


@namespace.command()
def clear(
    name: _Name,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm that artifacts are deleted.")] = False,
    as_json: Json = False,
) -> None:
    """Delete every artifact of a namespace, also withheld ones. Hosts then delete their copies."""
    where = parse(Namespace, name)
    if not yes:
        fail(f"this deletes every artifact of {where}: repeat the command with --yes", status=2)

    async def work(context: "ProcessContext") -> None:
        await context.ownership.require_in_database()
        deleted, left = await context.artifacts.delete_all(where, actor=Actor.local())
        text = f"{where}: {plural(deleted, 'artifact')} deleted"
        if left:
            text += (
                f"; the store has not deleted {plural(left, 'blob')} in time: the servers delete "
                "them later"
            )
        record = {"namespace": where, "deleted": deleted, "blobs_left": left}
        print_result(text, record, as_json=as_json)

    run_with_services(work)


def _bytes(text: str | None) -> int | str | None:
    """Parse a size to bytes. Return `none` and None unchanged."""
    if text is None or text == _NONE:
        return text
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        fail(f"{text!r} is not a size: use bytes, or a number with MiB, GiB, ...", status=2)


def _show(infos: Sequence[NamespaceInfo], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([info.model_dump(mode="json") for info in infos], indent=2))
        return
    for info in infos:
        typer.echo(f"{info.namespace}: {_described(info.policy)}")


def _described(policy: NamespacePolicy) -> str:
    words = [policy.mode.value]
    if policy.trusted:
        words.append("trusted")
    if policy.anonymous_read:
        words.append("readable without a token")
    if policy.limit_bytes is not None:
        words.append(f"at most {format_bytes(policy.limit_bytes)}")
    if policy.max_artifact_bytes is not None:
        words.append(f"artifacts of at most {format_bytes(policy.max_artifact_bytes)}")
    if policy.requests_per_second is not None:
        words.append(f"{policy.requests_per_second:g} requests per second")
    return ", ".join(words)
