"""Tests fork servers and commands. A forked process ends and prints as a started one."""

import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import captured, is_running
from support.waiting import until

GRAPHSTASH = [sys.executable, "-m", "graphstash"]


PROGRAM = """
import os
import subprocess
import sys

from support import starts

starts.install()
command = [sys.executable, "-m", "graphstash", "--no-such-option"]
pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
os.environ["SET_BY_A_LIBRARY"] = "1"
starts.restore_environment()
for variables in ({}, {"LANG": "other"}):
    with subprocess.Popen(command, env=os.environ | variables, **pipes) as process:
        printed, trouble = process.communicate()
    is_forked = hasattr(process, "ended_at")
    print(process.returncode, printed, b"--no-such-option" in trouble, is_forked)
starts.close()
"""


@pytest.mark.extended
def test_command_is_forked_if_its_imports_cannot_differ():
    """In a process of its own: other tests and imports change the variables of this one."""
    done = captured(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        check=True,
    )
    assert done.stdout.splitlines() == ["2 b'' True True", "2 b'' True False"]


UNFINISHED = """
import sys
import time
from pathlib import Path

from support.starts import Popen, Zygote

script = Path(sys.argv[1])
script.write_text("import time; time.sleep(1000)")
job = Popen([sys.executable, script], zygote=Zygote(sys.executable))
print(job.pid, flush=True)
time.sleep(1000)
"""


def test_forked_process_and_its_zygote_end_with_the_tests(tmp_path):
    command = [sys.executable, "-c", UNFINISHED, tmp_path / "script.py"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as tests:
        processes = [int(tests.stdout.readline())]
        while (parent := parent_of(processes[-1])) != tests.pid:
            processes.append(parent)
        tests.kill()
    assert len(processes) == 2  # the job and the zygote
    until(lambda: not any(map(is_running, processes)))


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


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


WORKER = """
import os
import subprocess
import sys
from pathlib import Path

from support import shared_zygotes, starts

starts.install()
shared_zygotes.use(SHOWN)
process = subprocess.Popen([sys.executable, "-m", "graphstash", "serve"], stdout=subprocess.PIPE)
zygote = parent_of(parent_of(process.pid))
process.kill()
process.wait()
print(zygote, "colorsys" in sys.modules, flush=True)
"""

WORKERS = """
import subprocess
import sys

from execnet.gateway_io import popen_bootstrapline

from support import starts
from support.shared_zygotes import SharedZygotes

starts.install()
zygotes = SharedZygotes("colorsys")
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
for _ in range(2):
    with subprocess.Popen([sys.executable, "-u", "-c", popen_bootstrapline], **pipes) as worker:
        code = sys.argv[1].replace("SHOWN", repr(zygotes.shown))
        print(worker.communicate(f"{code!r}\\n".encode())[0].decode(), end="")
zygotes.close()
"""


@pytest.mark.extended
def test_workers_are_forked_and_share_the_zygotes_that_they_need():
    worker = inspect.getsource(parent_of) + WORKER
    done = captured(
        [sys.executable, "-c", WORKERS, worker],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        check=True,
    )
    one, other = done.stdout.splitlines()
    assert one == other
    assert one.split()[1] == "True"
    assert not is_running(int(one.split()[0]))
