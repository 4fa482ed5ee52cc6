"""A real Slurm cluster of one node on this host, with daemons, ports and keys of its own."""

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Final, Self

from support.ports import reserved_port
from support.processes import captured
from support.waiting import until

_START_SECONDS: Final = 60

# `cred_expire` and the intervals let a requeued job start after seconds instead of two minutes.
_SETTINGS: Final = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
StateSaveLocation={directory}/controller
SlurmdSpoolDir={directory}/node
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES State=UP
{more}
"""


class Slurm:
    """A running cluster; a context manager that ends it and removes its files.

    Args:
        settings: more settings of slurm.conf, such as `Prolog`.
    """

    def __init__(self, **settings: object) -> None:
        # munged refuses a socket that other users cannot reach, as in pytest's directories.
        self.directory = Path(tempfile.mkdtemp(prefix="graphstash-slurm-"))
        self.directory.chmod(0o755)
        for name in ("munge", "controller", "node"):
            (self.directory / name).mkdir()
        configuration = self.directory / "slurm.conf"
        configuration.write_text(
            _SETTINGS.format(
                host=socket.gethostname().partition(".")[0],
                user=pwd.getpwuid(os.geteuid()).pw_name,
                directory=self.directory,
                controller_port=reserved_port(),
                node_port=reserved_port(),
                more="\n".join(f"{name}={value}" for name, value in settings.items()),
            )
        )
        self._environment = os.environ | {
            "SLURM_CONF": str(configuration),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def run(self, *command: object, **variables: str) -> str:
        """Run a command of Slurm, and return its output."""
        environment = self._environment | variables
        done = captured(command, env=environment, cwd=self.directory, timeout=_START_SECONDS)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def submit(self, script: Path, *options: str, **variables: str) -> str:
        """Submit a script, and return the job's number."""
        return self.run("sbatch", "--parsable", *options, script, **variables)

    def field(self, name: str, *, job: str) -> str:
        """Return a field of `scontrol show job`."""
        fields = self.run("scontrol", "show", "job", job).split()
        return next(each.partition("=")[2] for each in fields if each.startswith(f"{name}="))

    def finish(self, job: str) -> str:
        """Wait for the job's end and for its epilog, and return its state."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until(lambda: self.field("JobState", job=job) in ended)
        self.until_idle()
        return self.field("JobState", job=job)

    def until_idle(self) -> None:
        """Wait until the node can take jobs and runs none: no prolog or epilog, and not drained."""
        until(lambda: self.run("sinfo", "--noheader", "--format=%T") == "idle")

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("*.log")))

    def _start(self, *command: str | Path) -> None:
        with (self.directory / f"{Path(command[0]).name}.out").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(command, env=self._environment, stdout=output, stderr=output)
            )

    def __enter__(self) -> Self:
        munge = self.directory / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o600)
        names = ("socket", "key-file", "log-file", "pid-file", "seed-file")
        files = [f"--{name}={munge / name.removesuffix('-file')}" for name in names]
        try:
            self._start("munged", "--foreground", *files)
            until((munge / "socket").exists, seconds=_START_SECONDS)
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D")
            self.until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
