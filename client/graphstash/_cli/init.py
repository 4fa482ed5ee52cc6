"""`graphstash init`: ask for the server, test it, and store its address and token for all jobs."""

import dataclasses
import os
import sys
from collections.abc import Iterable
from typing import Annotated, Any, Final, TypeVar

import typer

from graphstash._cli.doctor.access import check_access
from graphstash._cli.doctor.command import doctor, show
from graphstash._cli.doctor.findings import Finding, State, Topic
from graphstash._cli.doctor.server import check_server
from graphstash._cli.output import fail, say
from graphstash._user_file import read_user_file, user_file_path, write_user_file
from graphstash.config import ClientConfig
from graphstash.errors import ConfigError
from graphstash_schema.exit_status import ExitStatus

__all__ = ["init"]

_T = TypeVar("_T")

_REPLACED: Final = {
    *("GRAPHSTASH_URL", "GRAPHSTASH_TOKEN", "GRAPHSTASH_TOKEN_FILE"),
    *("HOME", "XDG_CONFIG_HOME"),  # they locate the file that this command writes
}
"""Variables that the tests of the answers ignore, because jobs may not have them."""


def init(
    url: Annotated[
        str | None,
        typer.Argument(help="Address of the server, e.g. `https://cache.internal`.", metavar="URL"),
    ] = None,
) -> None:
    """Store the server's address and a token for all jobs of this user.

    Asks for both, tests them, and writes them to `~/.config/graphstash/config.toml`, which only
    this user can read. Options and GRAPHSTASH_* variables take precedence over this file. A token
    of the file goes only to the address of the file. The doctor runs at the end.
    """
    path = user_file_path(os.environ)
    if path is None:
        fail("there is no home directory: set XDG_CONFIG_HOME", status=ExitStatus.USAGE)
    config = _choose_server(url)
    token = _choose_token(config)
    values = {"url": config.url} | ({"token": token} if token else {})
    try:
        write_user_file(path, values)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}")
    say(f"\nstored in {path}, which only you can read")
    say("CI and containers do not have this file. Give them these variables:\n")
    say(f"    GRAPHSTASH_URL={config.url}")
    say(
        f"    GRAPHSTASH_TOKEN={'<the token, as a secret>' if token else '<none is needed here>'}\n"
    )
    doctor(url=None, namespace=None, probe=False, as_json=False)


def _choose_server(url: str | None) -> ClientConfig:
    """Return the settings of a server that answers. On a terminal, ask until one answers."""
    usual = read_user_file(os.environ).values.get("url")
    while True:
        config = None
        try:
            config = _config(url or _ask("Address of the server", default=usual))
        except ConfigError as error:
            text = str(error).removeprefix("GRAPHSTASH_URL=")
            if url is not None:
                fail(text, status=ExitStatus.USAGE)
            say(text)
        if config is not None and config.url:
            findings, is_reached = _all(check_server(config))
            if is_reached:
                return config
            _show_failures(findings)
        _end_unless_asked_again(url)


def _choose_token(config: ClientConfig) -> str:
    """Return a token that the server accepts, or "" if it requires none."""
    findings, _ = _all(check_access(config))
    if all(each.state is State.OK for each in findings):
        return ""
    while True:
        token = _ask("Token", hide_input=True).strip()
        try:
            findings, _ = _all(check_access(_config(config.url, token)))
        except ConfigError as error:
            say(str(error).removeprefix("GRAPHSTASH_TOKEN='***': "))
        else:
            if not _show_failures(each for each in findings if each.name == "token"):
                return token
        _end_unless_asked_again(None)


def _ask(what: str, **options: Any) -> str:
    try:
        return str(typer.prompt(what, **options))
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        say("")
        fail(
            "no terminal can answer: pass the address (`graphstash init URL`). If the server needs "
            "a token, set GRAPHSTASH_URL and GRAPHSTASH_TOKEN for your jobs instead",
            status=ExitStatus.USAGE,
        )


def _config(url: str, token: str | None = None) -> ClientConfig:
    """Return a job's settings: these answers, and the other variables of this environment."""
    environ = {name: value for name, value in os.environ.items() if name not in _REPLACED}
    config = ClientConfig.load(environ, url=url, token=token)
    return dataclasses.replace(config, of_file=frozenset({"url", "token"}))


def _all(topic: Topic[_T]) -> tuple[list[Finding], _T]:
    """Run a topic. Return its findings and its result."""
    findings = []
    try:
        while True:
            findings.append(next(topic))
    except StopIteration as end:
        return findings, end.value


def _show_failures(findings: Iterable[Finding]) -> bool:
    """Print the failed checks. Return whether there are any."""
    failures = [each for each in findings if each.state is State.FAIL]
    for each in failures:
        show(each)
    return bool(failures)


def _end_unless_asked_again(given: str | None) -> None:
    if given is not None or not sys.stdin.isatty():
        fail("nothing was stored")
