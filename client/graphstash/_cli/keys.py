"""`graphstash keys`: manage signing keys and the file of trusted keys.

Run `keys generate` on the host that compiles artifacts. It prints a `keys trust` command, which
adds the public key to a trusted-keys file that every job reads. To rotate keys, trust a new key in
addition to the old key, sign with the new key, then revoke the old key. Jobs then reject all
artifacts that the old key has signed.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.markup import escape
from typer.core import TyperCommand

from graphstash._cli.output import Json, fail, out, print_json, print_table
from graphstash._trust.signing_keys import SigningKey
from graphstash._trust.trusted_keys import RevokedKey, TrustedKey, TrustedKeys
from graphstash.config import ClientConfig
from graphstash.errors import ConfigError
from graphstash_schema import NamespacePattern, SigningKeyId
from graphstash_schema.exit_status import ExitStatus
from graphstash_schema.model import first_error

__all__ = ["keys"]

keys = typer.Typer(
    help="Manage signing keys and the list of trusted keys.",
    no_args_is_help=True,
)

PrivateFile = Annotated[Path, typer.Argument(help="File of the private key.")]
TrustFile = Annotated[
    Path | None,
    typer.Option(
        help="Trusted-keys file. [default: GRAPHSTASH_TRUSTED_KEYS]",
    ),
]


@keys.command()
def generate(path: PrivateFile, *, as_json: Json = False) -> None:
    """Generate a signing key, and print the command that trusts it.

    Then publish with GRAPHSTASH_SIGNING_KEY=PATH. The command creates the file with mode 600. Jobs
    refuse it if other users can access it.
    """
    with _report_errors():
        _show_key(path, SigningKey.generate(path), as_json=as_json)


@keys.command()
def show(path: PrivateFile, *, as_json: Json = False) -> None:
    """Print the public key and the id of a private key."""
    with _report_errors():
        _show_key(path, SigningKey.load(path), as_json=as_json)


class _TakesPublicKey(TyperCommand):
    """Accepts a public key that begins with a dash, as one in 64 does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        dashed = [each for each in args if re.fullmatch(r"-[A-Za-z0-9_-]{42}", each)]
        if dashed and "--" not in args:
            args = [*(each for each in args if each not in dashed), "--", *dashed]
        return super().parse_args(ctx, args)


@keys.command(cls=_TakesPublicKey)
def trust(
    public: Annotated[str, typer.Argument(help="The public key, as `keys generate` prints it.")],
    *,
    name: Annotated[str, typer.Option(help="Name of the key, for people.")] = "",
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            help="Namespaces in which to trust it, e.g. 'ci-*'; may be repeated. [default: *]"
        ),
    ] = None,
    not_after: Annotated[
        datetime | None,
        typer.Option(
            help="Expiry (UTC). After it, jobs reject all signatures of the key, old and new."
        ),
    ] = None,
    file: TrustFile = None,
    as_json: Json = False,
) -> None:
    """Trust a key.

    To change the name, namespaces or expiry of a key, run the command again with all options.
    Options that you omit get their defaults.
    """
    with _report_errors(), _locked(file) as (path, trusted):
        key = TrustedKey(
            public=public,
            name=name,
            namespaces=tuple(map(NamespacePattern, namespace or ["*"])),
            not_after=not_after.replace(tzinfo=UTC) if not_after else None,
        )
        if any(revoked.key_id == key.key_id for revoked in trusted.revoked):
            raise ConfigError(f"key {key.key_id} was revoked; see the reason in {path}")
        others = tuple(each for each in trusted.keys if each.public != public)
        TrustedKeys(keys=(*others, key), revoked=trusted.revoked).write(path)
        _print(f"trusted in {path}", {"file": str(path), **_fields_of(key)}, as_json=as_json)


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id; see `keys list`.")],
    *,
    reason: Annotated[str, typer.Option(help="Reason, for people.")],
    file: TrustFile = None,
    as_json: Json = False,
) -> None:
    """Revoke a key. Jobs reject everything that it has signed."""
    with _report_errors(), _locked(file) as (path, trusted):
        revoked = RevokedKey(key_id=SigningKeyId(key_id), reason=reason, at=datetime.now(UTC))
        others = tuple(each for each in trusted.revoked if each.key_id != key_id)
        TrustedKeys(keys=trusted.keys, revoked=(*others, revoked)).write(path)
        fields = {"file": str(path), **revoked.model_dump(mode="json")}
        _print(f"revoked in {path}", fields, as_json=as_json)


@keys.command(name="list")
def list_keys(*, file: TrustFile = None, as_json: Json = False) -> None:
    """List trusted and revoked keys."""
    with _report_errors():
        path = _file_of(file)
        trusted = TrustedKeys.read(path)
    if as_json:
        shown = {
            "file": str(path),
            "keys": [_fields_of(key) for key in trusted.keys],
            "revoked": [key.model_dump(mode="json") for key in trusted.revoked],
        }
        print_json(shown)
        return
    revoked = {key.key_id: key for key in trusted.revoked}
    rows = [
        (key.key_id, key.name, ", ".join(key.namespaces), _status_of(key, revoked))
        for key in trusted.keys
    ]
    others = revoked.keys() - {key.key_id for key in trusted.keys}
    rows += [(key_id, "", "", _revoked(revoked[key_id])) for key_id in others]
    print_table(("key", "name", "namespaces", "accepted"), rows, flexible=1)
    out.print(escape(str(path)), soft_wrap=True)


def _status_of(key: TrustedKey, revoked: dict[SigningKeyId, RevokedKey]) -> str:
    if key.key_id in revoked:
        return _revoked(revoked[key.key_id])
    if key.not_after is None:
        return "yes"
    has_ended = key.not_after < datetime.now(UTC)
    return f"{'ended' if has_ended else 'until'} {key.not_after:%Y-%m-%d %H:%M %Z}"


def _revoked(key: RevokedKey) -> str:
    return f"revoked {key.at:%Y-%m-%d}: {key.reason}"


def _show_key(path: Path, key: SigningKey, *, as_json: bool) -> None:
    fields = {"path": str(path), "key_id": key.key_id, "public": key.public_text}
    _print(f"graphstash keys trust {key.public_text} --name ...", fields, as_json=as_json)


def _print(sentence: str, fields: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(fields)
        return
    for name, value in fields.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        if shown:
            out.print(f"{name:10} {escape(str(shown))}", soft_wrap=True)
    out.print(escape(sentence), soft_wrap=True)


def _fields_of(key: TrustedKey) -> dict[str, Any]:
    return {"key_id": key.key_id, **key.model_dump(mode="json")}


def _file_of(file: Path | None) -> Path:
    path = file or ClientConfig.load(signatures="off").trusted_keys
    if path is None:
        raise ConfigError(
            "no trusted-keys file: set GRAPHSTASH_TRUSTED_KEYS, which jobs also read, or pass "
            "--file"
        )
    return path


@contextmanager
def _locked(file: Path | None) -> Iterator[tuple[Path, TrustedKeys]]:
    """Lock the file's folder, because `write` replaces the file. Yield its path and content."""
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
def _report_errors() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        fail(first_error(error, whole="the key"), status=ExitStatus.USAGE)
