"""Prepared: a SQLAlchemy Core statement that is built and compiled once per dialect.

Building, hashing and compiling a statement takes longer than running it, so frequent statements are
prepared. Core generates the SQL and the conversions of values, and the driver runs the statement.
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

from graphstash_server.db.sqlite import HintingCompiler, SqliteTransaction

__all__ = [
    "NOTHING",
    "Compiled",
    "Parameters",
    "Prepared",
    "Reader",
    "Row",
    "Source",
    "Transaction",
    "is_one_of",
]

Row: TypeAlias = Sequence[Any]
"""Values of one row, in the order of the statement's columns."""

Parameters: TypeAlias = Mapping[str, Any]

NOTHING: Final[Parameters] = {}

Transaction: TypeAlias = AsyncConnection | SqliteTransaction
"""Runs the statements of a transaction. A `SqliteTransaction` runs them in the one thread in which
its `Database` writes."""

_DIALECTS: Final[dict[str, Dialect]] = {
    "postgresql": PGDialect_asyncpg(),  # type: ignore[no-untyped-call] # of SQLAlchemy
    "sqlite": SQLiteDialect_aiosqlite(),
}

_DIALECTS["sqlite"].statement_compiler = HintingCompiler

_Convert: TypeAlias = Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A statement for one database driver."""

    sql: str
    parameters: tuple[tuple[str, _Convert], ...]
    constants: Parameters
    columns: tuple[_Convert, ...]

    def bind(self, given: Parameters) -> tuple[Any, ...]:
        """Return the values in the order of the placeholders, converted for the driver."""
        values = {**self.constants, **given} if self.constants else given
        return tuple(
            [
                convert(values[name]) if convert else values[name]
                for name, convert in self.parameters
            ]
        )

    def rows(self, found: Sequence[Row]) -> Sequence[Row]:
        """Convert the driver's values to those of Core's types."""
        if not any(self.columns):
            return found
        return [
            tuple([convert(value) if convert else value for convert, value in pairs])
            for pairs in (zip(self.columns, row, strict=True) for row in found)
        ]


class Reader(Protocol):
    """Runs one statement outside of a transaction: `db.engine.Database`."""

    async def fetch(self, statement: "Prepared", given: Parameters, /) -> Sequence[Row]:
        """Return the rows of a statement."""


Source: TypeAlias = Transaction | Reader
"""Reads rows inside or outside of a transaction."""


class Prepared:
    """A statement that is built on first use, once per dialect ("sqlite" or "postgresql").

    `finds_one` states that it finds at most one row, by an index. On SQLite, the event loop then
    runs it, unless a recent read was slow and the threads run all reads (`SqliteHere`).
    """

    def __init__(self, build: Callable[[str], Executable], *, finds_one: bool = False) -> None:
        self._build = build
        self.finds_one = finds_one
        self._statements: dict[str, Executable] = {}

    @cached_property
    def sqlite(self) -> Compiled:
        """The statement for SQLite's driver."""
        return _compiled(self.statement("sqlite"), _DIALECTS["sqlite"])

    @cached_property
    def postgresql(self) -> Compiled:
        """The statement for PostgreSQL's driver."""
        return _compiled(self.statement("postgresql"), _DIALECTS["postgresql"])

    def statement(self, dialect: str) -> Executable:
        """Return the statement for SQLAlchemy's connections."""
        if dialect not in self._statements:
            self._statements[dialect] = self._build(dialect)
        return self._statements[dialect]

    async def fetch(self, source: Source, given: Parameters) -> Sequence[Row]:
        """Return the rows."""
        if isinstance(source, SqliteTransaction):
            compiled = self.sqlite
            return compiled.rows(source.fetch(compiled.sql, compiled.bind(given)))
        if isinstance(source, AsyncConnection):
            return (await source.execute(self.statement(source.dialect.name), given)).all()
        return await source.fetch(self, given)

    async def fetch_one(self, source: Source, given: Parameters) -> Row | None:
        """Return the first row, or None."""
        found = await self.fetch(source, given)
        return found[0] if found else None

    async def execute(self, connection: Transaction, given: Parameters) -> int:
        """Run the statement inside a transaction. Return the number of changed rows."""
        if isinstance(connection, SqliteTransaction):
            compiled = self.sqlite
            return connection.execute(compiled.sql, compiled.bind(given))
        statement = self.statement(connection.dialect.name)
        return (await connection.execute(statement, given)).rowcount

    async def execute_all(self, connection: Transaction, given: Sequence[Parameters]) -> None:
        """Run the statement inside a transaction, once per set of parameters."""
        if not given:
            return
        if isinstance(connection, SqliteTransaction):
            compiled = self.sqlite
            connection.execute_all(compiled.sql, [compiled.bind(each) for each in given])
        else:
            statement = self.statement(connection.dialect.name)
            await connection.execute(statement, list(given))


def is_one_of(column: ColumnElement[str], name: str, dialect: str) -> ColumnElement[bool]:
    """Match a column against any number of texts in one parameter."""
    texts = bindparam(name, type_=_Texts())
    if dialect == "postgresql":
        return column == any_(texts)
    return column.in_(select(func.json_each(texts).table_valued("value").c.value))


class _Texts(TypeDecorator[Sequence[str]]):
    """Many texts: an array on PostgreSQL, JSON on SQLite, which has no arrays."""

    impl = ARRAY(String)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(ARRAY(String) if dialect.name == "postgresql" else Text())

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        """Return the conversion to a value that `db.reads` can hash."""
        return tuple if dialect.name == "postgresql" else json.dumps


def _compiled(statement: Executable, dialect: Dialect) -> Compiled:
    compiled = statement.compile(dialect=dialect)  # type: ignore[attr-defined] # all have it
    assert isinstance(compiled, SQLCompiler)  # noqa: S101 - for mypy
    names = compiled.positiontup or []
    binds = {name: compiled.binds[name] for name in names}
    columns = getattr(statement, "exported_columns", ())
    if dialect.name == "postgresql":
        columns = ()  # asyncpg returns Python types for all columns
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
