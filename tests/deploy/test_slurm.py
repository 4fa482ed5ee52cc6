"""The Slurm files of docs/quick-start/clusters.md, on a real cluster of one node.

The prolog gives every job a new directory, so each job here finds a node without local copies.
"""

import os
import stat
import sysconfig
from types import SimpleNamespace

import pytest
from snippets import read

from support.ports import reserved_port
from support.processes import captured
from support.slurm import Slurm
from support.tokens import Guarded
from support.waiting import PATIENT_VARIABLES, until

TRAIN = """
import os, signal, sys
import graphstash
from graphstash_schema import ArtifactKey, ArtifactKind, DeviceType, fingerprint_of

def build():
    print("compiled", flush=True)
    return b"built"

parts = {"program": os.environ["PROGRAM"]}
key = ArtifactKey(
    kind=ArtifactKind.SCHEDULE,
    device_type=DeviceType("cpu"),
    fingerprint=fingerprint_of(ArtifactKind.SCHEDULE, parts),
)
assert graphstash.get_or_compile(key, build, parts=parts) == b"built"
print("trained", flush=True)
if "HANGS" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
    signal.pause()
"""


def written(directory, **places):
    """Write the page's files with other places, and return their paths by title."""
    page = {each.title: each.code for each in read("docs/quick-start/clusters.md").snippets}
    paths = {}
    for title in ("graphstash.sh", "train.sbatch"):
        text = page[title].replace("/var/lib/graphstash", str(directory / "scratch"))
        for old, new in places.items():
            text = text.replace(old, new)
        paths[title] = directory / title
        paths[title].write_text(text)
        paths[title].chmod(0o755)
    return paths


# -- the script of the nodes, without Slurm --


@pytest.fixture
def node(tmp_path):
    """The scratch directory, the job's user, and a function that runs the script as slurmd does."""
    script = written(tmp_path)["graphstash.sh"]
    user = 65534 if os.geteuid() == 0 else os.geteuid()

    def run(context):
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(user)}
        done = captured([script], env={"SLURM_SCRIPT_CONTEXT": f"{context}_slurmd"} | job)
        assert done.returncode == 0, done.stderr

    return SimpleNamespace(scratch=tmp_path / "scratch", user=user, run=run)


def test_prolog_gives_the_job_an_empty_private_directory(node):
    for _ in range(2):  # the second time as after a crash of the node, without an epilog
        node.run("prolog")
        (status, left) = (node.scratch / "7").stat(), list((node.scratch / "7").iterdir())
        assert (status.st_uid, stat.S_IMODE(status.st_mode), left) == (node.user, 0o700, [])
        (node.scratch / "7" / "leftover").touch()


def test_epilog_removes_the_directory_of_its_job_only(node):
    node.run("prolog")
    (node.scratch / "8").mkdir()
    node.run("epilog")
    assert [path.name for path in node.scratch.iterdir()] == ["8"]
    node.run("epilog")


@pytest.mark.parametrize("trap", ["link", "open to others", "file"])
def test_script_does_not_use_a_scratch_directory_that_another_user_controls(node, tmp_path, trap):
    victim = tmp_path / "victim"
    (victim / "7").mkdir(parents=True)
    if trap == "link":
        node.scratch.symlink_to(victim)
    elif trap == "file":
        node.scratch.touch()
    else:
        (node.scratch / "7").mkdir(parents=True)
        node.scratch.chmod(0o777)
    for context in ("prolog", "epilog"):
        node.run(context)
    assert (victim / "7").exists()
    assert trap != "open to others" or (node.scratch / "7").exists()


# -- jobs of Slurm --


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with Guarded(tmp_path_factory.mktemp("server")) as guarded:
        yield guarded


@pytest.fixture(scope="module")
def cluster(guarded, tmp_path_factory):
    """A cluster of one node, and the files of its user."""
    folder = tmp_path_factory.mktemp("slurm")
    home = folder / "home"
    token = home / ".config" / "graphstash" / "token"
    token.parent.mkdir(parents=True)
    token.touch(mode=0o600)
    token.write_text(guarded.token("write:default"))
    (folder / "train.py").write_text(TRAIN)
    places = {
        "--nodes=2": "--nodes=1",
        "per-node=8": "per-node=2",
        "http://cache.internal:8077": guarded.url,
        "train.py": str(folder / "train.py"),
    }
    files = written(folder, **places)
    script = files["graphstash.sh"]
    with Slurm(Prolog=script, Epilog=script, PrologFlags="Alloc") as slurm:
        yield SimpleNamespace(
            slurm=slurm, script=files["train.sbatch"], home=home, token=token, folder=folder
        )


class Job:
    """A job of the page's script, with its output."""

    def __init__(self, cluster, program, **variables):
        self.slurm = cluster.slurm
        self.output = cluster.folder / f"output-{len(list(cluster.folder.iterdir()))}"
        path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
        variables |= {"HOME": str(cluster.home), "PATH": path, "PROGRAM": program}
        self.number = self.slurm.submit(
            cluster.script, f"--output={self.output}", **PATIENT_VARIABLES | variables
        )

    def lines(self, text):
        return self.output.read_text().splitlines().count(text) if self.output.exists() else 0

    def finish(self):
        state = self.slurm.finish(self.number)
        assert state == "COMPLETED", self.output.read_text()
        return self.lines("compiled"), self.lines("trained")


@pytest.mark.extended
def test_tasks_compile_once_and_a_new_node_downloads_once(cluster, guarded):
    api = guarded.api("default")
    assert Job(cluster, "shared").finish() == (1, 2)
    assert not list((cluster.folder / "scratch").iterdir())
    before = api.stats()
    second = Job(cluster, "shared")
    assert second.finish() == (0, 2)
    until(lambda: api.stats()["hits"] > before["hits"])
    assert api.stats()["hits"] - before["hits"] == 1
    assert "1 fetched" in second.output.read_text()  # in the first step
    assert not list((cluster.folder / "scratch").iterdir())


@pytest.mark.extended
def test_requeued_job_finds_what_its_first_attempt_published(cluster, guarded):
    api = guarded.api("default")
    before = api.stats()["artifacts"]
    job = Job(cluster, "requeued", HANGS="1")
    until(lambda: job.lines("trained") == 2 and api.stats()["artifacts"] > before)
    cluster.slurm.run("scontrol", "requeue", job.number)
    assert job.finish() == (1, 4)


@pytest.mark.extended
def test_job_without_a_server_compiles_and_its_node_stays_in_use(cluster):
    gone = f"http://127.0.0.1:{reserved_port()}"
    text = cluster.script.read_text()
    cluster.script.write_text(text.replace("URL=", f"URL={gone} #"))
    try:
        compiled, trained = Job(cluster, "alone").finish()
        assert compiled >= 1  # no lease tells the tasks of each other
        assert trained == 2
    finally:
        cluster.script.write_text(text)


@pytest.mark.extended
def test_slurm_stores_no_token(cluster):
    job = Job(cluster, "stored", HANGS="1")
    until(lambda: job.lines("trained") == 2)
    token, files = cluster.token.read_bytes(), 0
    for path in cluster.slurm.directory.rglob("*"):
        if path.is_file():
            files += 1
            assert token not in path.read_bytes(), path
    assert files > 10
    cluster.slurm.run("scancel", job.number)
    cluster.slurm.finish(job.number)
    assert token not in job.output.read_bytes()
