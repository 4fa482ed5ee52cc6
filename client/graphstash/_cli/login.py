"""`graphstash login --oidc`: exchange the JWT of a CI system or a cluster for a token.

A JWT may expire within minutes and cannot be revoked. The token can last as long as the job, has at
most the JWT's rights, and an administrator can revoke it.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Annotated, Final

import typer
from pydantic import ValidationError
from rich.markup import escape

from graphstash._cli.output import Json, Url, fail, load_config, out, print_json
from graphstash._http.client import ServerClient
from graphstash._http.identity import jwt_from_github, read_jwt
from graphstash._replacing import replacing
from graphstash._rules import Secret
from graphstash.config import ClientConfig
from graphstash.errors import CacheError, ConfigError, Reason, RefusedError, TransportError
from graphstash_schema import (
    MIN_EXCHANGED_SECONDS,
    TOKEN_FORM,
    Grant,
    TokenExchange,
    TokenInfo,
    TokenIssued,
)
from graphstash_schema.exit_status import ExitStatus
from graphstash_schema.names import printable

__all__ = ["login"]

_EXPLANATIONS: Final = {
    401: "does not accept the JWT: it has expired, or its issuer, its audience or its claims fit "
    "no rule of the server (GRAPHSTASH_OIDC_*)",
    404: "is older than this command: let jobs use the JWT itself as their token",
}

_MAX_HOURS: Final = 24 * 365


def login(
    *,
    oidc: Annotated[bool, typer.Option("--oidc", help="Log in with a JWT (required).")] = False,
    audience: Annotated[
        str | None,
        typer.Option(
            help="Audience of the JWT that GitHub signs: the server's "
            "GRAPHSTASH_OIDC_AUDIENCE. A JWT in a file has its own."
        ),
    ] = None,
    jwt_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the JWT, such as a service-account token of Kubernetes; - is standard "
            "input. Default: a JWT from GitHub Actions."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File for the token. Default: GRAPHSTASH_TOKEN_FILE."),
    ] = None,
    grant: Annotated[
        list[str] | None,
        typer.Option(
            help="A grant of the token, e.g. `write:ci`; may be repeated. Default: all "
            "grants of the JWT."
        ),
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(help="Lifetime of the token; by default as long as the server allows."),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Exchange the JWT of a CI job or a pod for a token that lasts as long as the job.

    The token is written to the file that GRAPHSTASH_TOKEN_FILE names. Jobs read it from there, and
    read it again when a later login replaces it. Example:

        graphstash login --oidc --audience graphstash.internal --grant write:ci --hours 2
    """
    if not oidc:
        fail("--oidc is required: graphstash login --oidc", status=ExitStatus.USAGE)
    if hours is not None and not MIN_EXCHANGED_SECONDS / 3600 <= hours <= _MAX_HOURS:
        fail(
            f"--hours {hours:g}: expected from 1/60 (a minute) to {_MAX_HOURS} hours",
            status=ExitStatus.USAGE,
        )
    try:
        config = load_config(url=url, token_file=token_file)
        path = _place_of_token(config)
        request = TokenExchange(
            grants=tuple(map(Grant.parse, grant or ())),
            lifetime_seconds=round(hours * 3600) if hours is not None else None,
        )
        with _replacing(path) as file:  # check that the file is writable before a token exists
            issued = _exchange(config, _jwt(jwt_file, audience), request)
            file.write(issued.token + "\n")
    except ValidationError as error:
        fail(
            f"--grant, --hours: {error.errors(include_url=False)[0]['msg']}",
            status=ExitStatus.USAGE,
        )
    except CacheError as error:  # perhaps of GitHub, about which the doctor says nothing
        fail(str(error))
    _show(issued.info, config, as_json=as_json)


def _place_of_token(config: ClientConfig) -> Path:
    if not config.url:
        raise ConfigError("no server: set GRAPHSTASH_URL to the server that issues the token")
    if config.token is not None and "token" not in config.of_file:
        raise ConfigError("GRAPHSTASH_TOKEN is set, and jobs prefer it to a file: unset it")
    if config.token_file is None:
        raise ConfigError("set GRAPHSTASH_TOKEN_FILE to the file from which jobs read tokens")
    return config.token_file


def _jwt(file: Path | None, audience: str | None) -> str:
    if file is not None:
        return read_jwt(file)
    if audience is None:
        # Do not ask the server: it could name another service's audience and use the JWT there.
        raise ConfigError("set --audience to what the server requires (GRAPHSTASH_OIDC_AUDIENCE)")
    return jwt_from_github(audience)


def _exchange(config: ClientConfig, jwt: str, request: TokenExchange) -> TokenIssued:
    showing = dataclasses.replace(config, token=Secret(jwt))
    with closing(ServerClient(showing)) as server:
        try:
            issued = server.exchange(request)
        except RefusedError as error:
            if error.status not in _EXPLANATIONS:
                raise
            text = f"{config.url} {_EXPLANATIONS[error.status]}"
            raise RefusedError(text, code=error.code, status=error.status) from None
    if TOKEN_FORM.fullmatch(issued.token) is None:
        raise TransportError(Reason.PROTOCOL, f"{config.url} answered with something else")
    return issued


@contextmanager
def _replacing(path: Path) -> Iterator[IO[str]]:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            yield file
    except OSError as error:
        raise ConfigError(f"GRAPHSTASH_TOKEN_FILE={path}: {error.strerror}") from None


def _show(info: TokenInfo, config: ClientConfig, *, as_json: bool) -> None:
    if as_json:
        print_json(info.model_dump(mode="json") | {"file": str(config.token_file)})
        return
    grants = ", ".join(map(str, info.grants))
    until = f" until {info.expires_at:%Y-%m-%d %H:%M} UTC" if info.expires_at else ""
    who = printable(info.description, most=200)
    token = printable(info.id, most=40)
    text = f"logged in to {config.url} as {who} ({grants}){until}; token {token}"
    out.print(escape(f"{text} is in {config.token_file}"), soft_wrap=True)
