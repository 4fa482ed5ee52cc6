"""`graphstash tune` shows the schedules that real jobs have found."""

import json
import os
import re
import shlex
import stat
import sys

import pytest

from graphstash.tuning.memory.problem import HELION_LABEL, Problem
from graphstash_schema import ArtifactKey, ArtifactMetadata, DeviceType
from graphstash_schema.explanation import make_description
from support.json_page import fields_of
from support.processes import graphstash
from support.waiting import variables_of

RECORD = {"configuration": {"a": 1}, "cost": 1e-3, "spread": 0.0, "count": 1, "failure": None}
ANSWER = {"measurements": [RECORD], "hosts": ["ana@node04"], "measured": 1}
LABEL = Problem("matmul", (8,), "float32", DeviceType("cuda-sm_90"), "made-up 1.0").label


@pytest.fixture
def publish(hosts):
    """Return a function that publishes an answer as a search does."""

    def publish(answer=ANSWER, label=LABEL):
        key = ArtifactKey.parse("schedule", "cuda-sm_90", "8" * 64)
        payload = json.dumps(answer).encode()
        host = hosts("publisher")
        host.put(key, payload, ArtifactMetadata(compile_seconds=1, raw_size_bytes=len(payload)))
        host.server.describe([make_description(key, label, {"a": "b"})])
        return key

    return publish


def test_show_lists_schedules_and_export_writes_them(team, command, tmp_path):
    team.run("first", size=1024)
    team.run("second", size=16, device="cuda-sm_80")
    every = json.loads(command("tune", "show", "--json").stdout)
    assert [each["shape"] for each in every] == [[16, 16, 16], [1024, 1024, 1024]]
    (large,) = json.loads(command("tune", "show", "MATMUL float32 - 1024x", "--json").stdout)
    assert large == every[1]
    assert large["configuration"] == {"block_m": 128, "block_n": 128, "block_k": 128}
    assert (large["cost"], large["spread"], large["failure"]) == (1e-3, 0.0, None)
    assert set(large) == fields_of("tune show")
    assert large["count"] == 3
    assert large["measured"] > 10
    assert len(large["hosts"]) == 1
    assert (large["device_type"], large["compiler"]) == ("cuda-sm_90", "made-up 1.0")
    (small,) = json.loads(command("tune", "show", "--json", "--device-type=cuda-sm_80").stdout)
    assert small == every[0]

    lines = command("tune", "show", "1024").stdout.splitlines()
    assert "matmul float32 - 1024x1024x1024" in lines[1]
    assert "1 ms" in lines[1]
    assert "block_k=128 block_m=128 block_n=128" in lines[1]
    assert lines[2].strip() == "on cuda-sm_90, made-up 1.0"

    file = tmp_path / "schedules.json"
    assert "2 schedules written" in command("tune", "export", file).stdout
    assert json.loads(file.read_text()) == every


NO_ANSWERS = {
    "nothing known of it": {"measurements": [{"configuration": {"a": [1]}}]},
    "a cost without bounds": {
        "measurements": [RECORD | {"cost": 10**400}],
        "hosts": [],
        "measured": 1,
    },
    "a count without bounds": ANSWER | {"measured": 10**4000},
}


def test_show_names_location_of_helion_entries(command, publish):
    assert "Helion" not in command("tune", "show").stderr
    publish({}, f"{HELION_LABEL} train.py:7 in step")
    shown = command("tune", "show", "--json")
    assert json.loads(shown.stdout) == []
    line = re.search("graphstash (ls 'Helion kernel' --kind schedule)", shown.stderr)[1]
    assert "train.py:7" in command(*shlex.split(line)).stdout


@pytest.mark.parametrize("case", NO_ANSWERS)
def test_malformed_answer_is_reported_and_left_out(command, publish, case):
    key = publish(NO_ANSWERS[case])
    result = command("tune", "show")
    assert f"rejected: {key}" in result.stderr
    assert "no problem is tuned in this namespace" in result.stdout
    assert "no such problem was tuned" in command("tune", "show", "other").stdout


def test_terminal_without_micro_sign_shows_the_rest(config, publish):
    publish()
    variables = variables_of(config()) | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    assert "0 ?s" in graphstash("tune", "show", check=True, **variables).stdout


def test_impossible_request_is_refused_with_advice(command, tmp_path):
    nothing = command("tune", "export", tmp_path / "a.json", status=1)
    assert "no problem is tuned in this namespace" in nothing.stderr
    wrong = command("tune", "show", "--device-type", "A B", status=2)
    assert "device type" in wrong.stderr
    away = command("tune", "show", url="http://127.0.0.1:9", status=1)
    assert "graphstash doctor" in away.stderr


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ("no_such_compiler", "no_such_compiler is not installed here\n"),
        ("xgboost", "xgboost is not installed here: graphstash[tuning] brings it\n"),
    ],
)
def test_search_names_missing_package(command, tmp_path, monkeypatch, absent, message):
    # monkeypatch also removes the entry that the command adds.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, absent, None)
    (tmp_path / f"{absent}_task.py").write_text(f"import {absent}")
    for target in (f"{absent}_task:task", f"{tmp_path}/{absent}_task.py:task"):
        failed = command("tune", "search", target, status=2)
        assert failed.stderr.endswith(message)


def test_search_refuses_relative_module(command):
    failed = command("tune", "search", "./tasks:task", status=2)
    assert "'./tasks:task': expected module:" in failed.stderr


def test_an_export_keeps_links_modes_and_devices(command, publish, tmp_path):
    publish()
    file, link = tmp_path / "file", tmp_path / "link"
    umask = os.umask(0o027)
    try:
        command("tune", "export", file)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    written = file.read_text()
    file.write_text("")
    file.chmod(0o604)
    link.symlink_to(file)
    command("tune", "export", link)
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o604
    assert file.read_text() == written
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:  # noqa: PTH123 - of a descriptor
        command("tune", "export", pipe)
        assert reader.read() == written
    assert pipe.is_fifo()


def test_an_export_that_cannot_be_written_leaves_nothing(command, publish, tmp_path):
    publish()
    (tmp_path / "file").touch()
    failed = command("tune", "export", tmp_path / "file" / "a.json", status=1)
    assert "cannot be written" in failed.stderr
    (tmp_path / "folder").mkdir()
    command("tune", "export", tmp_path / "folder", status=1)
    assert not list(tmp_path.glob(".graphstash-*"))
