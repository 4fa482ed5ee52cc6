"""`graphstash publish`: publish what jobs on this host compiled and could not send."""

from contextlib import closing
from typing import Annotated

import typer

from graphstash._artifacts.bundle import BundleEntry
from graphstash._artifacts.catch_up import CatchUp, Outcome, Sent
from graphstash._artifacts.stash import Stash
from graphstash._cli.output import (
    Json,
    NamespaceOption,
    Url,
    byte_progress,
    err,
    fail,
    format_bytes,
    load_config,
    plural,
    print_json,
    say,
)
from graphstash._cli.patience import PatientClient, fail_midway
from graphstash.config import ClientConfig
from graphstash.errors import CacheError
from graphstash_schema import ArtifactKey
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

    Jobs do this automatically, for the server that was down. This command also publishes what
    jobs without any server compiled. It publishes nothing that was compiled with --read-only or
    GRAPHSTASH_URL=none, or that came from a server or a bundle.

    If it is interrupted, run it again to continue. The exit status is 1 if an artifact cannot be
    read or does not verify, or if the server refuses it or stops answering.
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
    publication, failure = _Publication(config), None
    try:
        publication.run(is_dry=dry_run)
    except CacheError as error:
        failure = error
    if as_json:
        print_json(
            {
                "namespace": config.namespace,
                "published": len(publication.published),
                "published_bytes": publication.published_bytes,
                "present": publication.present,
                "differing": publication.differing,
                "gone": publication.gone,
                "rejected": publication.rejected,
                "left": publication.left,
                "is_dry_run": dry_run,
            }
        )
    else:
        _show(publication, is_dry=dry_run)
    if failure is not None:
        fail_midway(failure)
    if publication.rejected:
        raise typer.Exit(ExitStatus.FAILED)


class _Publication:
    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self.published: list[BundleEntry] = []
        self.present = 0
        self.differing: list[str] = []
        self.gone = 0
        self.rejected: list[dict[str, str]] = []
        self.left = 0
        self._settled: set[ArtifactKey] = set()

    @property
    def published_bytes(self) -> int:
        return sum(each.size_bytes for each in self.published)

    def run(self, *, is_dry: bool) -> None:
        """Publish all artifacts, or only verify them.

        Raises:
            CacheError: the server does not answer, or does not accept the calls.
        """
        with (
            Stash(self._config) as stash,
            closing(PatientClient(self._config)) as server,
            byte_progress() as progress,
        ):
            task = progress.add_task("publishing", total=None)

            def done(entry: BundleEntry, outcome: Outcome) -> None:
                self._count(entry, outcome)
                progress.advance(task, entry.size_bytes)

            catch_up = CatchUp(stash, server, with_any=True, done=done, is_dry=is_dry)
            try:
                wanted = catch_up.find_publishable()
                progress.update(task, total=sum(each.size_bytes for each in wanted))
                catch_up.publish(wanted)
            finally:
                recorded = {each.key for each in stash.unsent.entries(with_any=True)}
                self.left = len(recorded - self._settled)

    def _count(self, entry: BundleEntry, outcome: Outcome) -> None:
        self._settled.add(entry.key)
        match outcome:
            case Sent.PUBLISHED:
                self.published.append(entry)
            case Sent.PRESENT:
                self.present += 1
            case Sent.DIFFERING:
                self.differing.append(str(entry.key))
            case Sent.GONE:
                self.gone += 1
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
        + (f", {publication.gone} no longer on this host" if publication.gone else "")
        + (f", {len(rejected)} rejected" if rejected else "")
        + (f", {publication.left} left" if publication.left else "")
    )
