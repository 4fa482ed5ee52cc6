"""`graphstash pin` and `unpin`: keep a job's artifacts from eviction."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from graphstash_schema import InvalidValueError, ManifestName, Namespace
from graphstash_server.commands.running import fail, parse_age, run_with_services

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext

__all__ = ["pin", "unpin"]

_FOR_EVER = datetime(9999, 1, 1, tzinfo=UTC)

_Job = Annotated[str, typer.Argument(help="The job, as named by `graphstash run --job`.")]
_Namespace = Annotated[str, typer.Option(help="Where the job's artifacts are.")]


def pin(
    job: _Job,
    *,
    namespace: _Namespace = "default",
    for_: Annotated[
        str | None, typer.Option("--for", help="How long, e.g. 30d; for ever by default.")
    ] = None,
) -> None:
    """Keep the artifacts of a job from eviction, whatever their value.

    Pins what the job's manifest names now. Run it with the settings of a server.
    """
    until = _FOR_EVER if for_ is None else datetime.now(UTC) + parse_age(for_)

    async def work(context: "ProcessContext") -> None:
        count = await context.pins.pin(*_names(namespace, job), until=until)
        _say(count, job, "pinned for ever" if for_ is None else f"pinned for {for_}")

    run_with_services(work)


def unpin(job: _Job, *, namespace: _Namespace = "default") -> None:
    """Let the artifacts of a job be evicted again."""

    async def work(context: "ProcessContext") -> None:
        count = await context.pins.unpin(*_names(namespace, job))
        _say(count, job, "not pinned any more")

    run_with_services(work)


def _names(namespace: str, job: str) -> tuple[Namespace, ManifestName]:
    try:
        return Namespace(namespace), ManifestName(job)
    except InvalidValueError as error:
        fail(str(error), status=2)


def _say(count: int, job: str, what: str) -> None:
    if not count:
        fail(f"the job {job} has no manifest: run it with `graphstash run --job {job}` first")
    typer.echo(f"{count} artifacts of the job {job} are {what}")
