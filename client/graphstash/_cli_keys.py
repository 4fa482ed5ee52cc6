"""`graphstash keys`: the keys that sign artifacts, and those whose signatures count.

A team's way: `keys generate` where artifacts are made; `keys trust` the line that it prints, in a
file that every job gets. To rotate: generate and trust a new key beside the old, sign with the new
one, then revoke the old one.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphstash._config import ClientConfig, default_trusted_keys
from graphstash._errors import ConfigError
from graphstash._keys import SigningKey
from graphstash._trust import RevokedKey, TrustedKey, TrustedKeys
from graphstash_schema import InvalidValueError, NamespacePattern, SigningKeyId

__all__ = ["keys"]

keys = typer.Typer(
    help="Make the keys that sign artifacts, and say whose signatures count.",
    no_args_is_help=True,
)

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)

PrivateFile = Annotated[Path, typer.Argument(help="File of the private key")]
TrustFile = Annotated[
    Path | None,
    typer.Option(
        help="File of the trusted keys; without: GRAPHSTASH_TRUSTED_KEYS, or "
        "~/.config/graphstash/trusted_keys.json"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts")]


@keys.command()
def generate(path: PrivateFile, *, as_json: Json = False) -> None:
    """Make a key that signs; print what those who trust it need.

    Then publish with GRAPHSTASH_SIGNING_KEY=PATH. Nobody but its owner may read the file.
    """
    with _told():
        _show_key(path, SigningKey.generate(path), as_json=as_json)


@keys.command()
def show(path: PrivateFile, *, as_json: Json = False) -> None:
    """Print a private key's public half and its id."""
    with _told():
        _show_key(path, SigningKey.load(path), as_json=as_json)


@keys.command()
def trust(
    public: Annotated[str, typer.Argument(help="The public key, as `keys generate` prints it")],
    *,
    name: Annotated[str, typer.Option(help="Whose it is, for people")] = "",
    namespace: Annotated[
        list[str] | None,
        typer.Option(help="Where its signatures count, e.g. 'ci-*'; may be repeated [default: *]"),
    ] = None,
    not_after: Annotated[
        datetime | None, typer.Option(help="From then on (UTC) they count no more")
    ] = None,
    file: TrustFile = None,
    as_json: Json = False,
) -> None:
    """Let a key's signatures count. Once more for the same key: changes what was said of it."""
    with _told(), _changing(file) as (path, trusted):
        key = TrustedKey(
            public=public,
            name=name,
            namespaces=tuple(map(NamespacePattern, namespace or ["*"])),
            not_after=not_after.replace(tzinfo=UTC) if not_after else None,
        )
        if any(revoked.key_id == key.key_id for revoked in trusted.revoked):
            raise ConfigError(f"key {key.key_id} was revoked; {path} says why")
        others = tuple(each for each in trusted.keys if each.public != public)
        TrustedKeys(keys=(*others, key), revoked=trusted.revoked).write(path)
        _tell(f"trusted in {path}", {"file": str(path), **_described(key)}, as_json=as_json)


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id; see `keys list`")],
    *,
    reason: Annotated[str, typer.Option(help="Why, for people")],
    file: TrustFile = None,
    as_json: Json = False,
) -> None:
    """Let nothing that a key has ever signed be used again, whoever trusts it."""
    with _told(), _changing(file) as (path, trusted):
        revoked = RevokedKey(key_id=SigningKeyId(key_id), reason=reason, at=datetime.now(UTC))
        others = tuple(each for each in trusted.revoked if each.key_id != key_id)
        TrustedKeys(keys=trusted.keys, revoked=(*others, revoked)).write(path)
        told = {"file": str(path), **revoked.model_dump(mode="json")}
        _tell(f"revoked in {path}", told, as_json=as_json)


@keys.command(name="list")
def list_keys(*, file: TrustFile = None, as_json: Json = False) -> None:
    """Show whose signatures count, and whose not any more."""
    with _told():
        path = _file_of(file)
        trusted = TrustedKeys.read(path)
    if as_json:
        shown = {
            "file": str(path),
            "keys": [_described(key) for key in trusted.keys],
            "revoked": [key.model_dump(mode="json") for key in trusted.revoked],
        }
        typer.echo(json.dumps(shown, indent=2))
        return
    revoked = {key.key_id: key for key in trusted.revoked}
    table = Table("key", "name", "namespaces", "counts")
    for key in trusted.keys:
        table.add_row(
            key.key_id, escape(key.name), ", ".join(key.namespaces), _standing(key, revoked)
        )
    for lost in revoked.keys() - {key.key_id for key in trusted.keys}:
        table.add_row(lost, "", "", _revoked(revoked[lost]))
    _out.print(table)
    _out.print(escape(str(path)), soft_wrap=True)


def _standing(key: TrustedKey, revoked: dict[SigningKeyId, RevokedKey]) -> str:
    if key.key_id in revoked:
        return _revoked(revoked[key.key_id])
    if key.not_after is None:
        return "[green]yes[/green]"
    has_ended = key.not_after < datetime.now(UTC)
    return f"[{'red]ended' if has_ended else 'green]until'}[/] {key.not_after:%Y-%m-%d %H:%M %Z}"


def _revoked(key: RevokedKey) -> str:
    return f"[red]revoked[/red] {key.at:%Y-%m-%d}: {escape(key.reason)}"


def _show_key(path: Path, key: SigningKey, *, as_json: bool) -> None:
    told = {"path": str(path), "key_id": key.key_id, "public": key.public_text}
    _tell(f"graphstash keys trust {key.public_text} --name ...", told, as_json=as_json)


def _tell(sentence: str, told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    for name, value in told.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        if shown:
            _out.print(f"{name:10} {escape(str(shown))}", soft_wrap=True)
    _out.print(escape(sentence), soft_wrap=True)


def _described(key: TrustedKey) -> dict[str, Any]:
    return {"key_id": key.key_id, **key.model_dump(mode="json")}


def _file_of(file: Path | None) -> Path:
    return file or ClientConfig.load(signatures="off").trusted_keys or default_trusted_keys()


@contextmanager
def _changing(file: Path | None) -> Iterator[tuple[Path, TrustedKeys]]:
    """The file and what it says; two commands at once change it one after the other."""
    path = _file_of(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"trusted keys {path}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield path, TrustedKeys.read(path) if path.exists() else TrustedKeys()
    finally:
        os.close(folder)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = ".".join(map(str, first["loc"]))
        _fail(f"{what}: {first['msg']}")
    except (ConfigError, InvalidValueError) as error:
        _fail(str(error))


def _fail(message: str) -> None:
    _err.print(f"[red]graphstash:[/red] {escape(message)}", soft_wrap=True)
    raise typer.Exit(2)
