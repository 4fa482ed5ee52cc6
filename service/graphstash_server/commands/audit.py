"""`graphstash audit`: who wrote, deleted, or changed who may."""

from typing import TYPE_CHECKING, Annotated

import typer

from graphstash_schema import AuditEntry, InvalidValueError, Namespace
from graphstash_server.commands.running import fail, run_with_services

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext

__all__ = ["audit"]

_PAGE = 500


def audit(
    *,
    limit: Annotated[int, typer.Option(min=1, help="Most entries.")] = 50,
    namespace: Annotated[
        str | None, typer.Option(help="Only what happened in this namespace.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line, for scripts.")
    ] = False,
) -> None:
    """Show the audit log, newest first. Run it with the settings of a server."""
    try:
        where = Namespace(namespace) if namespace is not None else None
    except InvalidValueError as error:
        fail(str(error), status=2)

    async def work(context: "ProcessContext") -> None:
        entries: list[AuditEntry] = []
        before = None
        while len(entries) < limit:
            page = await context.audit.read(
                limit=min(_PAGE, limit - len(entries)), before=before, namespace=where
            )
            entries += page.entries
            before = page.next_before
            if before is None:
                break
        if as_json:
            for entry in entries:
                typer.echo(entry.model_dump_json())
        else:
            _print_table(entries)

    run_with_services(work)


def _print_table(entries: list[AuditEntry]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for heading in ("at (UTC)", "who", "action", "namespace", "what", "detail"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        table.add_row(
            f"{entry.at:%Y-%m-%d %H:%M:%S}",
            escape(entry.actor),
            entry.action.value,
            escape(entry.namespace or ""),
            escape(entry.subject),
            escape(entry.detail),
        )
    if entries:
        Console().print(table)
    else:
        typer.echo("nothing was changed, or it is too long ago (GRAPHSTASH_AUDIT_DAYS)")
