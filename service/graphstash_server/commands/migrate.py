"""`graphstash migrate`: brings the database to this release's revision, as a step of its own."""

import asyncio
from typing import Annotated

import typer

from graphstash_server.commands.running import fail, load

__all__ = ["migrate"]


def migrate(
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether it is needed: exit code 1 if so.")
    ] = False,
) -> None:
    """Bring the database to this release's revision.

    `graphstash serve` does it at the start unless GRAPHSTASH_AUTO_MIGRATE is false. Revisions only
    add: servers of the release before go on afterwards; while it runs, they may have to wait.
    """
    settings = load()
    from graphstash_server.context import prepare_database
    from graphstash_server.db.migrate import find_revision, newest_revision
    from graphstash_server.errors import StartError

    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        if check:
            asyncio.run(prepare_database(settings, is_migrating=False))
            typer.echo(f"the database is at revision {newest_revision()}: nothing to do")
            return
        before = asyncio.run(find_revision(settings.database_url))
        asyncio.run(prepare_database(settings, is_migrating=True))
        after = asyncio.run(find_revision(settings.database_url))
    except (StartError, OSError) as error:
        fail(str(error))
    typer.echo(f"the database was at revision {before or 'none'} and is at {after}")
