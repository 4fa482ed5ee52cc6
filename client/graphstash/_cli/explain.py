"""`graphstash explain`: why a job compiled what it compiled."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from graphstash._cli.output import Json, NamespaceOption, Url, fail, out, plural, print_json
from graphstash._compile.explaining import Cause, causes_of, text_of
from graphstash._http.client import ServerClient
from graphstash._process.run_record import ProcessRecord, read_last_run
from graphstash.config import ClientConfig
from graphstash.errors import CacheError, ConfigError
from graphstash_schema import Namespace
from graphstash_schema.names import printable

__all__ = ["explain"]


def explain(
    which: Annotated[
        str,
        typer.Argument(
            help="`last` for the last run on this host, or the beginning of a fingerprint or a "
            "label of what it missed"
        ),
    ] = "last",
    url: Url = None,
    namespace: NamespaceOption = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Directory of the local tier")] = None,
    as_json: Json = False,  # noqa: FBT002 - typer
) -> None:
    """Say why a run compiled: which flag, version, shape or line differs from what is stored.

    Each graph that the run missed is compared with the nearest artifacts in all namespaces that you
    may read. `graphstash run --explain` says the same at the end of a job.
    """
    try:
        config = ClientConfig.load(url=url, namespace=namespace, cache_dir=cache_dir)
    except ConfigError as error:
        fail(str(error), status=2)
    try:
        records = read_last_run(config.cache_dir)
    except OSError as error:
        fail(f"the records of earlier runs are not used: {error}")
    if records is None:
        fail(f"no run is recorded in {config.cache_dir}: start one with `graphstash run`")
    wanted = [
        (description, reason)
        for record in records
        for description, reason, _ in record.misses
        if which == "last"
        or description.key.fingerprint.startswith(which)
        or description.label.startswith(which)
    ]
    if which != "last" and not wanted:
        fail(f"the last run has missed nothing that begins with {which!r}")
    _check_server(config, records)
    if records and namespace is None:
        config = dataclasses.replace(config, namespace=Namespace(records[0].namespace))
    client = ServerClient(config)
    try:
        causes = causes_of(client, wanted)
    except CacheError as error:
        fail(str(error))
    finally:
        client.close()
    if as_json:
        print_json([_as_json(cause) for cause in causes])
        return
    command = " ".join(records[0].argv) if records else ""
    hits = sum(
        int(record.stats.get(f"hits_{source}", 0))
        for record in records
        for source in ("server", "prefetched", "host", "ranks")
    )
    out.print(
        f"{escape(command)}: {plural(hits, 'hit')}, {plural(len(wanted), 'miss')}", soft_wrap=True
    )
    for line in text_of(causes):
        out.print(escape(line), soft_wrap=True)


def _check_server(config: ClientConfig, records: list[ProcessRecord]) -> None:
    """Refuses to ask another server than the run: an address from a file never gets the token."""
    asked = next((record.url for record in records), config.url)
    if asked != config.url:
        fail(
            f"the last run used {printable(asked or 'no server', most=200)}, not "
            f"{config.url or 'no server'}: set GRAPHSTASH_URL, or --url, to the one to ask"
        )


def _as_json(cause: Cause) -> dict[str, object]:
    return {
        "cause": cause.text,
        "labels": cause.labels,
        "nearest": None if cause.nearest is None else cause.nearest.model_dump(mode="json"),
    }
