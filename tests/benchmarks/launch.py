"""Launches training jobs as forks of a Python that has imported torch_xla (see support.zygote).

The import takes ten to twenty seconds, is the same for every arm and would drown what is measured.
Everything after it counts, the installation of the hook included.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from support.jobs import Jobs, Running

__all__ = ["GPT", "MLP", "Launcher"]

MLP = Path(__file__).with_name("mlp.py")
GPT = Path(__file__).parents[2] / "client" / "examples" / "train_gpt.py"


@dataclass(frozen=True)
class Launched:
    """A job under way."""

    running: Running
    launched: float  # this host's time, as in file stamps

    def finish(self):
        """Waits for the end.

        Returns:
            The job's report, with times since the launch beside its own: when its first line ran
            (the hook is installed before that), when it had trained, when its process had ended;
            and what the cache counted.
        """
        outcome = self.running.finish()
        trained = self.running.report.stat().st_mtime
        ended = Path(f"{self.running.errors}.status").stat().st_mtime
        return outcome.report | {
            "begun_seconds": trained - self.launched - outcome.report["total_seconds"],
            "trained_seconds": trained - self.launched,
            "ended_seconds": ended - self.launched,
            "stats": outcome.stats,
        }


class Launcher(Jobs):
    """Starts scripts that take `--report FILE`."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def launch(self, script, directory, *options, hook=False, **environment):
        """Starts a job; `environment` is added to this process's.

        Args:
            directory: gets the report and the like; the local tier, unless it is set otherwise.
            hook: whether graphstash is there at all.
        """
        directory.mkdir(parents=True, exist_ok=True)
        report = directory / f"report-{time.monotonic_ns()}.json"
        errors, stats = report.with_suffix(".errors"), report.with_suffix(".stats")
        errors.touch()
        settings = {
            "PJRT_DEVICE": "CPU",
            "GRAPHSTASH_CACHE_DIR": str(directory / "tier"),
            "GRAPHSTASH_STATS_FILE": str(stats),
        }
        arguments = [str(script), "--report", str(report), *map(str, options)]
        launched = time.time()
        self._fork(arguments, os.environ | settings | environment, errors, hook=hook)
        return Launched(Running(report, stats, errors, None), launched)
