"""`graphstash audit`: show changes and evictions of artifacts, and changes of permissions."""

from typing import TYPE_CHECKING, Annotated

import typer

from graphstash_schema import AuditEntry, Namespace
from graphstash_server.commands.running import (
    JsonLines,
    NamespaceFilter,
    parse,
    print_table,
    run_with_services,
)

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext

__all__ = ["audit"]

_PAGE = 500


def audit(
    *,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of entries.")] = 50,
    namespace: NamespaceFilter = None,
    as_json: JsonLines = False,
) -> None:
    """Show the audit log, newest first.

    Run it on a host of the server, with its `GRAPHSTASH_*` variables.
    """
    only = parse(Namespace, namespace) if namespace is not None else None

    async def show(context: "ProcessContext") -> None:
        entries: list[AuditEntry] = []
        before = None
        while len(entries) < limit:
            page = await context.audit.read(
                limit=min(_PAGE, limit - len(entries)), before=before, namespace=only
            )
            entries += page.entries
            before = page.next_before
            if before is None:
                break
        if as_json:
            for entry in entries:
                typer.echo(entry.model_dump_json())
        elif entries:
            print_table(
                ("at (UTC)", "who", "from", "action", "namespace", "what", "detail"),
                (
                    (
                        f"{entry.at:%Y-%m-%d %H:%M:%S}",
                        entry.actor,
                        entry.address or "",
                        entry.action.value,
                        entry.namespace or "",
                        entry.subject,
                        entry.detail,
                    )
                    for entry in entries
                ),
            )
        else:
            typer.echo("the audit log is empty, or its entries expired (GRAPHSTASH_AUDIT_DAYS)")

    run_with_services(show)
