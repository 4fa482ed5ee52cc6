"""The next run of a job downloads the artifacts of the last run, without any setting."""

import json
import random
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from hashlib import sha256

import pytest

from graphstash import ClientConfig, Stash
from graphstash._artifacts import prefetch
from graphstash._artifacts.prefetch import Prefetch
from graphstash._http import deadline
from graphstash.testing import FakeServer
from graphstash_schema import (
    MAX_COMPILE_SECONDS,
    ArtifactInfo,
    ArtifactKey,
    ArtifactMetadata,
    DeviceType,
)
from support.build_job import RANKS
from support.host import key
from support.processes import graphstash
from support.slow_link import SlowLink
from support.waiting import PATIENT, variables_of

GRAPHS = 12
NAMESPACE = "prefetched"

COMPILER = """
import os, time
from pathlib import Path

tier = Path(os.environ["GRAPHSTASH_CACHE_DIR"]) / "v2"
while len(list(tier.glob("*/*/*/*/??/*"))) < 12:
    time.sleep(0.01)
was_imported_with_everything_on_disk = True
"""

JOB = """
import json, os, sys, time
from hashlib import sha256
from pathlib import Path
import graphstash
from graphstash_schema import ArtifactKey

options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
if "compiler" in options:
    # PYTHONSAFEPATH leaves the script's folder out, and the real compiler would be imported.
    sys.path.insert(0, str(Path(__file__).parent))
    import triton
    assert triton.was_imported_with_everything_on_disk

session = graphstash.install()
tier = session.cache.stash.local.root / "v2"

def stored():
    return len([path for path in tier.glob("*/*/*/*/??/*")])

if "wait" in options:
    while stored() < int(options["wait"]):
        time.sleep(0.01)

def build(number):
    key = ArtifactKey.parse("schedule", "cpu", sha256(str(number).encode()).hexdigest())
    graphstash.get_or_compile(key, lambda: os.urandom(1000))

for number in range(int(options.get("graphs", 12))):
    build(number)
"""


@pytest.fixture
def link(server):
    with SlowLink(server.port, round_trip_seconds=0.01) as link:
        yield link


@pytest.fixture(scope="module")
def scripts(server, tmp_path_factory):
    """The scripts of two jobs. The first job has run on the host `a`."""
    folder = tmp_path_factory.mktemp("job")
    for name in ("train.py", "other.py"):
        (folder / name).write_text(JOB)
    (folder / "triton.py").write_text(COMPILER)
    config = ClientConfig.load({}, url=server.url, namespace=NAMESPACE, cache_dir=folder / "a")
    command = ("run", "--", sys.executable, folder / "train.py")
    graphstash(*command, check=True, **variables_of(config))
    return folder


@pytest.fixture
def run(link, scripts, tmp_path):
    """Return a function that runs the job on a host and returns each process's counters."""

    def run(host, *arguments, options=(), script="train.py", launcher=(), **variables):
        stats = tmp_path / f"{host}.jsonl"
        config = ClientConfig.load({}, url=link.url, namespace=NAMESPACE, cache_dir=tmp_path / host)
        settings = variables_of(config) | {"GRAPHSTASH_STATS_FILE": stats}
        command = (sys.executable, *launcher, scripts / script, *arguments)
        done = graphstash("run", *options, "--", *command, check=True, **settings | variables)
        assert done.stdout == ""
        return [json.loads(line) for line in stats.read_text().splitlines()]

    return run


@pytest.fixture
def writer(hosts):
    """A host that publishes artifacts that no job has compiled."""
    return hosts("writer")


@pytest.fixture
def published(writer):
    """Publish the artifacts of the job, and list them in the manifest `mine`."""
    keys = [
        ArtifactKey.parse("schedule", "cpu", sha256(str(number).encode()).hexdigest())
        for number in range(GRAPHS)
    ]
    for number, each in enumerate(keys):
        writer.put(each, random.Random(number).randbytes(1000), _metadata(1000, 1))
    writer.server.update_manifest("mine", keys)


def downloads_in(link):
    return [each for each in link.requests if each.startswith("GET") and "/artifacts/" in each]


def test_next_run_prefetches_in_parallel_without_job_name(run, link):
    """The arguments differ from the arguments of the last run."""
    link.gather(4)
    (counted,) = run("b", f"wait={GRAPHS}")
    assert counted["hits_prefetched"] == GRAPHS, counted
    assert (counted["hits_server"], counted["hits_host"], counted["misses"]) == (0, 0, 0)
    assert counted["fetched_bytes"] == 0
    assert counted["prefetched_bytes"] > GRAPHS * 1000
    assert len(downloads_in(link)) == GRAPHS
    assert link.most_at_once >= 4


@pytest.mark.parametrize(
    "terms", [{"GRAPHSTASH_PREFETCH_LIMIT": 0}, {"script": "other.py"}], ids=["off", "no manifest"]
)
def test_prefetch_is_skipped_by_setting_and_for_another_script(run, link, terms):
    (counted,) = run("b", "graphs=2", **terms)
    assert (counted["hits_server"], counted["prefetched_bytes"]) == (2, 0)
    assert len(downloads_in(link)) == 2
    is_asked = any("/manifests/" in each for each in link.requests)
    assert is_asked == ("script" in terms)


def test_prefetch_runs_while_the_compiler_is_imported(run):
    (counted,) = run("b", "compiler=triton")
    assert counted["hits_prefetched"] == GRAPHS, counted


def test_artifact_needed_during_prefetch_is_downloaded_once_and_then_on_the_disk(run, link):
    (counted,) = run("b")
    assert counted["hits_prefetched"] + counted["hits_server"] == GRAPHS
    assert counted["misses"] == counted["fallbacks"].get("timeout", 0) == 0
    assert len(downloads_in(link)) == len(set(downloads_in(link)))
    link.requests.clear()
    (again,) = run("b")[1:]
    assert again["hits_host"] == GRAPHS
    assert downloads_in(link) == []
    # Checks whether the copies are still valid.
    (_,) = [each for each in link.requests if "lookup" in each]


def test_most_valuable_artifacts_are_prefetched_first_within_limit(run, writer, link):
    """The value of an artifact is its compile seconds per byte."""
    for number, (size, seconds) in enumerate([(1000, 1), (9000, 5), (1000, 9), (2000, 12)]):
        noise = random.Random(number).randbytes(size)
        writer.put(_key(number), noise, _metadata(size, seconds))
    writer.server.update_manifest("mine", [_key(number) for number in range(4)])
    settings = {"GRAPHSTASH_NAMESPACE": writer.config.namespace, "GRAPHSTASH_PREFETCH_LIMIT": 4000}
    run("b", "graphs=1", "wait=2", options=("--job", "mine"), **settings)
    numbers = {int(each.rpartition("/")[2], 16) for each in downloads_in(link)}
    assert {2, 3} <= numbers
    assert not {0, 1} & numbers


@pytest.mark.usefixtures("published")
def test_command_downloads_in_parallel(writer, link, command):
    """The command names artifacts that the server has lost."""
    gone = _key(99)
    writer.server.update_manifest("mine", [gone])
    link.gather(4)
    totals = json.loads(command("prefetch", "mine", "--json", url=link.url).stdout)
    assert (totals["fetched"], totals["present"], totals["missing"]) == (GRAPHS, 0, [str(gone)])
    assert link.most_at_once >= 4
    assert len(downloads_in(link)) == GRAPHS + 1
    again = command("prefetch", "mine", url=link.url).stdout
    assert again == f"0 fetched (0 B), {GRAPHS} already here, 1 no longer on the server\n"


@pytest.mark.parametrize("size", [1 << 20, 5], ids=["large", "small"])
def test_pauses_do_not_count_against_the_time_that_a_download_may_take(hosts, monkeypatch, size):
    """The job downloads meanwhile, and each pause lasts longer than a download may.

    A download that has received all its bytes does not pause.
    """
    hosts("writer").put(_key(1), random.Random(1).randbytes(size), _metadata(size, 1))
    reader, slept, received = hosts("reader"), [], []

    def now():
        return time.monotonic() + sum(slept)

    monkeypatch.setattr(deadline, "monotonic", now)
    monkeypatch.setattr(prefetch, "monotonic", now)
    monkeypatch.setattr(prefetch, "sleep", lambda _: slept.append(2 * reader.config.fetch_seconds))
    prefetching = Prefetch(
        reader, is_stopped=lambda: False, done=lambda _, outcome: received.append(outcome)
    )
    with closing(prefetching), reader.local.downloading():
        prefetching.fetch([_key(1)])
    assert bool(slept) == (size > 5)
    assert [each.source for each in received] == ["remote"]
    assert reader.is_on_this_host(_key(1))


@pytest.fixture
def busy(tmp_path):
    """A server that can be busy, and two hosts: one has published, the other has an empty cache."""
    terms = PATIENT | {"wait_seconds": 100}
    with FakeServer() as fake, ExitStack() as stack:
        writer, reader = (
            stack.enter_context(Stash(fake.config(cache_dir=tmp_path / name, **terms)))
            for name in ("writer", "reader")
        )
        keys = [_key(number) for number in range(GRAPHS)]
        for each in keys:
            writer.put(each, b"graph", _metadata(5, 1))
        writer.server.update_manifest("mine", keys)
        yield fake, reader, keys


def test_prefetch_waits_for_a_busy_server(busy, monkeypatch):
    (fake, reader, keys), now, waits = busy, [0.0], []
    monkeypatch.setattr(prefetch, "monotonic", lambda: now[0])
    prefetching = Prefetch(
        reader, is_stopped=lambda: False, done=lambda *_: None, at_first_wait=waits.append
    )
    with closing(prefetching):
        manifest = prefetching.server.manifest("mine")
        now[0] += 1e6  # a long download
        for call in ("lookup", "get"):
            fake.fail_on(call, status=503, times=1)
        prefetching.fetch_best(manifest.entries)
    assert all(map(reader.is_on_this_host, keys))
    assert waits


@pytest.mark.parametrize(("status", "most_seconds"), [(429, 100), (503, 30)])
def test_prefetch_gives_up_a_server_that_stays_busy(busy, monkeypatch, status, most_seconds):
    (fake, reader, keys), now, outcomes, waits = busy, [0.0], [], []

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(prefetch, "monotonic", lambda: now[0])
    monkeypatch.setattr(prefetch, "sleep", sleep)
    prefetching = Prefetch(
        reader,
        is_stopped=lambda: False,
        done=lambda _, outcome: outcomes.append(outcome),
        at_first_wait=waits.append,
    )
    with closing(prefetching), fake.fail_on("get", status=status):
        prefetching.fetch(keys[:1])
    assert most_seconds - 2 <= now[0] <= most_seconds
    assert [each.reason for each in outcomes] == ["busy"]
    assert len(waits) == 1


def test_prefetch_command_reports_that_it_waits(busy):
    fake, reader, _ = busy
    with fake.fail_on("get", status=429, times=1):
        done = graphstash("prefetch", "mine", check=True, **variables_of(reader.config))
    assert done.stderr.count("waiting for up to 1200 s") == 1


@pytest.mark.usefixtures("published")
def test_one_process_of_a_run_prefetches_for_all_of_its_host(run, writer, link):
    settings = {"GRAPHSTASH_NAMESPACE": writer.config.namespace, "GRAPHSTASH_JOB": "mine"}
    counted = run("b", f"wait={GRAPHS}", launcher=("-c", RANKS), **settings)
    assert [each["hits_prefetched"] for each in counted] == [GRAPHS] * 3
    assert sum(each["prefetched_bytes"] > 0 for each in counted) == 1
    assert len([each for each in link.requests if "/manifests/" in each and each[0] == "G"]) == 1
    assert len(downloads_in(link)) == GRAPHS


def test_one_writer_cannot_displace_the_artifacts_of_others(guarded, hosts):
    """The writer claims the longest compile times, and extends another team's manifest."""

    def publish(numbers, seconds, size=1000):
        token = guarded.token("write:shared")
        host = hosts("writer", url=guarded.url, namespace="shared", token=token)
        for number in numbers:
            host.put(_key(number), random.Random(number).randbytes(size), _metadata(size, seconds))
        host.server.update_manifest("mine", [_key(number) for number in numbers])

    publish(range(1, 7), 9.0)
    publish(range(100, 160), MAX_COMPILE_SECONDS)
    publish([200], MAX_COMPILE_SECONDS, size=16_000)
    token = guarded.token("read:shared")
    reader = hosts("reader", url=guarded.url, namespace="shared", token=token)
    manifest = reader.server.manifest("mine")
    writers = {entry.key: entry.writer for entry in manifest.entries}
    assert len({writers[_key(number)] for number in (1, 100, 200)} - {None}) == 3
    with closing(
        Prefetch(reader, is_stopped=lambda: False, done=lambda *_: None, limit_bytes=20_000)
    ) as prefetching:
        prefetching.fetch_best(manifest.entries)
    assert all(reader.is_on_this_host(_key(number)) for number in range(1, 7))
    assert any(reader.is_on_this_host(_key(number)) for number in range(100, 160))
    publish([1], 9.0)
    writers = {entry.key: entry.writer for entry in reader.server.manifest("mine").entries}
    assert [key for key, writer in writers.items() if writer is None] == [_key(1)]


def test_many_small_artifacts_of_one_writer_precede_no_large_artifact_of_another():
    """Each request has a fixed cost for the server and the host, independent of its size."""
    digest = f"sha256:{'0' * 64}"
    large = ArtifactInfo(key=key(0), digest=digest, size_bytes=1024**2)
    small = [ArtifactInfo(key=key(n), digest=digest, size_bytes=300) for n in range(1, 3001)]
    writers = {key(0): 1} | {each.key: 2 for each in small}
    assert prefetch._share_by_writer([*small, large], writers).index(large) < 300


def test_bytes_that_fail_verification_count_against_the_limit(
    hosts, link, team, namespace, monkeypatch
):
    """An earlier namespace's sizes are unknown in advance, and its artifacts are unsigned."""
    monkeypatch.setattr(prefetch, "_WORKERS", 1)
    junk = hosts("junk", namespace=f"{namespace}-2")
    for number in range(10):
        junk.put(_key(number), random.Random(number).randbytes(1000), _metadata(1000, 1))
    settings = {
        "trusted_keys": team.file,
        "url": link.url,
        "read_namespaces": junk.config.namespace,
    }
    reader, failed = hosts("reader", **settings), []
    with closing(
        Prefetch(
            reader,
            is_stopped=lambda: False,
            done=lambda _, outcome: failed.append(outcome),
            limit_bytes=3000,
        )
    ) as prefetching:
        prefetching.fetch([_key(number) for number in range(10)])
    assert [each.reason for each in failed] == ["unsigned"] * 3


def _key(number):
    return replace(key(number, "schedule"), device_type=DeviceType("cpu"))


def _metadata(size, seconds):
    return ArtifactMetadata(compile_seconds=seconds, raw_size_bytes=size)
