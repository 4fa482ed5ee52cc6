"""`graphstash token create|list|revoke`: who may use a server that asks for tokens."""

import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from typing import TYPE_CHECKING, Annotated

import typer

from graphstash_schema import Grant, InvalidValueError, TokenInfo, TokenRequest
from graphstash_server.actor import Actor
from graphstash_server.commands.running import fail, parse_age, run_with_services

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext

__all__ = ["token"]

token = typer.Typer(
    help="Make, list and revoke tokens. Run it with the settings of a server.",
    no_args_is_help=True,
    add_completion=False,
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@token.command()
def create(
    *,
    grant: Annotated[
        list[str],
        typer.Option(
            help="What its bearer may do: read, write or admin, a colon, and a namespace or a "
            "pattern, e.g. write:team-*. `admin:*` administers the server. May be repeated."
        ),
    ],
    description: Annotated[str, typer.Option(help="Who or what it is for.")],
    expires: Annotated[
        str | None,
        typer.Option(
            help="After how long, e.g. 90d, or on which day (UTC), e.g. 2027-01-01; never by "
            "default."
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Make a token, and print it: it is not stored and cannot be shown again.

    TOKEN=$(graphstash token create --grant 'write:team-*' --description "the nightly job")
    """
    request = _request(grant, description, expires)

    async def work(context: "ProcessContext") -> None:
        issued = await context.tokens.create(request, actor=Actor.local())
        if as_json:
            typer.echo(issued.model_dump_json(indent=2))
            return
        _explain(issued.info)
        typer.echo(issued.token)

    run_with_services(work)


@token.command("list")
def list_(*, as_json: _Json = False) -> None:
    """List all tokens, newest first; without their secrets, which nobody has."""

    async def work(context: "ProcessContext") -> None:
        listed = await context.tokens.list_all()
        if as_json:
            typer.echo(listed.model_dump_json(indent=2))
        else:
            _print_table(listed.tokens)

    run_with_services(work)


@token.command()
def revoke(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="As `token list` shows it, or the token itself.")
    ],
    *,
    as_json: _Json = False,
) -> None:
    """Revoke a token for good: within two seconds, no server takes it any more."""
    name = _id_of(token_id)

    async def work(context: "ProcessContext") -> None:
        info = await context.tokens.revoke(name, actor=Actor.local())
        if info is None:
            fail(f"there is no token {name}: see `graphstash token list`")
        if as_json:
            typer.echo(info.model_dump_json(indent=2))
        else:
            typer.echo(f"the token {info.id} is revoked")

    run_with_services(work)


def _id_of(text: str) -> str:
    """The id in a token that somebody gave whole, so that the secret is not shown again."""
    prefix, _, rest = text.partition("_")
    return rest.partition("_")[0] if prefix == "gst" else text


def _request(grants: Sequence[str], description: str, expires: str | None) -> TokenRequest:
    try:
        return TokenRequest(
            description=description,
            grants=tuple(map(Grant.parse, grants)),
            expires_at=_expiry(expires) if expires is not None else None,
        )
    except InvalidValueError as error:
        fail(str(error), status=2)
    except ValueError as error:  # pydantic's
        fail(f"--description={description!r}, {len(grants)} grants: {error}", status=2)


def _expiry(text: str) -> datetime:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        try:
            return datetime.now(UTC) + parse_age(text)
        except OverflowError:
            fail(f"--expires={text}: no calendar goes so far; leave it out for never", status=2)
    return datetime.combine(day, time(), tzinfo=UTC)


def _explain(info: TokenInfo) -> None:
    until = f"until {info.expires_at:%Y-%m-%d %H:%M} UTC" if info.expires_at else "for ever"
    print(  # noqa: T201
        f"token {info.id} may {', '.join(map(str, info.grants))} {until}; this is shown once, give "
        "it to jobs as GRAPHSTASH_TOKEN:",
        file=sys.stderr,
    )


def _print_table(tokens: Sequence[TokenInfo]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    table.add_column("id", no_wrap=True)
    for heading in ("description", "grants", "made", "last used", "state"):
        table.add_column(heading)
    for info in tokens:
        table.add_row(
            info.id,
            escape(info.description),
            escape("\n".join(map(str, info.grants))),
            f"{info.created_at:%Y-%m-%d} by {escape(info.created_by)}",
            f"{info.last_used_at:%Y-%m-%d %H:%M}" if info.last_used_at else "never",
            _state(info),
        )
    if tokens:
        Console().print(table)
    else:
        typer.echo(
            "no tokens; make one: graphstash token create --grant 'admin:*' --description admin"
        )


def _state(info: TokenInfo) -> str:
    if info.revoked_at is not None:
        return f"revoked {info.revoked_at:%Y-%m-%d}"
    if info.expires_at is None:
        return "good"
    word = "good until" if info.expires_at > datetime.now(UTC) else "expired"
    return f"{word} {info.expires_at:%Y-%m-%d}"
