"""Several processes of torch.distributed with gloo."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.jobs import Jobs, Running

__all__ = ["reports_of_ranks", "running_ranks"]


@contextmanager
def running_ranks(
    jobs: Jobs, directory: Path, job: Path, world: int, *more: object
) -> Iterator[list[Running]]:
    """The processes of a job, by rank, forked from one that has imported torch.

    The job takes the report's path, `--on gloo`, `--rank`, `--world` and `--rendezvous`. It ends
    with `os._exit` after a barrier: `destroy_process_group` may wait, with the interpreter lock
    held, for a thread that wants the lock (torch 2.7).
    """
    place = ("--on", "gloo", "--world", world, "--rendezvous", directory / f"store-{world}")
    running = []
    try:
        for rank in range(world):
            options = (*place, "--rank", rank, *more)
            at = directory / f"{world}-{rank}"
            running.append(jobs.start(at, *options, script=job, under="torch"))
        yield running
    finally:
        for process in running:
            process.kill()


def reports_of_ranks(jobs: Jobs, directory: Path, job: Path, world: int) -> list[Any]:
    """The reports of a job's processes, by rank."""
    with running_ranks(jobs, directory, job, world) as running:
        return [process.finish().report for process in running]
