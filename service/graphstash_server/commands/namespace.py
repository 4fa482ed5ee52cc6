"""`graphstash namespace list|show|set|remove`: the policies of namespaces."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from graphstash_schema import (
    InvalidValueError,
    Namespace,
    NamespaceInfo,
    NamespacePolicy,
    WriteMode,
)
from graphstash_server.commands.running import fail, run_with_services, size_of

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext

__all__ = ["namespace"]

namespace = typer.Typer(
    help="Say who may write into a namespace, how much, and what stays as it is. Run it with the "
    "settings of a server; the servers know within two seconds.",
    no_args_is_help=True,
)

_NONE = "none"

_Name = Annotated[str, typer.Argument(help="The namespace.")]
_Json = Annotated[bool, typer.Option("--json", help="JSON, for scripts.")]


@namespace.command("list")
def list_(*, as_json: _Json = False) -> None:
    """List the namespaces that have a policy of their own."""

    async def work(context: "ProcessContext") -> None:
        _show(await context.policies.list_all(), as_json=as_json)

    run_with_services(work)


@namespace.command()
def show(name: _Name, *, as_json: _Json = False) -> None:
    """Show the policy of one namespace."""
    where = _parse(name)

    async def work(context: "ProcessContext") -> None:
        info = await context.policies.find(where)
        if info is None:
            fail(f"the namespace {where} has no policy of its own: the defaults hold")
        _show([info], as_json=as_json)

    run_with_services(work)


@namespace.command("set")
def set_(
    name: _Name,
    *,
    mode: Annotated[
        WriteMode | None,
        typer.Option(
            help="read_only: nothing is written. write_once: the first artifact of a key stays. "
            "overwrite: the last one does."
        ),
    ] = None,
    trusted: Annotated[
        bool | None,
        typer.Option(help="Whether only a token whose grant names it without * may write here."),
    ] = None,
    anonymous_read: Annotated[
        bool | None, typer.Option(help="Whether everybody may read without a token.")
    ] = None,
    limit: Annotated[
        str | None, typer.Option(help="Most bytes of all its artifacts, e.g. 10GiB, or none.")
    ] = None,
    max_artifact: Annotated[
        str | None, typer.Option(help="Most bytes of one artifact, e.g. 1GiB, or none.")
    ] = None,
    requests_per_second: Annotated[
        str | None,
        typer.Option(help="Most requests a second, of each server process, e.g. 100, or none."),
    ] = None,
) -> None:
    """Change the policy of a namespace; what is not named stays as it is."""
    where = _parse(name)
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
        fail("nothing to change: name at least one option, see --help", status=2)

    async def work(context: "ProcessContext") -> None:
        from graphstash_server.actor import Actor

        known = await context.policies.find(where)
        before = known.policy if known is not None else NamespacePolicy()
        try:
            policy = NamespacePolicy.model_validate(before.model_dump() | changes)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            fail(f"{first['loc'][0]}={first['input']} is not valid: {first['msg']}", status=2)
        _show([await context.policies.put(where, policy, Actor.local())], as_json=False)

    run_with_services(work)


@namespace.command()
def remove(name: _Name) -> None:
    """Take a namespace's policy away: the defaults hold. Its artifacts stay."""
    where = _parse(name)

    async def work(context: "ProcessContext") -> None:
        from graphstash_server.actor import Actor

        if not await context.policies.remove(where, Actor.local()):
            fail(f"the namespace {where} has no policy of its own")
        typer.echo(f"{where}: the defaults hold")

    run_with_services(work)


def _parse(name: str) -> Namespace:
    try:
        return Namespace(name)
    except InvalidValueError as error:
        fail(str(error), status=2)


def _bytes(text: str | None) -> int | str | None:
    """A size in bytes; `none` and nothing stay what they are."""
    if text is None or text == _NONE:
        return text
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        fail(f"{text!r} is no size: it takes bytes, or a number with MiB, GiB, ...", status=2)


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
        words.append("everybody reads")
    if policy.limit_bytes is not None:
        words.append(f"at most {size_of(policy.limit_bytes)}")
    if policy.max_artifact_bytes is not None:
        words.append(f"artifacts of at most {size_of(policy.max_artifact_bytes)}")
    if policy.requests_per_second is not None:
        words.append(f"{policy.requests_per_second:g} requests a second")
    return ", ".join(words)
