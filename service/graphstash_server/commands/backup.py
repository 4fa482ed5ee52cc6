"""`graphstash backup` and `graphstash restore`."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphstash_server.commands.running import (
    Json,
    fail,
    format_bytes,
    load,
    plural,
    progress_bar,
    reason_of,
    run_with_services,
)

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext
    from graphstash_server.services.maintenance.backup import Copied

__all__ = ["backup", "restore"]

_LEFT_OUT_STATUS = 1

_Directory = Annotated[Path, typer.Argument(help="Directory of the backup.", show_default=False)]


def backup(
    directory: _Directory,
    *,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also check and repair the blobs that the directory has."),
    ] = False,
    moved: Annotated[
        bool, typer.Option("--moved", help="Accept that the cache has moved from another database.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Back up the database and all blobs, while servers run.

    The directory is new, empty, or has an earlier backup of the same cache. Blobs that it has are
    not copied again. If the command is interrupted, the earlier backup stays complete and the next
    run continues. Exits with 1 if artifacts were left out because their blobs are lost or damaged.
    """

    async def work(context: "ProcessContext") -> None:
        from graphstash_server.errors import BackupError
        from graphstash_server.services.maintenance.backup import Backup

        try:
            with progress_bar("copying") as progress:
                done = await Backup(directory).take(
                    url=context.settings.database_url,
                    collector=context.collector,
                    clock=context.clock,
                    is_deep=deep,
                    is_moved=moved,
                    progress=progress,
                )
        except BackupError as error:
            fail(str(error))
        _report("backed up", done, as_json=as_json)

    run_with_services(work)


def restore(
    directory: Annotated[
        Path | None, typer.Argument(help="Directory of the backup.", show_default=False)
    ] = None,
    *,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Allow the loss of existing artifacts, tokens and rows."),
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Leave out artifacts whose blobs the backup lacks.")
    ] = False,
    abandoned: Annotated[
        bool,
        typer.Option(
            "--abandon",
            help="Cancel an interrupted restore that has replaced no row. Takes no directory.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Restore a backup into the database and the blob store of the server's settings.

    Stop all servers first. Every blob is verified. If the command is interrupted, servers refuse to
    start until you run the same command again. A backup of SQLite can be restored into PostgreSQL,
    and the reverse, and into another kind of blob store. If the backup lacks blobs, nothing is
    replaced, unless you use --partial.
    """
    settings = load()
    from graphstash_server.errors import BackupError, ServerError, StartError
    from graphstash_server.private_files import keep_private
    from graphstash_server.services.maintenance.backup import Backup, abandon
    from graphstash_server.services.maintenance.backup import restore as restore_backup
    from graphstash_server.storage import open_blob_store

    if (directory is None) is not abandoned:
        fail("name the directory of a backup, or use --abandon without one", status=2)

    async def work() -> "Copied | None":
        if directory is None:
            await abandon(url=settings.database_url, data_dir=settings.data_dir)
            return None
        durable = settings.model_copy(update={"tier_limit_bytes": 0})
        with progress_bar("restoring") as progress:
            async with open_blob_store(durable) as store:
                return await restore_backup(
                    directory,
                    url=settings.database_url,
                    data_dir=settings.data_dir,
                    store=store,
                    is_replacing=replace,
                    is_partial=partial,
                    progress=progress,
                )

    try:
        if directory is not None:
            Backup(directory).check()
        keep_private(settings)
        done = asyncio.run(work())
    except ServerError as error:
        fail(error.detail)
    except (BackupError, StartError, OSError) as error:
        fail(reason_of(error))
    if done is not None:
        _report("restored", done, as_json=as_json)
    else:
        message = "the restore is abandoned: the database is as it was before"
        typer.echo(json.dumps({"abandoned": True}) if as_json else message)


def _report(verb: str, done: "Copied", *, as_json: bool) -> None:
    manifest = done.manifest
    if as_json:
        record = {
            **json.loads(manifest.model_dump_json()),
            "copied": done.copied,
            "left_out": done.left_out,
        }
        typer.echo(json.dumps(record, indent=2))
    else:
        typer.echo(
            f"{verb} the database as of {manifest.taken_at:%Y-%m-%d %H:%M:%S} UTC and "
            f"{plural(manifest.blobs, 'blob')} ({format_bytes(manifest.blob_bytes)}), "
            f"{done.copied} of them copied now"
        )
        if verb == "restored":
            again = "deleted or replaced" if done.is_current else "withheld, deleted or revoked"
            typer.echo(f"what was {again} since then is back: check it before servers start")
    if done.left_out:
        fail(
            f"{plural(done.left_out, 'artifact')} left out, because the blobs are lost or damaged",
            status=_LEFT_OUT_STATUS,
        )
