"""Several processes of torch.distributed with gloo."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

__all__ = ["start_ranks"]


def start_ranks(directory: Path, job: Path, world: int) -> list[Any]:
    """The reports of a job's processes, by rank.

    The job takes the report's path, `--on gloo`, `--rank`, `--world` and `--rendezvous`. It ends
    with `os._exit` after a barrier: `destroy_process_group` may wait, with the interpreter lock
    held, for a thread that wants the lock (torch 2.7).
    """
    with ExitStack() as stack:
        running = []
        for rank in range(world):
            report = directory / f"{world}-{rank}.json"
            errors = stack.enter_context(report.with_suffix(".errors").open("w+"))
            place = ("--rank", rank, "--world", world, "--rendezvous", directory / f"store-{world}")
            command = [sys.executable, job, report, "--on", "gloo", *place]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen([*map(str, command)], env=environment, stderr=errors)
            stack.callback(process.wait)
            stack.callback(process.kill)
            running.append((process, report))
        for process, report in running:
            status = process.wait(200)
            assert status == 0, report.with_suffix(".errors").read_text()
        return [json.loads(report.read_text()) for _, report in running]
