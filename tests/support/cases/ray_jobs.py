"""A job of JAX on a local Ray cluster, whose workers get the cache by their environment."""

import os
import sys
from pathlib import Path
from typing import Any

import ray


class _Trainer:
    """An actor: a process of its own, such as Ray Train starts."""

    def train(self) -> dict[str, Any]:
        import graphstash
        from support.cases.jax_programs import training

        report = training()
        stats = graphstash.stats()
        graphstash.uninstall()  # publishes, because Ray runs no exit handlers
        return {
            "process": os.getpid(),
            "compiled": report["compiled"],
            "losses": report["losses"],
            "hits": stats.hits,
            "fallbacks": sum(stats.fallbacks.values()),
            "has_client": "graphstash._http.client" in sys.modules,
        }


def trained(*, rounds: list[tuple[int, dict[str, str]]], token: str) -> dict[str, Any]:
    """Train in rounds: in this number of workers at once, with these variables.

    Returns the reports of the rounds, and the names of Ray's files that contain what is in the file
    `token`.
    """
    shared = {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    files = Path(ray._private.worker._global_node.get_session_dir_path())
    reports = []
    for count, variables in rounds:
        actor: Any = ray.remote(num_cpus=1, runtime_env={"env_vars": shared | variables})(_Trainer)
        workers = [actor.remote() for _ in range(count)]
        reports.append(ray.get([worker.train.remote() for worker in workers]))
        del workers
    ray.shutdown()
    secret = Path(token).read_bytes()
    leaks = [
        path.name for path in files.rglob("*") if path.is_file() and secret in path.read_bytes()
    ]
    return {"rounds": reports, "leaks": leaks}
