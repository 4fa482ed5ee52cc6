import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter, OrderedDict
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from graphstash import GraphstashError
from graphstash.training import checkpoints as checkpoint
from graphstash.training.checkpoints import CheckpointError, Checkpoints
from support.host import file_size_limit
from support.run_case import RUN_CASE, case_arguments


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def saved(directory, *steps, keep=3):
    """Write checkpoints of some steps."""
    checkpoints = Checkpoints(directory, keep=keep)
    for step in steps:
        checkpoints.save(step, {"weights": torch.full((1000,), float(step))}).result()
    return checkpoints


class Color(IntEnum):
    RED = 3


def test_saved_state_is_loaded(tmp_path):
    state = {
        "weights": torch.randn(3, 4),
        "parameter": nn.Parameter(torch.randn(2)),
        "half": torch.randn(3).to(torch.bfloat16),
        "words": torch.tensor([2**32 - 1]).to(torch.uint32),
        "numbers": [1, -2.5, True, None, 2**64 - 1, (np.float64(0.1), np.int64(7), Color.RED)],
        "text": {"name": "x", 3: b"bytes"},
        "milestones": Counter([30, 30, 60]),
    }
    state["model"] = nn.BatchNorm1d(3).state_dict()
    with Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save(7, state).result()
        loaded = checkpoints.load()
    assert (loaded.step, loaded.path, path) == (7, path, tmp_path / "step-00000007.pt")
    for name in ("weights", "parameter", "half", "words"):
        assert torch.equal(loaded.state[name], state[name].detach())
        assert loaded.state[name].dtype == state[name].dtype
    for name in ("numbers", "text", "milestones"):
        assert loaded.state[name] == state[name]
    assert type(loaded.state["milestones"]) is Counter
    assert type(loaded.state["model"]) is OrderedDict
    assert loaded.state["model"]._metadata == state["model"]._metadata  # versions of modules
    assert {type(number) for number in loaded.state["numbers"][-1]} == {float, int}


def test_next_step_does_not_change_the_state_being_saved(tmp_path):
    weights = torch.zeros(1_000_000)
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(1, 4):
            weights += 1
            checkpoints.save(step, {"weights": weights})
            weights += 0.5
        checkpoints.wait()
        weights -= 0.5
        assert torch.equal(checkpoints.load().state["weights"], weights)


def test_shared_memory_is_written_once_and_a_view_without_its_base(tmp_path):
    tied = torch.randn(100_000)
    state = {"in": tied, "out": tied.detach(), "head": tied[:10], "row": torch.randn(1000, 1000)[3]}
    with Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save(1, state).result()
        loaded = checkpoints.load().state
    assert path.stat().st_size < 1.1 * tied.nbytes
    assert loaded["in"].data_ptr() == loaded["out"].data_ptr()
    assert torch.equal(loaded["head"], tied[:10])


def test_nothing_is_loaded_without_checkpoint(tmp_path):
    with Checkpoints(tmp_path / "new" / "directory") as checkpoints:
        assert checkpoints.load() is None


def test_newest_checkpoints_and_other_files_are_kept(tmp_path):
    others = ["step-1.pt", "step-00000001.pt.bak", "best.pt", ".step-00000001.pt", ".hidden.tmp"]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / "step-00000003").mkdir()
    with saved(tmp_path, 1, 5, 10, 10, 100_000_000, keep=2) as checkpoints:
        assert checkpoints.load().step == 100_000_000
    own = ["step-00000003", "step-00000010.pt", "step-100000000.pt"]
    assert names(tmp_path) == sorted([*others, *own])
    assert all((tmp_path / name).read_text() == "mine" for name in others)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit_of_a_tensor(path):
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((1000,), 2.0).numpy().tobytes()) + 1999] ^= 4
    path.write_bytes(content)


def take_another_step(path):
    path.write_bytes(path.with_name("step-00000001.pt").read_bytes())


def take_a_later_step(path):
    torch.save({"format": 1, "step": 3, "state": {"weights": torch.full((1000,), 3.0)}}, path)


def take_another_format(path):
    torch.save({"format": 99, "step": 2, "state": {}}, path)


def take_something_else(path):
    torch.save([1, 2], path)


def make_it_a_directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip_a_bit_of_a_tensor,
        take_another_step,
        take_a_later_step,
        take_another_format,
        take_something_else,
        make_it_a_directory,
    ],
)
def test_damaged_checkpoint_is_skipped_and_named(tmp_path, caplog, damage):
    with saved(tmp_path, 1, 2) as checkpoints:
        damage(tmp_path / "step-00000002.pt")
        loaded = checkpoints.load()
    assert loaded.step == 1
    assert torch.equal(loaded.state["weights"], torch.full((1000,), 1.0))
    assert str(tmp_path / "step-00000002.pt") in caplog.text


def test_training_does_not_restart_if_all_checkpoints_are_damaged(tmp_path):
    with saved(tmp_path, 1, 2) as checkpoints:
        for path in tmp_path.iterdir():
            truncate(path)
        with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* move them away"):
            checkpoints.load()


def test_checkpoints_saved_after_a_damaged_one_are_kept(tmp_path):
    with saved(tmp_path, 1, 3, keep=1) as checkpoints:
        truncate(tmp_path / "step-00000003.pt")
        checkpoints.save(2, {}).result()
        assert checkpoints.load().step == 2


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_loading_runs_no_code_of_checkpoint(tmp_path):
    proof = tmp_path / "proof"
    with saved(tmp_path, 1) as checkpoints:
        torch.save({"format": 1, "step": 2, "state": Code(proof)}, tmp_path / "step-00000002.pt")
        assert checkpoints.load().step == 1
        assert not proof.exists()
        pickle.loads(pickle.dumps(Code(proof)))
    assert proof.exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [1, object()]}}, r"state\['a'\]\['b'\]\[1\] is a builtins.object"),
        ({"a": np.zeros(3)}, r"state\['a'\] is a numpy.ndarray"),
        ({"a": torch.device("cpu")}, r"state\['a'\] is a torch.device"),
        ({"a": {object(): 1}}, r"a key of state\['a'\] is a builtins.object"),
        ({"a": {torch.zeros(1): 1}}, "is a tensor: use a string"),
    ],
)
def test_state_that_needs_code_to_load_is_refused_by_its_path(tmp_path, state, message):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(GraphstashError, match=message):
        checkpoints.save(1, state)
    assert names(tmp_path) == []


def test_arguments_out_of_range_are_refused(tmp_path):
    with pytest.raises(GraphstashError, match=r"keep must be at least 1 \(got 0\)"):
        Checkpoints(tmp_path, keep=0)
    (tmp_path / "file").touch()
    with pytest.raises(GraphstashError, match="file cannot hold checkpoints"):
        Checkpoints(tmp_path / "file")
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(GraphstashError, match=r"step must be at least 0 \(got -1\)"),
    ):
        checkpoints.save(-1, {})


SAVES = """
    import os, sys, time
    from graphstash.training.checkpoints import Checkpoints

    checkpoints = Checkpoints(sys.argv[1])
    checkpoints.save(7, {}).result()
    if os.fork() == 0:  # as a worker of a loader, it ends some time after a killed parent
        print("saved", flush=True)
    time.sleep(600)
"""


def test_a_directory_to_which_another_process_saves_is_refused_until_it_ends(tmp_path):
    with (
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVES), tmp_path],
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as job,
        Checkpoints(tmp_path, keep=1) as checkpoints,
    ):
        try:
            assert job.stdout.readline() == b"saved\n"
            assert checkpoints.load().step == 7
            with pytest.raises(GraphstashError, match="another process saves its checkpoints to"):
                checkpoints.save(8, {})
            assert names(tmp_path) == ["step-00000007.pt"]
            job.kill()
            job.wait()
            checkpoints.save(8, {}).result()
            assert names(tmp_path) == ["step-00000008.pt"]
        finally:
            os.killpg(job.pid, signal.SIGKILL)


def test_one_copy_is_in_memory_at_a_time(tmp_path, monkeypatch):
    events = []

    def copy(state):
        events.append("copy")
        return dict(state)

    def write(path, step, state):
        events.append("begin")
        time.sleep(0.05)  # long enough for the next copy, unless it is held back
        events.append("end")

    monkeypatch.setattr(checkpoint, "to_host", copy)
    monkeypatch.setattr(checkpoint, "write", write)
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(3):
            checkpoints.save(step, {})
    assert events == ["copy", "begin", "end"] * 3


@pytest.mark.parametrize("missing", ["most", "half", "a byte"])
def test_a_full_disk_is_reported_by_the_next_save(tmp_path, missing):
    state = {"weights": torch.randn(100_000)}
    with Checkpoints(tmp_path) as checkpoints:
        size = checkpoints.save(1, state).result().stat().st_size
        with file_size_limit({"most": 100, "half": size // 2, "a byte": size - 1}[missing]):
            checkpoints.save(2, state)
            with pytest.raises(CheckpointError, match=r"step-00000002.pt .* too large.* make room"):
                checkpoints.save(3, state)
        assert names(tmp_path) == ["step-00000001.pt"]
        checkpoints.save(3, state)
        checkpoints.wait()
        assert checkpoints.load().step == 3


def test_a_full_disk_is_reported_at_the_end_unless_the_failure_was_read(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with file_size_limit(100):
        checkpoints.save(2, {"weights": torch.randn(1000)})
        with pytest.raises(CheckpointError, match="too large"):
            checkpoints.close()
    checkpoints.close()
    with Checkpoints(tmp_path) as checkpoints, file_size_limit(100):
        assert checkpoints.save(2, {"weights": torch.randn(1000)}).exception() is not None


def test_a_full_disk_does_not_hide_why_training_failed(tmp_path):
    def train():
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(2, {"weights": torch.randn(1000)})
            raise ZeroDivisionError

    with file_size_limit(100), pytest.raises(ZeroDivisionError) as raised:
        train()
    assert "step-00000002.pt could not be written" in raised.value.__notes__[0]


def test_checkpoint_saved_before_failure_is_written(tmp_path):
    def train():
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(2, {"weights": torch.randn(1_000_000)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.load().step == 2


def test_leftovers_of_killed_process_are_removed_and_live_files_kept(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        temporary, file = checkpoint._create(tmp_path / "step-00000001.pt")
        with file:
            checkpoints.load()
            assert names(tmp_path) == [temporary.name]
        checkpoints.load()
    assert names(tmp_path) == []


def test_file_removed_before_it_was_locked_is_created_again(tmp_path, monkeypatch):
    taken = []

    def flock(file, operation):
        if not taken:
            taken.extend(tmp_path.glob(".step-*"))
            taken[0].unlink()

    monkeypatch.setattr(checkpoint.fcntl, "flock", flock)
    with saved(tmp_path, 1) as checkpoints:
        assert len(taken) == 1
        assert checkpoints.load().step == 1


KILLS = """
    import os, random, signal, sys, time, torch
    from pathlib import Path
    from graphstash.training.checkpoints import Checkpoints

    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    chance = random.Random(0)
    last = while_writing = rounds = 0
    while rounds < int(sys.argv[2]) or while_writing < 3:
        rounds += 1
        pid = os.fork()
        if pid == 0:
            checkpoints, step = Checkpoints(directory), last
            while True:
                step += 1
                state = {str(n): torch.full((20_000,), float(step)) for n in range(40)}
                checkpoints.save(step, state)
        while not any(int(path.stem[5:]) > last for path in directory.glob("step-*.pt")):
            time.sleep(0.001)
        while not any(directory.glob(".step-*.tmp")):
            pass
        time.sleep(chance.uniform(0, 0.01))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while_writing += any(directory.glob(".step-*.tmp"))
        with Checkpoints(directory) as checkpoints:
            found = checkpoints.load()
        assert found.step > last, found.step
        assert not any(directory.glob(".step-*.tmp"))
        assert all((t == found.step).all() and len(t) == 20_000 for t in found.state.values())
        assert len(found.state) == 40
        last = found.step
"""


def test_killed_at_any_moment_the_newest_checkpoint_is_complete(tmp_path, is_extended):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLS), tmp_path, "16" if is_extended else "8"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot be read" not in done.stderr


@pytest.mark.extended
def test_torch_xla_copies_state_in_one_transfer_and_resumes_to_the_bit(jobs, tmp_path):
    new, resumed = (
        jobs.start(
            tmp_path / start,
            *case_arguments(f"checkpoint:{start}", checkpoints=tmp_path / "checkpoints"),
            script=RUN_CASE,
            under="",
        )
        .finish()
        .report
        for start in ("new", "resumed")
    )
    assert resumed["losses"] == new["losses"][5:]
    assert resumed["parameters"] == new["parameters"]
