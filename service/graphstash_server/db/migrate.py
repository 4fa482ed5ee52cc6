"""Migration: brings the database to the newest revision before the server uses it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config

from graphstash_server.errors import StartError

__all__ = ["alembic_config", "migrate"]

_PACKAGE = Path(__file__).resolve().parents[1]


def migrate(url: str, *, lock_path: Path) -> None:
    """Upgrades to the newest revision. Blocks; run it in a thread without an event loop.

    Servers that start at the same time on one data directory take turns: the second one finds
    nothing left to do.
    """
    with _locked(lock_path):
        command.upgrade(alembic_config(url), "head")


def alembic_config(url: str) -> Config:
    """The configuration of alembic for one database.

    Raises:
        StartError: when the revisions are neither in the package nor beside it.
    """
    config = Config()
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    config.attributes["url"] = url
    return config


def _scripts() -> Path:
    """The revisions: inside an installed package, or in the root of a checkout."""
    for directory in (_PACKAGE / "_migrations", _PACKAGE.parents[1] / "migrations"):
        if (directory / "env.py").is_file():
            return directory
    raise StartError(f"the database revisions are missing beside {_PACKAGE}: install again")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
