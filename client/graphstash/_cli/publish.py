"""`graphstash publish`: publish what jobs on this host compiled and could not send."""

from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import typer

from graphstash._artifacts.bundle import BundleEntry
from graphstash._artifacts.catch_up import CatchUp, Outcome, Sent
from graphstash._cli.output import (
    Json,
    NamespaceOption,
    Url,
    byte_progress,
    err,
    fail,
    format_bytes,
    load_config,
    open_stash,
    plural,
    print_json,
    say,
)
from graphstash._cli.patience import PatientClient, fail_midway
from graphstash.config import ClientConfig
from graphstash.errors import CacheError, VerificationError
from graphstash_schema.exit_status import ExitStatus

__all__ = ["publish"]


def publish(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be published.")
    ] = False,
    url: Url = None,
    namespace: NamespaceOption = None,
    as_json: Json = False,
) -> None:
    """Publish what jobs on this host compiled while the server was down, or before there was one.

    Jobs do this by themselves, for the server that was down. This command also publishes what
    jobs without any server compiled. It publishes nothing that was compiled with --read-only or
    GRAPHSTASH_URL=none, or that came from a server or a bundle.

    If it is interrupted, run it again to continue. The exit status is 1 if an artifact does not
    verify or the server refuses it.
    """
    config = load_config(url=url, namespace=namespace)
    if not config.url:
        fail(
            "no server: set GRAPHSTASH_URL, or start a server on this host with `graphstash serve`"
        )
    if config.read_only:
        fail(
            "GRAPHSTASH_READ_ONLY is set: nothing can be published",
            status=ExitStatus.USAGE,
        )
    publication = _Publication(config)
    try:
        publication.run(is_dry=dry_run)
    except CacheError as error:
        fail_midway(error)
    if as_json:
        print_json(
            {
                "namespace": config.namespace,
                "published": len(publication.published),
                "published_bytes": publication.published_bytes,
                "present": publication.present,
                "differing": publication.differing,
                "rejected": publication.rejected,
                "is_dry_run": dry_run,
            }
        )
    else:
        _show(publication, is_dry=dry_run)
    if publication.rejected:
        raise typer.Exit(ExitStatus.FAILED)


class _Publication:
    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self.published: list[BundleEntry] = []
        self.present = 0
        self.differing: list[str] = []
        self.rejected: list[dict[str, str]] = []

    @property
    def published_bytes(self) -> int:
        return sum(each.size_bytes for each in self.published)

    def run(self, *, is_dry: bool) -> None:
        """Publish all artifacts, or only verify them.

        Raises:
            CacheError: the server does not answer, or does not accept the calls.
        """
        with (
            open_stash(self._config) as stash,
            closing(PatientClient(self._config)) as server,
            byte_progress() as progress,
        ):
            task = progress.add_task("publishing", total=None)

            def done(entry: BundleEntry, outcome: Outcome) -> None:
                self._count(entry, outcome)
                progress.advance(task, entry.size_bytes)

            catch_up = CatchUp(stash, server, with_any=True, done=done)
            wanted = catch_up.wanted()
            progress.update(task, total=sum(each.size_bytes for each in wanted))
            if is_dry:
                self._check(catch_up, wanted)
            else:
                catch_up.publish(wanted)

    def _check(self, catch_up: CatchUp, wanted: Sequence[BundleEntry]) -> None:
        for entry in wanted:
            try:
                catch_up.check(entry)
            except VerificationError as error:
                self._count(entry, error)
            else:
                self._count(entry, Sent.PUBLISHED)

    def _count(self, entry: BundleEntry, outcome: Outcome) -> None:
        match outcome:
            case Sent.PUBLISHED:
                self.published.append(entry)
            case Sent.PRESENT:
                self.present += 1
            case Sent.DIFFERING:
                self.differing.append(str(entry.key))
            case error:
                self.rejected.append({"key": str(entry.key), "error": str(error)})
                err.print(f"rejected: {error}", markup=False, soft_wrap=True)


def _show(publication: _Publication, *, is_dry: bool) -> None:
    count, size = len(publication.published), format_bytes(publication.published_bytes)
    if is_dry:
        done = f"{plural(count, 'artifact')} ({size}) would be published"
    else:
        done = f"{count} published ({size})"
    differing, rejected = publication.differing, publication.rejected
    say(
        f"{done}, {publication.present} already there"
        + (f", {len(differing)} with other bytes there, which stay" if differing else "")
        + (f", {len(rejected)} rejected" if rejected else "")
    )
