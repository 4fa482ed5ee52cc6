"""`graphstash status`: the server, what it holds, and this host's local tier."""

from typing import NoReturn

import typer

from graphstash._cli.output import (
    Json,
    NamespaceOption,
    Url,
    fail,
    format_bytes,
    format_seconds,
    load_config,
    plural,
    print_json,
    print_table,
    say,
    shown,
)
from graphstash.config import ClientConfig
from graphstash.errors import CacheError, RefusedError
from graphstash_schema import NamespaceStats, ServerStats
from graphstash_schema.exit_status import ExitStatus

__all__ = ["status"]


def status(*, url: Url = None, namespace: NamespaceOption = None, as_json: Json = False) -> None:
    """Show whether the server answers, what it holds, and this host's local tier.

    "Downloads" counts every artifact that the server has ever sent: also packs of small programs,
    and prefetched artifacts that no program used. It is not the number of hits of jobs, which the
    page of a run shows. "Found" is the share of requests that the server could answer. "Saved" is
    the compile time that all downloads together avoided.
    """
    from graphstash._artifacts.stash import Stash  # slow to import

    config = load_config(url=url, namespace=namespace)
    with Stash(config) as stash:
        try:
            server = stash.server.server_stats()
        except CacheError as error:
            if as_json:
                print_json({"url": config.url, "reachable": False, "error": str(error)})
                raise typer.Exit(ExitStatus.FAILED) from None
            _tell_unreachable(config, error)
        directory, size = str(stash.local.root), stash.local.size_bytes()
    if as_json:
        print_json(
            {
                "url": config.url,
                "reachable": True,
                "server": server.model_dump(mode="json"),
                "local": {"directory": directory, "size_bytes": size},
            }
        )
        return
    _show_server(config, server)
    say(f"local tier: {format_bytes(size)} in {directory}")


def _tell_unreachable(config: ClientConfig, error: CacheError) -> NoReturn:
    if not config.url:
        fail(f"no server: {error.detail}")
    is_refused = isinstance(error, RefusedError)
    failure = "the server refuses" if is_refused else "the server does not answer"
    fail(
        f"{failure}: {error.detail}. Jobs run without the cache; `graphstash doctor` suggests a fix"
    )


def _show_server(config: ClientConfig, server: ServerStats) -> None:
    say(
        f"{config.url}: graphstash {shown(server.version, most=40)}, "
        f"up {format_seconds(server.uptime_seconds)}, {plural(server.leases_held, 'lease')} held, "
        f"{server.waiters} waiting"
    )
    if not server.namespaces:
        say("nothing stored yet")
        return
    headings = ("namespace", ">artifacts", ">size", ">downloads", ">found", ">sent", ">saved")
    print_table(headings, map(_cells, server.namespaces), flexible=0)
    if server.store_limit_bytes is not None:
        stored = sum(each.stored_bytes for each in server.namespaces)
        say(f"store: {format_bytes(stored)} of at most {format_bytes(server.store_limit_bytes)}")


def _cells(row: NamespaceStats) -> tuple[str, ...]:
    asked = row.hits + row.misses
    return (
        shown(row.namespace, most=64),
        f"{row.artifacts}",
        format_bytes(row.size_bytes),
        f"{row.hits}",
        f"{row.hits / asked:.0%}" if asked else "-",
        format_bytes(row.served_bytes),
        format_seconds(row.saved_seconds),
    )
