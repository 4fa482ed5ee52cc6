"""Fused updates in several processes end where those without fusion end, to the bit."""

import re
from pathlib import Path

import pytest

from support.ranks import reports_of_ranks

JOB = Path(__file__).parents[2] / "support" / "fusion_job.py"


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.extended)])
def reports(request, jobs, tmp_path_factory):
    """Of processes with data of their own; a third of a gradient is rounded, a half is not."""
    return reports_of_ranks(jobs, tmp_path_factory.mktemp("fusion"), JOB, request.param)


@pytest.mark.parametrize("way", ["DDP", "FSDP", "tensor parallel", "train"])
def test_the_trajectory_is_that_of_the_optimizer_alone(reports, way):
    for report in reports:
        equal = {name: value for name, value in report["equal"].items() if name.startswith(way)}
        assert equal
        assert all(equal.values()), [name for name, value in equal.items() if not value]


REFUSED = {
    "own hook": 'has a communication hook, .* takes only one; use when="forward"',
    "built-in hook": 'has a communication hook, .* takes only one; use when="forward"',
    "mixed precision": r"use torch\.autocast instead",
    "accumulated": 'came twice before the first step.* use when="forward"',
    "accumulated later": 'came twice between two steps.* use when="forward"',
    "inner": r"DistributedDataParallel that fuse\(\) was not given",
    "inner, views": r"DistributedDataParallel that fuse\(\) was not given",
    "join": r'^join\(\) of DistributedDataParallel .* use when="forward"',
    "clipped": r"changed between backward\(\) and step\(\)",
    "half updated": r"a backward failed after \d of 10 .* load the last checkpoint",
    "FSDP, forward": 'gather parameters before their module.* use when="backward"',
    "FSDP, reduced twice": "came twice before the first step.*; train without fusion$",
    "FSDP, offloaded": "^CPUOffloadPolicy .* train without fusion$",
    "FSDP, clipped": r"changed between backward\(\) and step\(\).*; train without fusion$",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_exact_is_refused_in_every_process(reports, case):
    for report in reports:
        assert report["refused"].keys() == REFUSED.keys()
        assert re.search(REFUSED[case], report["refused"][case])
