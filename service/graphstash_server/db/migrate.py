"""Migration: upgrade the database to the newest revision, or check its revision.

Revisions remove and rename nothing, so servers of the previous release keep working on a migrated
database. This makes a rolling upgrade possible.
"""

import asyncio
import fcntl
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from graphstash_server.db.corruption import advice_for, corruption_in
from graphstash_server.db.engine import LOCK_NOT_AVAILABLE, make_engine
from graphstash_server.db.tables import metadata
from graphstash_server.errors import StartError
from graphstash_server.file_locks import wait_for_lock

__all__ = [
    "IDLE_SECONDS",
    "LOCK_SECONDS",
    "alembic_config",
    "check_revision",
    "find_revision",
    "is_of_later_release",
    "map_database_errors",
    "migrate",
    "newest_revision",
]

_LOGGER = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]

LOCK_SECONDS = 60
"""Seconds that a migration waits for one lock of PostgreSQL. Requests of other servers queue behind
such a wait."""

IDLE_SECONDS = 60
"""Seconds for which a migration may be idle between two statements while another server waits."""

_READ_SECONDS = 20.0
"""Maximum seconds to connect and to read the revision."""

_ATTEMPTS = 5
_DEADLOCK = "40P01"


def migrate(url: str, *, lock_path: Path) -> None:
    """Upgrade to the newest revision, unless the database is at one of a later release.

    Servers that start at the same time take turns. Blocks; run it in a thread without an event
    loop.

    Raises:
        StartError: the database cannot be reached or used.
    """
    with _locked(lock_path), map_database_errors(url):
        found = asyncio.run(find_revision(url))
        if found != newest_revision() and not is_of_later_release(found):
            _upgrade(url)


def check_revision(url: str, *, lock_path: Path) -> None:
    """Check that the database is at the newest revision, or at one of a later release.

    Creates no database file. Blocks; run it in a thread without an event loop.

    Raises:
        StartError: the revision is older, or the database cannot be reached or used.
    """
    parsed = make_url(url)
    is_file = parsed.get_backend_name() == "sqlite"
    with _locked(lock_path):
        exists = not is_file or Path(parsed.database or "").exists()
        found = asyncio.run(find_revision(url)) if exists else None
    newest = newest_revision()
    if found != newest and not is_of_later_release(found):
        raise StartError(
            f"the database is at revision {found or 'none'} and this release needs {newest}: run "
            "`graphstash migrate`, or set GRAPHSTASH_AUTO_MIGRATE=true"
        )


async def find_revision(url: str) -> str | None:
    """Return the revision of a database, or None if it was never migrated.

    Creates the file of a new SQLite database. Two processes must not do that at the same time.

    Raises:
        StartError: the database cannot be reached or used, or it is of another program.
    """

    def read(connection: Connection) -> str | None:
        names = set(inspect(connection).get_table_names()) - _tables_of_extensions(connection)
        if (tables := names - {"alembic_version"}) and not tables & metadata.tables.keys():
            raise StartError(
                f"the database {shown} is of another program: it has the table {min(tables)} "
                "and none of graphstash; name an empty database"
            )
        if "alembic_version" not in names:
            return None
        found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
        return None if found is None else str(found)

    shown = make_url(url).render_as_string(hide_password=True)
    engine = make_engine(make_url(url))
    try:
        async with asyncio.timeout(_READ_SECONDS):
            with map_database_errors(url):
                async with engine.connect() as connection:
                    return await connection.run_sync(read)
    except TimeoutError:
        raise StartError(
            f"the database {shown} has not answered for {_READ_SECONDS:g} s: is it frozen, or does "
            "a transaction lock the table alembic_version?"
        ) from None
    finally:
        await engine.dispose()


def _tables_of_extensions(connection: Connection) -> set[str]:
    """Return the tables that PostgreSQL's extensions, such as PostGIS, put into every database."""
    if connection.dialect.name != "postgresql":
        return set()
    found = connection.execute(
        text(
            "SELECT relname FROM pg_class JOIN pg_depend ON pg_depend.objid = pg_class.oid "
            "WHERE pg_depend.classid = 'pg_class'::regclass AND pg_depend.deptype = 'e'"
        )
    )
    return set(found.scalars())


def newest_revision() -> str:
    """Return the newest revision of this release."""
    return _revisions()[0]


@functools.cache
def _revisions() -> tuple[str, ...]:
    """Return the revisions of this release, from the newest to the oldest."""
    scripts = ScriptDirectory.from_config(alembic_config(""))
    return tuple(script.revision for script in scripts.walk_revisions())


def alembic_config(url: str) -> Config:
    """Return alembic's configuration for one database.

    Raises:
        StartError: the revisions are missing from this installation.
    """
    config = Config()
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    config.attributes["url"] = url
    return config


def _upgrade(url: str) -> None:
    """Upgrade, and retry after a deadlock with a starting server of an earlier release.

    The earlier release waits for the migration lock inside a transaction. CREATE INDEX CONCURRENTLY
    waits for that transaction. PostgreSQL aborts one of the two. If PostgreSQL aborts the upgrade,
    the lock is released and the other server continues.

    Raises:
        StartError: another transaction has kept a lock for longer than `LOCK_SECONDS`.
    """
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            command.upgrade(alembic_config(url), "head")
        except DBAPIError as error:
            sqlstate = getattr(error.orig, "sqlstate", None)
            if sqlstate == LOCK_NOT_AVAILABLE:
                raise StartError(
                    "the migration of the database has waited too long for another transaction "
                    "(the warning above names it): end that transaction, or start again after it"
                ) from error
            if not attempts_left or sqlstate != _DEADLOCK:
                raise
            _LOGGER.warning("another server that starts was in the way of the migration: retrying")
        else:
            return


def is_of_later_release(revision: str | None) -> bool:
    """Return whether a database is at a revision that this release does not have."""
    if revision is None or revision in _revisions():
        return False
    _LOGGER.warning("the database is at revision %s, later than this release's", revision)
    return True


def _scripts() -> Path:
    """Return the directory of the revisions, in an installed package or a checkout."""
    for directory in (_PACKAGE / "_migrations", _PACKAGE.parents[1] / "migrations"):
        if (directory / "env.py").is_file():
            return directory
    raise StartError(f"the database revisions are missing in {_PACKAGE}: reinstall graphstash")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        wait_for_lock(file.fileno(), fcntl.LOCK_EX, path=path)
        yield


@contextmanager
def map_database_errors(url: str) -> Iterator[None]:
    """Turn errors of a database or its driver into a `StartError`."""
    shown = make_url(url).render_as_string(hide_password=True)
    try:
        yield
    except ModuleNotFoundError as error:
        raise StartError(
            f"the database {shown} needs {error.name}: "
            "pip install 'graphstash[server,postgres] @ git+<repository>'"
        ) from error
    except (OSError, TypeError, SQLAlchemyError) as error:
        if (reason := corruption_in(error)) is not None:
            raise StartError(advice_for(reason)) from error
        raise StartError(f"cannot use the database {shown}: {_first_line(error)}") from error
    except Exception as error:
        if type(error).__module__.startswith("asyncpg"):
            raise StartError(f"cannot use the database {shown}: {_first_line(error)}") from error
        raise


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
