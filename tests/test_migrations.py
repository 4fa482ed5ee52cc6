"""The revisions of the database: up from nothing, like the tables, down again, and up again."""

import sqlite3
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config

from graphstash_server.db.migrate import alembic_config, migrate
from graphstash_server.db.tables import metadata


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "a directory" / "100% of it.sqlite3"


@pytest.fixture
def config(database: Path) -> Config:
    database.parent.mkdir()
    return alembic_config(f"sqlite+aiosqlite:///{database}")


def tables(database: Path) -> set[str]:
    connection = sqlite3.connect(database)
    found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    return {name for name in found if not name.startswith(("ix_", "sqlite_"))}


def test_an_empty_database_gets_every_table_and_loses_them_again(config, database):
    command.upgrade(config, "head")
    assert tables(database) == {*metadata.tables, "alembic_version"}

    command.downgrade(config, "base")
    assert tables(database) == {"alembic_version"}

    command.upgrade(config, "head")
    assert tables(database) == {*metadata.tables, "alembic_version"}


def test_the_revisions_and_the_tables_say_the_same(config):
    command.upgrade(config, "head")

    command.check(config)


def test_migrating_twice_changes_nothing(config, database, tmp_path):
    url = f"sqlite+aiosqlite:///{database}"

    migrate(url, lock_path=tmp_path / "lock")
    migrate(url, lock_path=tmp_path / "lock")

    assert tables(database) == {*metadata.tables, "alembic_version"}


def test_revisions_do_not_import_the_product():
    versions = Path(__file__).parents[1] / "migrations" / "versions"

    for revision in versions.glob("*.py"):
        assert "graphstash" not in revision.read_text()
