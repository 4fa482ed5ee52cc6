"""No statement costs more in a large store than in a small one.

The test calls every public coroutine of `db.queries` on two stores, one with twelve times as many
rows per table. The database counts the cost of each statement: SQLite the instructions of its
virtual machine, PostgreSQL the rows of each node of the plan. The large store has its own
statistics, stale ones of the small store, or none.
"""

import asyncio
import importlib
import inspect
import itertools
import json
import pkgutil
import sqlite3
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import make_url

from graphstash_schema import (
    AuditAction,
    Digest,
    Grant,
    Namespace,
    NamespacePolicy,
    ReportReason,
    TokenInfo,
)
from graphstash_schema.explanation import Description
from graphstash_schema.history import Grouping, Step
from graphstash_schema.listing import ArtifactQuery, ListOrder
from graphstash_schema.names import LIST_START, ManifestName
from graphstash_schema.region import Publisher
from graphstash_schema.run import RunQuery
from graphstash_schema.withdrawals import WithdrawalCause
from graphstash_server.actor import Actor
from graphstash_server.artifact import Artifact
from graphstash_server.db import queries
from graphstash_server.db.engine import Database, make_engine
from graphstash_server.db.migrate import migrate
from graphstash_server.db.queries.audit import AuditRecord
from graphstash_server.db.queries.descriptions import NearRequest
from graphstash_server.db.queries.eviction import Candidate, Toolchain
from graphstash_server.db.queries.history import HistoryChange, Selection
from graphstash_server.db.queries.leases import LeaseRow
from graphstash_server.db.queries.listing import Place
from graphstash_server.db.queries.recorded_times import Suspension
from graphstash_server.db.queries.requests import Requests, UsageCounts
from graphstash_server.db.queries.runs import HeldRun, ReportRow
from graphstash_server.db.queries.sessions import SessionRow
from graphstash_server.db.queries.shared import key_values
from graphstash_server.db.queries.tokens import TokenRow
from graphstash_server.db.queries.usage import UsageChange
from graphstash_server.db.tables import UtcTime, metadata
from graphstash_server.keys import StoredKey
from support.tiers import most_extended

pytestmark = [pytest.mark.sql, pytest.mark.anyio]

SMALL, LARGE = 120, 1440
PAGE = 50
KEPT = 20
"""Number of pinned and of withheld artifacts in either store: administrators decide on both."""

MOST_MORE = 300
"""Instructions or rows allowed in the large store, above twice the cost in the small store."""

_FEW_ENTRIES = "a namespace has at most 65,536 entries of manifests, and a manifest 4,096"
_FEW_RUNS = "a namespace and a caller have at most 16,384 reports of runs"
_FEW_TOKENS = "there are at most 10,000 live tokens"
GROWING = {
    "catalog.list_users": _FEW_ENTRIES,
    "manifests.count_entries": _FEW_ENTRIES,
    "manifests.list_entries": _FEW_ENTRIES,
    "manifests.trim_entries": _FEW_ENTRIES,
    "runs.list_latest": _FEW_RUNS,
    "runs.list_runs": _FEW_RUNS,
    "runs.size_of": _FEW_RUNS,
    "tokens.count_exchanged_tokens": _FEW_TOKENS,
    "tokens.count_live_tokens": _FEW_TOKENS,
    "tokens.delete_ended_tokens": _FEW_TOKENS,
    "tokens.list_tokens": _FEW_TOKENS,
    "deletions.count_deletions": "a mark lasts until the next collection of marked blobs",
    "deletions.pending_bytes": "a mark lasts until the next collection of marked blobs",
    "leases.has_room_for_lease": "a caller and a namespace have a bounded number of leases",
    "descriptions.drop_unused_environments": "an hourly chore; artifacts share environments",
    "reports.list_unconfirmed": "an hourly chore of a region; a store has few reports",
    "upstream.count_publishes": "the queue of a region is short while its upstream answers",
    "upstream.is_withdrawn_since": "it reads the withdrawals since a download began",
    "upstream.prune_callers": "an hourly chore",
    "usage.recount_usage": "a daily chore and `fsck`, which compare all rows in one snapshot",
}
"""Functions that may cost more in a large store, with the reason."""

NOW = datetime(2026, 6, 1, tzinfo=UTC)
BENCH = Namespace("bench")
NAME = ManifestName("job")
RUN = "5"
ACTOR = Actor("somebody")
SETTLED = {
    *("chores", "identifiers", "namespaces", "recorded_times", "suspensions", "usage"),
    "upstream_namespaces",
    "withdrawal_heads",
}
"""Tables with one row per namespace or server, so a larger store has no more rows."""


SPECIAL = {
    "manifest_entries": {"name": NAME},
    "upstream_namespaces": {"earlier": "", "used": True},
    "withdrawal_heads": {"number": LARGE},
}
"""Values that all rows of a table share."""

LATER = {"audit": {"namespace": "other"}}
"""Values that all but the first rows share. A scan from the latest row meets these rows first."""


def fingerprint(number):
    return f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}{number:048x}"


def key(number):
    return StoredKey.parse(
        namespace=BENCH, kind="jax", device_type="cpu", fingerprint=fingerprint(number)
    )


def digest(number):
    return Digest(fingerprint(number), 4096)


def at(number):
    return NOW - timedelta(minutes=number)


def artifact(number):
    return Artifact(key(number), digest(number), "", 1.0, "jax 1", 0, at(number), at(number))


def words_of(number):
    """Return the values of row `number` in columns of these names, for any table."""
    return {
        **key_values(key(number)),
        "sha256": fingerprint(number),
        "secret_sha256": fingerprint(number),
        "id_sha256": fingerprint(number),
        "size_bytes": 4096,
        "toolchain": "jax 1" if number > 5 else f"jax 0.{number}",
        "eviction_rank": -float(number),
        "step": "day",
        "token_id": "0005" if number < 5 else f"{number:04}",
        "reason": "corrupt",
        "action": "put",
        "mode": "write_once",
        "grants": "read:*",
        "counts": "[]",
        "misses": "[]",
        "parts": "{}",
        "run": f"{number // 4}",
        "writer": f"{number // 16}",
        "caller": f"{number // 16}",
        "created_by": f"{number // 16}",
        "cause": "deleted",
        "mark": f"{number:016x}",
        "position": "0",
        "number": number + 1,
        "pinned_until": NOW + timedelta(days=1) if number < KEPT else None,
        "withheld_at": at(number) if KEPT <= number < 2 * KEPT else None,
    }


def others_of(number):
    """Return the row's values in all other columns, by type."""
    return {UtcTime: at(number), sa.Boolean: False, sa.Double: 1.0, sa.String: f"{number:04}"}


async def fill(connection, numbers):
    rows = [(number, words_of(number), others_of(number)) for number in numbers]
    for table in metadata.sorted_tables:
        given = {each.key: each for each in table.columns if each.autoincrement is not True}
        values = []
        for number, usual, others in rows:
            words = usual | SPECIAL.get(table.name, {})
            words |= LATER.get(table.name, {}) if number >= SMALL // 2 else {}
            if number and table.name in SETTLED:
                continue
            row = {}
            for name, column in given.items():
                if name in words and (name != "misses" or table.name == "runs"):
                    row[name] = words[name]
                elif not column.nullable or column.primary_key:
                    kind = sa.String if isinstance(column.type, sa.String) else type(column.type)
                    row[name] = others.get(kind, number + 1)
                else:
                    row[name] = None
            values.append(row)
        if values:
            await connection.execute(sa.insert(table), values)


def arguments_of(count):
    """Return values of parameters, by name or by function and name."""
    last, old = count - 1, at(count - 10)
    keys, digests = [key(n) for n in range(100, 110)], [digest(n) for n in range(100, 110)]
    candidate = Candidate(key(100), digest(100), 4096, 1.0, "jax 1", at(100), -100.0)
    token = TokenInfo(
        id="new", description="", grants=(Grant.parse("read:*"),), created_at=NOW, created_by="5"
    )
    seconds = (1.0, 0.0, 1.0, None)
    report = ReportRow(BENCH, RUN, "new", "5", "5", NOW, 512, "", "", NOW, *seconds, "[]", "[]")
    groups = {("jax", "cpu", "5"): HistoryChange(hits=1)}
    places = {
        order: Place(4096 if order is ListOrder.SIZE else at(100), fingerprint(100), "jax", "cpu")
        for order in ListOrder
    }
    either = [{"namespace": BENCH}, {"writer": "5"}]
    return {
        "runs.list_runs": either,
        "runs.size_of": either,
        "access": ["{}"],
        "after": [None, candidate],
        "artifacts.list_stored_rows.after": [None, key(100)],
        "reports.list_unconfirmed.after": [None, key(100)],
        "upstream.put_position.after": [LIST_START],
        "after_sha256": ["", fingerprint(100)],
        "at": [NOW],
        "before": [old],
        "withdrawals.prune_withdrawals.before": [10],
        "runs.list_latest.after": [None, (NOW, RUN)],
        "audit.read_audit.before": [None, 100],
        "but": ["new"],
        "by": [each for each in Grouping if each is not Grouping.NONE],
        "caller": ["5", None],
        "cause": [WithdrawalCause.DELETED],
        "change": [UsageChange(hits=1)],
        "changes": [{BENCH: groups}],
        "chosen": [[candidate]],
        "query": [RunQuery(limit=PAGE), RunQuery(limit=PAGE, job="x", since=at(30), until=NOW)],
        "credential": ["0100"],
        "digest": [digest(100)],
        "digests": [digests],
        "duration": [timedelta(minutes=1)],
        "end": [last],
        "ends": [{BENCH: LIST_START}],
        "entries": [[AuditRecord(NOW, ACTOR, AuditAction.DELETE, BENCH, "x")]],
        "every": [timedelta(hours=1)],
        "exchanged_before": [old],
        "expired": [old],
        "expires_at": [NOW],
        "held": [[HeldRun(BENCH, RUN, "5", 4, 4096)]],
        "held_until": [NOW],
        "retried": [digests],
        "holder": ["x"],
        "hour": [NOW],
        "id_sha256": [fingerprint(100), fingerprint(count)],
        "identity": ["100"],
        "ids": [["0005", "0006"]],
        "keep": [PAGE],
        "kept": [2],
        "key": [key(100), key(30), key(count)],
        "keys": [keys],
        "kind": ["jax"],
        "label": ["0100"],
        "catalog.list_from_label.label": ["0010"],
        "lease": [LeaseRow("0100", 1, "x", at(100), None, None)],
        "limit": [PAGE],
        "last": [None, "x"],
        "looked_at": [PAGE],
        "max_groups": [128],
        "most": [10],
        "name": [NAME, None],
        "locks.claim_chore.name": ["x"],
        "leases.has_room_for_lease.name": ["5"],
        "names": [[BENCH, RUN]],
        "near": [NearRequest(BENCH, "jax", NOW, PAGE)],
        "namespace": [BENCH, None],
        "namespaces": [[BENCH, Namespace("other")]],
        "new": [artifact(count)],
        "descriptions.add_descriptions.new": [
            [Description(key=key(100).key, label="x", program={}, environment={})]
        ],
        "now": [NOW],
        "of": [None, ("x", "5")],
        "leases.has_room_for_lease.of": ["caller"],
        "older_than": [old],
        "policy": [NamespacePolicy()],
        "position": [LIST_START],
        "prefix": [fingerprint(100)[:4]],
        "reason": [ReportReason.CORRUPT],
        "replaces": [artifact(count)],
        "reported_by": ["x"],
        "listing.list_page": [
            {
                "namespace": BENCH,
                "query": ArtifactQuery(order=order, label=label, details=True),
                "after": after,
                "limit": PAGE,
                "most_scanned": PAGE,
            }
            for order, place in places.items()
            for after in (None, place)
            for label in ("", "x")
        ],
        "row": [report],
        "sessions.add_session.id_sha256": [fingerprint(count)],
        "sessions.add_session.row": [SessionRow("0005", NOW)],
        "tokens.insert_token.row": [TokenRow(token, "x")],
        "requests": [{BENCH: Requests(UsageCounts(hits=1), groups)}],
        "rows": [[artifact(number) for number in range(100, 110)]],
        "history.add_history.rows": [[(BENCH, "hour", NOW, "jax", "cpu", "5", 1, 1, 1, 1, 1.0)]],
        "upstream.queue_publishes.rows": [
            [(artifact(number), Publisher(grants=())) for number in range(100, 110)]
        ],
        "run": [RUN],
        "seconds": [1.0],
        "selection": [Selection(Step.DAY, at(30), NOW, names) for names in (None, [BENCH])],
        "shown": [[], ["5"]],
        "since": [at(30)],
        "spared": [(), (fingerprint(5),)],
        "spares_looked_up": [True],  # False comes after it, when few other rows are left
        "start": [1],
        "step": [Step.DAY],
        "suspension": [Suspension(NOW, None, NOW, NOW, 1.0)],
        "token": ["0100"],
        "token_id": ["0005"],
        "ttl_seconds": [60.0],
        "until": [NOW],
        "until_sha256": [None, fingerprint(101)],
        "uses": [[(each, 1) for each in keys]],
        "tokens.touch_tokens.uses": [{"0005": NOW}],
        "waits": [False, True],
        "value": ["x"],
        "wanted": [Toolchain(BENCH, "jax", "jax 1", NOW)],
        "with_misses": [True],
        "withdrawn": [[(key(100), digest(100))]],
        "writer": ["5", None],
    }


def calls(arguments):
    """Yield every public coroutine of the queries with every combination of its arguments."""
    for module in pkgutil.iter_modules(queries.__path__):
        found = importlib.import_module(f"{queries.__name__}.{module.name}")
        for name in found.__all__:
            function = getattr(found, name)
            if not inspect.iscoroutinefunction(function):
                continue
            title = f"{module.name}.{name}"
            if title in arguments:
                yield from ((title, function, dict(given)) for given in arguments[title])
                continue
            _, *parameters = inspect.signature(function).parameters.values()
            choices = []
            for parameter in parameters:
                given = arguments.get(f"{title}.{parameter.name}") or arguments[parameter.name]
                may_be_none = "None" in str(parameter.annotation)
                choices.append([each for each in given if each is not None or may_be_none])
            for chosen in itertools.product(*choices):
                by_name = dict(zip([each.name for each in parameters], chosen, strict=True))
                yield title, function, by_name


async def costs_of(url, count):
    """Return the cost, text and plan of each function's most expensive statement."""
    engine = make_engine(make_url(url))
    dearest = defaultdict(lambda: (-1, "", ""))
    statements = []

    def note(*arguments):
        _, _, sql, parameters, _, executemany = arguments
        if sql.startswith(("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")):
            statements.append((sql, parameters[0] if executemany else parameters))

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    async with engine.connect() as connection:
        driver = (await connection.get_raw_connection()).driver_connection
        explain = explain_on_postgresql if "postgresql" in url else explain_on_sqlite
        for title, function, given in calls(arguments_of(count)):
            statements.clear()
            signature = inspect.signature(function).parameters
            positional = [
                given.pop(name)
                for name, each in signature.items()
                if each.kind is not each.KEYWORD_ONLY and name in given
            ]
            transaction = await connection.begin()
            await function(connection, *positional, **given)
            await transaction.rollback()
            for sql, parameters in tuple(statements):
                transaction = await connection.begin()
                if "postgresql" in url:  # it may prefer a full scan of so small a table
                    await connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
                cost, plan = await explain(driver, sql, parameters)
                await transaction.rollback()
                dearest[title] = max(dearest[title], (cost, sql, plan))
    await engine.dispose()
    return dearest


async def analyze(url):
    """Gather statistics, on SQLite like the maintenance."""
    database = Database(url)
    if database.is_postgresql:
        async with database.writing() as connection:
            await connection.exec_driver_sql("ANALYZE")
    await database.update_statistics()
    await database.close()


async def explain_on_sqlite(driver, sql, parameters):
    """Return the instructions of a statement, rounded to tens, and its plan."""
    count = itertools.count()
    await driver.set_progress_handler(lambda: next(count) < 0, 10)
    with suppress(sqlite3.IntegrityError):  # another statement of the function deletes the row
        await driver.execute_fetchall(sql, parameters)
    await driver.set_progress_handler(None, 0)
    plan = await driver.execute_fetchall(f"EXPLAIN QUERY PLAN {sql}", parameters)
    return 10 * next(count), "\n".join(row[-1] for row in plan)


async def explain_on_postgresql(driver, sql, parameters):
    """Return the number of rows that the plan's nodes read and filtered out, and the plan."""
    try:
        found = await driver.fetch(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", *parameters)
    except asyncpg.UniqueViolationError:
        return 0, ""
    ((plan,),) = found[0]
    return rows_of(plan["Plan"]), json.dumps(plan["Plan"], indent=1)


def rows_of(node):
    names = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter")
    own = sum(node.get(name, 0) for name in names) * node["Actual Loops"]
    return own + sum(map(rows_of, node.get("Plans", [])))


@pytest.fixture(
    scope="module", params=most_extended(["sqlite", "postgresql"], quick=["postgresql"])
)
def stores(request, tmp_path_factory, is_extended):
    """A small store, and large ones without statistics, with stale ones, and with their own."""

    async def make(url, *parts, analyzed_after):
        engine = make_engine(make_url(url))
        for number, part in enumerate(parts):
            async with engine.begin() as connection:
                if "postgresql" in url and not number:
                    for table in metadata.sorted_tables:
                        off = f"ALTER TABLE {table.name} SET (autovacuum_enabled = off)"
                        await connection.exec_driver_sql(off)
                await fill(connection, part)
            if number == analyzed_after:
                await analyze(url)
        await engine.dispose()

    def new(*parts, analyzed_after=None):
        directory = tmp_path_factory.mktemp("store")
        url = f"sqlite+aiosqlite:///{directory / 'db'}"
        if request.param == "postgresql":
            url = request.getfixturevalue("postgres").new_database()
        migrate(url, lock_path=directory / "lock")
        asyncio.run(make(url, *parts, analyzed_after=analyzed_after))
        return url

    rest = range(SMALL, LARGE)
    made = {"small": new(range(SMALL)), "stale": new(range(SMALL), rest, analyzed_after=0)}
    if is_extended:
        made["fresh"] = new(range(SMALL), rest, analyzed_after=1)
        if request.param == "sqlite":  # PostgreSQL gathers statistics itself
            made["missing"] = new(range(SMALL), rest)
    return made


async def test_no_statement_costs_more_in_a_large_store(stores):
    small = await costs_of(stores["small"], SMALL)
    problems = []
    for name, url in stores.items():
        large = await costs_of(url, LARGE) if name != "small" else {}
        dearer = {
            title: (small[title][0], *found)
            for title, found in large.items()
            if found[0] > 2 * small[title][0] + MOST_MORE
        }
        problems += [
            f"{name}, {title}: {before} -> {cost}\n{sql}\n{plan}"
            for title, (before, cost, sql, plan) in dearer.items()
            if title not in GROWING
        ]
    assert not problems, "\n\n".join(problems)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_maintenance_updates_the_statistics_of_sqlite(opened):
    async with opened() as server:
        await server.put(b"blob")
        await server.context.maintenance.run_once()
        async with server.context.database.reading() as connection:
            count = sa.text("SELECT count(*) FROM sqlite_stat1 WHERE tbl = 'artifacts'")
            assert await connection.scalar(count) > 5
