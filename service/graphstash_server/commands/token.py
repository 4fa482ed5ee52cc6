"""`graphstash token create|list|revoke`: manage tokens for a server that requires them."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from typing import TYPE_CHECKING, Annotated

import typer

from graphstash_schema import Grant, InvalidValueError, TokenInfo, TokenRequest
from graphstash_server.actor import Actor
from graphstash_server.commands.running import (
    Json,
    fail,
    parse_age,
    print_table,
    run_with_services,
)

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext

__all__ = ["token"]

token = typer.Typer(
    help="Create, list and revoke tokens. Run it on a host of the server, with its `GRAPHSTASH_*` "
    "variables.",
    no_args_is_help=True,
    add_completion=False,
)


@token.command()
def create(
    *,
    grant: Annotated[
        list[str],
        typer.Option(
            help="A grant, as `<scope>:<namespace or pattern>`, e.g. `write:team-*`; scope is "
            "read, write or admin. `admin:*` administers the server. May be repeated."
        ),
    ],
    description: Annotated[str, typer.Option(help="Purpose or owner of the token.")],
    expires: Annotated[
        str | None,
        typer.Option(help="Lifetime (90d) or date in UTC (2027-01-01). Never expires by default."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a token and print it. The server stores only a hash, so it cannot be shown again.

    TOKEN=$(graphstash token create --grant 'write:team-*' --description "the nightly job")
    """
    request = _request(grant, description, expires)

    async def work(context: "ProcessContext") -> None:
        issued = await context.tokens.create(request, actor=Actor.local())
        if as_json:
            typer.echo(issued.model_dump_json(indent=2))
            return
        info = issued.info
        expiry = f"expires {info.expires_at:%Y-%m-%d %H:%M} UTC" if info.expires_at else "no expiry"
        typer.echo(
            f"Created token {info.id} ({', '.join(map(str, info.grants))}; {expiry}). It is shown "
            "only once; set it as GRAPHSTASH_TOKEN:",
            err=True,
        )
        typer.echo(issued.token)

    run_with_services(work)


@token.command("list")
def list_(*, as_json: Json = False) -> None:
    """List all tokens, newest first, without secrets."""

    async def work(context: "ProcessContext") -> None:
        listed = await context.tokens.list_all()
        if as_json:
            typer.echo(listed.model_dump_json(indent=2))
        else:
            _print(listed.tokens)

    run_with_services(work)


@token.command()
def revoke(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="As shown by `token list`, or the token itself.")
    ],
    *,
    as_json: Json = False,
) -> None:
    """Revoke a token permanently. Every server refuses it within two seconds."""
    name = _id_of(token_id)

    async def work(context: "ProcessContext") -> None:
        info = await context.tokens.revoke(name, actor=Actor.local())
        if info is None:
            fail(f"there is no token {name}: see `graphstash token list`")
        if as_json:
            typer.echo(info.model_dump_json(indent=2))
        else:
            typer.echo(f"token {info.id} is revoked")

    run_with_services(work)


def _id_of(text: str) -> str:
    """Return the ID from an ID or a whole token, so that messages never contain the secret."""
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
    except ValueError as error:  # a ValidationError of pydantic
        fail(f"--description={description!r}, {len(grants)} grants: {error}", status=2)


def _expiry(text: str) -> datetime:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        return datetime.now(UTC) + parse_age(text)
    return datetime.combine(day, time(), tzinfo=UTC)


def _print(tokens: Sequence[TokenInfo]) -> None:
    if not tokens:
        typer.echo(
            "no tokens; create one: graphstash token create --grant 'admin:*' --description admin"
        )
        return
    print_table(
        ("id", "description", "grants", "created", "last used", "state"),
        (
            (
                info.id,
                info.description,
                ", ".join(map(str, info.grants)),
                f"{info.created_at:%Y-%m-%d} by {info.created_by}",
                f"{info.last_used_at:%Y-%m-%d %H:%M}" if info.last_used_at else "never",
                _state(info),
            )
            for info in tokens
        ),
    )


def _state(info: TokenInfo) -> str:
    if info.revoked_at is not None:
        return f"revoked {info.revoked_at:%Y-%m-%d}"
    if info.expires_at is None:
        return "valid"
    word = "valid until" if info.expires_at > datetime.now(UTC) else "expired"
    return f"{word} {info.expires_at:%Y-%m-%d}"
