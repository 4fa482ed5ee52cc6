"""Prepared: a statement of SQLAlchemy Core that is built and compiled once for each database.

Building, hashing and compiling a statement anew takes longer than the database needs for it. What
every request asks is prepared instead: Core writes its SQL and says how values are converted, from
the same tables as everywhere, and the driver runs it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol, TypeAlias

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Executable,
    String,
    Text,
    TypeDecorator,
    any_,
    bindparam,
    func,
    select,
)
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.dialects.sqlite.aiosqlite import SQLiteDialect_aiosqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.types import TypeEngine

from graphstash_server.db.sqlite import SqliteTransaction

__all__ = [
    "NOTHING",
    "Compiled",
    "Connection",
    "Parameters",
    "Prepared",
    "Reader",
    "Row",
    "Source",
    "is_one_of",
]

Row: TypeAlias = Sequence[Any]
"""The columns of one row, in the order in which the statement names them."""

Parameters: TypeAlias = Mapping[str, Any]

NOTHING: Final[Parameters] = {}

Connection: TypeAlias = AsyncConnection | SqliteTransaction
"""What a transaction is run on: SQLAlchemy's connection, or SQLite's own in its thread."""

_DIALECTS: Final[dict[str, Dialect]] = {
    "postgresql": PGDialect_asyncpg(),  # type: ignore[no-untyped-call]
    "sqlite": SQLiteDialect_aiosqlite(),
}

_Convert: TypeAlias = Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A statement as the driver of one database takes it."""

    sql: str
    parameters: tuple[tuple[str, _Convert], ...]
    constants: Parameters
    columns: tuple[_Convert, ...]

    def bind(self, given: Parameters) -> tuple[Any, ...]:
        """The values in the order of the placeholders, as the driver takes them."""
        values = {**self.constants, **given} if self.constants else given
        return tuple(
            [
                convert(values[name]) if convert else values[name]
                for name, convert in self.parameters
            ]
        )

    def rows(self, found: Sequence[Row]) -> Sequence[Row]:
        """Rows of the driver with the values that Core's types say."""
        if not any(self.columns):
            return found
        return [
            tuple([convert(value) if convert else value for convert, value in pairs])
            for pairs in (zip(self.columns, row, strict=True) for row in found)
        ]


class Reader(Protocol):
    """Runs one statement by itself: `db.engine.Database`."""

    async def fetch(self, statement: "Prepared", given: Parameters, /) -> Sequence[Row]:
        """The rows of a statement."""


Source: TypeAlias = Connection | Reader
"""Where rows can be read: inside a transaction, or outside of any."""


class Prepared:
    """A statement that is built when it is first needed, once for each database."""

    def __init__(self, build: Callable[[str], Executable], *, finds_one: bool = False) -> None:
        """Takes what builds the statement for a dialect, "sqlite" or "postgresql", and whether it
        finds one row at most, by an index: then SQLite needs no thread for it.
        """
        self._build = build
        self.finds_one = finds_one
        self._statements: dict[str, Executable] = {}

    @cached_property
    def sqlite(self) -> Compiled:
        """As the driver of SQLite takes it."""
        return _compiled(self.statement("sqlite"), _DIALECTS["sqlite"])

    @cached_property
    def postgresql(self) -> Compiled:
        """As the driver of PostgreSQL takes it."""
        return _compiled(self.statement("postgresql"), _DIALECTS["postgresql"])

    def statement(self, dialect: str) -> Executable:
        """The statement itself, for SQLAlchemy's connections."""
        if dialect not in self._statements:
            self._statements[dialect] = self._build(dialect)
        return self._statements[dialect]

    async def fetch(self, source: Source, given: Parameters) -> Sequence[Row]:
        """Its rows, inside a transaction or by itself."""
        if isinstance(source, SqliteTransaction):
            compiled = self.sqlite
            return compiled.rows(source.fetch(compiled.sql, compiled.bind(given)))
        if isinstance(source, AsyncConnection):
            return (await source.execute(self.statement(source.dialect.name), given)).all()
        return await source.fetch(self, given)

    async def fetch_one(self, source: Source, given: Parameters) -> Row | None:
        """The only row of what has at most one; None when there is none."""
        found = await self.fetch(source, given)
        return found[0] if found else None

    async def execute(self, connection: Connection, given: Parameters) -> int:
        """Runs it inside a transaction, and returns how many rows it changed."""
        if isinstance(connection, SqliteTransaction):
            compiled = self.sqlite
            return connection.execute(compiled.sql, compiled.bind(given))
        statement = self.statement(connection.dialect.name)
        return (await connection.execute(statement, given)).rowcount

    async def execute_all(self, connection: Connection, given: Sequence[Parameters]) -> None:
        """Runs it inside a transaction, once for each of many parameters."""
        if isinstance(connection, SqliteTransaction):
            compiled = self.sqlite
            connection.execute_all(compiled.sql, [compiled.bind(each) for each in given])
        else:
            statement = self.statement(connection.dialect.name)
            await connection.execute(statement, list(given))


def is_one_of(column: ColumnElement[str], name: str, dialect: str) -> ColumnElement[bool]:
    """Whether a column has one of many texts, which are one parameter however many they are."""
    texts = bindparam(name, type_=_Texts())
    if dialect == "postgresql":
        return column == any_(texts)
    return column.in_(select(func.json_each(texts).table_valued("value").c.value))


class _Texts(TypeDecorator[Sequence[str]]):
    """Many texts: an array on PostgreSQL, JSON on SQLite, which has no arrays."""

    impl = ARRAY(String)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """What the database calls it."""
        return dialect.type_descriptor(ARRAY(String) if dialect.name == "postgresql" else Text())

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        """The driver of PostgreSQL takes any sequence; a tuple has a hash, see `db.reads`."""
        return tuple if dialect.name == "postgresql" else json.dumps


def _compiled(statement: Executable, dialect: Dialect) -> Compiled:
    compiled = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
    assert isinstance(compiled, SQLCompiler)  # noqa: S101 - for mypy
    names = compiled.positiontup or []
    binds = {name: compiled.binds[name] for name in names}
    columns = getattr(statement, "exported_columns", ())
    if dialect.name == "postgresql":
        columns = ()  # its driver returns what the types of every column here say
    return Compiled(
        compiled.string,
        tuple(
            (name, binds[name].type.dialect_impl(dialect).bind_processor(dialect)) for name in names
        ),
        {name: bind.effective_value for name, bind in binds.items() if not bind.required},
        tuple(
            column.type.dialect_impl(dialect).result_processor(dialect, None) for column in columns
        ),
    )
