"""TensorBoard and Weights & Biases, offline, read back the curves that the callbacks wrote."""

import json
import os
import subprocess

import pytest

from graphstash import Stats
from support.environments import python_of
from support.run_case import RUN_CASE, case_arguments
from support.waiting import PATIENT_VARIABLES

pytestmark = pytest.mark.extended  # needs an environment of its own


@pytest.fixture
def curves(server, namespace, tmp_path):
    def curves(tracker):
        report, folder = tmp_path / "report.json", tmp_path / "log"
        folder.mkdir()
        options = case_arguments(f"trackers:{tracker}", folder=folder)
        settings = PATIENT_VARIABLES | {
            "GRAPHSTASH_URL": server.url,
            "GRAPHSTASH_NAMESPACE": namespace,
            "GRAPHSTASH_CACHE_DIR": tmp_path / "tier",
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "HOME": tmp_path,
        }
        subprocess.run(
            [python_of("trackers"), RUN_CASE, report, *options],
            env=os.environ | {name: str(value) for name, value in settings.items()},
            check=True,
            timeout=120,
        )
        return json.loads(report.read_text())

    return curves


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_the_curves_of_a_run_have_its_hits_misses_and_savings(curves, tracker):
    drawn = curves(tracker)
    assert set(Stats().scalars()) <= set(drawn)
    assert drawn["graphstash/hits"] == [[10, 0.0], [20, 1.0], [20, 1.0]]
    assert drawn["graphstash/misses"] == [[10, 1.0], [20, 1.0], [20, 1.0]]
    assert [step for step, _ in drawn["graphstash/saved_compile_seconds"]] == [10, 20, 20]
    assert [step for step, _ in drawn["graphstash/saved_wall_seconds"]] == [10, 20, 20]
