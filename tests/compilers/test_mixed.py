"""One `graphstash run` over a tree of processes: torch_xla, torch.compile and JAX."""

import json
import os
import subprocess
import sys

import pytest

from support.jobs import JOB
from support.run_case import RUN_CASE, case_arguments
from support.waiting import PATIENT_VARIABLES

JOBS = {
    "xla": (JOB,),
    "inductor": (RUN_CASE, *case_arguments("inductor:training", matmul=True)),
    "jax": (RUN_CASE, *case_arguments("jax_programs:training")),
}
TREE = """
import subprocess, sys, json
running = [subprocess.Popen([sys.executable, *job]) for job in json.loads(sys.argv[1])]
sys.exit(max(job.wait() for job in running))
"""


@pytest.mark.extended
def test_three_compilers_in_one_tree_share_with_another_host(server, namespace, tmp_path):
    reports = {}
    for name in ("cold", "warm"):
        host = tmp_path / name
        host.mkdir()
        jobs = [
            [str(script), str(host / f"{job}.json"), *options]
            for job, (script, *options) in JOBS.items()
        ]
        command = [sys.executable, "-m", "graphstash", "run", "--stats-file", host / "stats"]
        ended = subprocess.run(
            [*command, "--", sys.executable, "-c", TREE, json.dumps(jobs)],
            env=os.environ
            | PATIENT_VARIABLES
            | {
                "GRAPHSTASH_URL": server.url,
                "GRAPHSTASH_NAMESPACE": namespace,
                "GRAPHSTASH_CACHE_DIR": str(host / "tier"),
                "TORCHINDUCTOR_CACHE_DIR": str(host / "inductor"),
                "TORCHINDUCTOR_VEC_ISA_OK": "1",  # as in zygotes
                "PJRT_DEVICE": "CPU",
                "JAX_PLATFORMS": "cpu",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=280,
        )
        assert ended.returncode == 0, ended.stderr
        losses = {job: json.loads((host / f"{job}.json").read_text())["losses"] for job in JOBS}
        lines = [json.loads(line) for line in (host / "stats").read_text().splitlines()]
        counted = {
            job: line for job in JOBS for line in lines if f"{job}.json" in str(line["argv"])
        }
        reports[name] = losses, counted

    cold_losses, cold = reports["cold"]
    warm_losses, warm = reports["warm"]
    assert set(cold) == set(warm) == set(JOBS)
    for job in JOBS:
        assert cold[job]["published"] > 0
        assert warm[job]["misses"] == 0
        assert warm[job]["hits_server"] + warm[job]["hits_prefetched"] > 0
        assert warm[job]["fallbacks"] == {}
    assert warm_losses == cold_losses
