"""Tests fork servers and commands. A forked process ends and prints as a started one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

GRAPHSTASH = [sys.executable, "-m", "graphstash"]


PROGRAM = """
import os
import subprocess
import sys

from support import starts

starts.install()
command = [sys.executable, "-m", "graphstash", "--no-such-option"]
pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
for variables in ({}, {"LANG": "other"}):
    with subprocess.Popen(command, env=os.environ | variables, **pipes) as process:
        printed, trouble = process.communicate()
    is_forked = hasattr(process, "ended_at")
    print(process.returncode, printed, b"--no-such-option" in trouble, is_forked)
starts.close()
"""


def test_command_is_forked_if_its_imports_cannot_differ():
    """In a process of its own: other tests and imports change the variables of this one."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["2 b'' True True", "2 b'' True False"]


def test_forked_command_leads_a_session_and_is_killed_by_a_signal(tmp_path):
    process = subprocess.Popen(
        [*GRAPHSTASH, "serve", "--port", "0", "--insecure", "--data-dir", tmp_path / "data"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout.readline() == f"data directory: {tmp_path / 'data'}\n".encode()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
        assert Path(f"/proc/{process.pid}/cwd").readlink() == tmp_path
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        assert process.poll() == -signal.SIGKILL
