"""`graphstash pin` and `graphstash unpin`: protect a job's artifacts from eviction."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from graphstash_schema import ManifestName, Namespace
from graphstash_server.actor import Actor
from graphstash_server.commands.running import (
    Json,
    fail,
    parse,
    parse_age,
    plural,
    print_result,
    run_with_services,
)

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext

__all__ = ["pin", "unpin"]

_WITHOUT_END = datetime(9999, 1, 1, tzinfo=UTC)

_Job = Annotated[str, typer.Argument(help="The job, as named by `graphstash run --job`.")]
_Namespace = Annotated[str, typer.Option(help="Namespace of the job's artifacts.")]


def pin(
    job: _Job,
    *,
    namespace: _Namespace = "default",
    for_: Annotated[
        str | None, typer.Option("--for", help="How long, e.g. 30d. Default: until it is unpinned.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Protect the artifacts of a job from eviction.

    Pins what the job's manifest lists now. Run it on a host of the server, with its
    `GRAPHSTASH_*` variables.
    """
    age = None if for_ is None else parse_age(for_)

    async def work(context: "ProcessContext") -> None:
        await context.plausible_clock.observe()
        until = (
            _WITHOUT_END if age is None else max(context.clock(), context.plausible_clock()) + age
        )
        count = await context.pins.pin(
            parse(Namespace, namespace),
            parse(ManifestName, job),
            until=until,
            actor=Actor.local(),
        )
        if not count:
            fail(
                f"the job {job} has no manifest in the namespace {namespace}: run it with "
                f"`graphstash run --job {job}` first"
            )
        what = "pinned until unpinned" if for_ is None else f"pinned for {for_}"
        _report(count, job, what, until=until, as_json=as_json)

    run_with_services(work)


def unpin(job: _Job, *, namespace: _Namespace = "default", as_json: Json = False) -> None:
    """Allow eviction of a job's artifacts again."""

    async def work(context: "ProcessContext") -> None:
        count = await context.pins.unpin(
            parse(Namespace, namespace), parse(ManifestName, job), actor=Actor.local()
        )
        if not count:
            fail(f"the job {job} has no manifest in the namespace {namespace}: nothing to unpin")
        _report(count, job, "no longer pinned", until=None, as_json=as_json)

    run_with_services(work)


def _report(count: int, job: str, what: str, *, until: datetime | None, as_json: bool) -> None:
    pinned = until.isoformat() if until else None
    record = {"job": job, "artifacts": count, "pinned_until": pinned}
    print_result(f"{plural(count, 'artifact')} of the job {job}: {what}", record, as_json=as_json)
