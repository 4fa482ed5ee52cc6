"""`graphstash migrate`: upgrade the database as a separate step."""

import asyncio
from typing import Annotated

import typer

from graphstash_server.commands.running import Json, fail, load, print_result

__all__ = ["migrate"]


def migrate(
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Only check; exit with 1 if an upgrade is needed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Upgrade the database to the revision of this release.

    `graphstash serve` upgrades it at its start unless GRAPHSTASH_AUTO_MIGRATE is false. Revisions
    only add, so servers of the previous release keep working, but may wait for the upgrade.
    """
    settings = load()
    from graphstash_server.context import prepare_database, without_restore
    from graphstash_server.db.migrate import find_revision
    from graphstash_server.errors import StartError
    from graphstash_server.private_files import keep_private

    try:
        keep_private(settings)
        with without_restore(settings):
            # Without a database file, `find_revision` would create it.
            before = None if check else asyncio.run(find_revision(settings.database_url))
            asyncio.run(prepare_database(settings, is_migrating=not check))
            after = asyncio.run(find_revision(settings.database_url))
    except (StartError, OSError) as error:
        fail(str(error))
    before = after if check else before
    text = (
        f"the database is at revision {after}: nothing to do"
        if before == after
        else f"the database was at revision {before or 'none'} and is at {after}"
    )
    print_result(text, {"before": before, "revision": after}, as_json=as_json)
