"""The next run of a job downloads what the last one used, without being told to."""

import json
import random
import sys
import time
from contextlib import closing

import pytest

from graphstash._artifacts import prefetch
from graphstash._artifacts.prefetch import Prefetch
from graphstash._http import deadline
from graphstash_schema import ArtifactMetadata
from support.host import key
from support.processes import graphstash
from support.slow_link import SlowLink
from support.waiting import PATIENT_VARIABLES

GRAPHS = 12

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


@pytest.fixture
def run(link, namespace, tmp_path):
    """Runs the job on a host; gives what it counted."""

    def run(host, *arguments, options=(), script="train.py", **variables):
        (tmp_path / script).write_text(JOB)
        stats = tmp_path / f"{host}.jsonl"
        settings = {
            "GRAPHSTASH_URL": link.url,
            "GRAPHSTASH_NAMESPACE": namespace,
            "GRAPHSTASH_CACHE_DIR": tmp_path / host,
            "GRAPHSTASH_STATS_FILE": stats,
            **PATIENT_VARIABLES,
        }
        link.requests.clear()
        link.most_at_once = 0
        command = ("run", *options, "--", sys.executable, tmp_path / script, *arguments)
        assert graphstash(*command, check=True, **settings | variables).stdout == ""
        return json.loads(stats.read_text().splitlines()[-1]) if stats.exists() else {}

    return run


def downloads_in(link):
    return [each for each in link.requests if each.startswith("GET") and "/artifacts/" in each]


def test_the_next_run_finds_everything_on_its_disk_without_a_name(run, link):
    run("a")
    counted = run("b", f"wait={GRAPHS}")
    assert counted["hits_prefetched"] == GRAPHS, counted
    assert (counted["hits_server"], counted["hits_host"], counted["misses"]) == (0, 0, 0)
    assert counted["fetched_bytes"] == 0
    assert counted["prefetched_bytes"] > GRAPHS * 1000
    assert len(downloads_in(link)) == GRAPHS


def test_it_downloads_while_the_compiler_is_imported(run, tmp_path):
    run("a")
    (tmp_path / "triton.py").write_text(COMPILER)
    counted = run("b", "compiler=triton")
    assert counted["hits_prefetched"] == GRAPHS, counted


def test_it_downloads_side_by_side(run, link):
    run("a")
    run("b", GRAPHSTASH_PREFETCH_LIMIT=0)
    assert link.most_at_once == 1
    link.gather(4)
    run("c", f"wait={GRAPHS}")
    assert link.most_at_once >= 4


def test_what_is_wanted_at_once_is_downloaded_once(run, link):
    run("a")
    counted = run("b")
    assert counted["hits_prefetched"] + counted["hits_server"] == GRAPHS
    assert counted["misses"] == counted["fallbacks"].get("timeout", 0) == 0
    assert len(downloads_in(link)) == len(set(downloads_in(link)))


def test_what_is_on_the_disk_is_not_asked_for(run, link):
    run("a")
    again = run("a")
    assert again["hits_host"] == GRAPHS
    assert downloads_in(link) == []
    (_,) = [each for each in link.requests if "lookup" in each]  # whether the copies still hold


def test_other_arguments_find_what_the_script_used_before(run):
    run("a", "layers=2")
    counted = run("b", "layers=4", f"wait={GRAPHS}")
    assert counted["hits_prefetched"] == GRAPHS, counted


def test_another_script_and_a_missing_manifest_download_nothing(run, link):
    run("a")
    counted = run("b", "graphs=1", script="other.py")
    assert (counted["hits_server"], counted["prefetched_bytes"]) == (1, 0)
    assert len(downloads_in(link)) == 1


def test_a_stale_manifest_downloads_no_more_than_the_limit_and_holds_nothing_up(run, link):
    run("a")
    assert run("b", "graphs=0", "wait=3", GRAPHSTASH_PREFETCH_LIMIT=4000) == {}
    assert len(downloads_in(link)) == 3  # of 1,100 bytes each


def test_the_most_valuable_come_first(run, hosts, link):
    """Seconds of compiling for each byte."""
    writer = hosts("writer")
    for number, (size, seconds) in enumerate([(1000, 1), (9000, 5), (1000, 9), (2000, 12)]):
        noise = random.Random(number).randbytes(size)
        writer.put(_key(number), noise, _metadata(size, seconds))
    writer.server.update_manifest("mine", [_key(number) for number in range(4)])
    run("b", "graphs=0", "wait=2", options=("--job", "mine"), GRAPHSTASH_PREFETCH_LIMIT=4000)
    numbers = {int(each.rpartition("/")[2], 16) for each in downloads_in(link)}
    assert numbers == {2, 3}


def test_the_command_downloads_side_by_side_too(run, hosts, link, tmp_path):
    """What it brings, and what nobody has any more."""
    run("a", options=("--job", "mine"))
    gone = _key(99)
    hosts("writer").server.update_manifest("mine", [gone])
    link.requests.clear()
    link.most_at_once = 0
    link.gather(4)
    settings = {"GRAPHSTASH_URL": link.url, "GRAPHSTASH_CACHE_DIR": tmp_path / "b"}
    settings |= PATIENT_VARIABLES
    settings |= {"GRAPHSTASH_NAMESPACE": hosts("writer").config.namespace}
    told = json.loads(graphstash("prefetch", "mine", "--json", check=True, **settings).stdout)
    assert (told["fetched"], told["present"], told["missing"]) == (GRAPHS, 0, [str(gone)])
    assert link.most_at_once >= 4
    assert len(downloads_in(link)) == GRAPHS + 1
    again = graphstash("prefetch", "mine", check=True, **settings).stdout
    assert again == f"0 fetched (0 B), {GRAPHS} already here, 1 no longer on the server\n"


def test_pauses_do_not_count_against_the_time_that_a_download_may_take(hosts, monkeypatch):
    """The job downloads something meanwhile, and every pause lasts longer than a download may."""
    hosts("writer").put(_key(1), random.Random(1).randbytes(1 << 20), _metadata(1 << 20, 1))
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
    assert slept
    assert [each.source for each in received] == ["remote"]
    assert reader.is_on_this_host(_key(1))


def test_nothing_pauses_when_all_has_come(hosts, monkeypatch):
    hosts("writer").put(_key(1), b"small", _metadata(5, 1))
    reader, slept = hosts("reader"), []
    monkeypatch.setattr(prefetch, "sleep", slept.append)
    prefetching = Prefetch(reader, is_stopped=lambda: False, done=lambda *_: None)
    with closing(prefetching), reader.local.downloading():
        prefetching.fetch([_key(1)])
    assert reader.is_on_this_host(_key(1))
    assert slept == []


def test_a_setting_switches_it_off(run, link):
    run("a", GRAPHSTASH_PREFETCH_LIMIT=0)
    assert not any("/manifests/" in each for each in link.requests)
    run("b", GRAPHSTASH_PREFETCH_LIMIT=0)
    assert not any("/manifests/" in each for each in link.requests)


def test_one_process_of_a_run_prefetches_for_all_of_its_host(run, link, tmp_path):
    run("a")
    launcher = "import subprocess, sys\n"
    launcher += "ranks = [subprocess.Popen([sys.executable, *sys.argv[1:]]) for _ in range(3)]\n"
    launcher += "sys.exit(any(rank.wait() for rank in ranks))\n"
    (tmp_path / "launch.py").write_text(launcher)
    stats = tmp_path / "b.jsonl"
    settings = {"GRAPHSTASH_URL": link.url, "GRAPHSTASH_CACHE_DIR": tmp_path / "b"}
    settings |= PATIENT_VARIABLES
    settings |= {"GRAPHSTASH_STATS_FILE": stats, "GRAPHSTASH_JOB": "ranks"}
    settings |= {"GRAPHSTASH_NAMESPACE": _namespace_of(link)}
    command = (sys.executable, tmp_path / "launch.py", tmp_path / "train.py")
    graphstash("run", "--", *command, check=True, **settings | {"GRAPHSTASH_CACHE_DIR": tmp_path})
    link.requests.clear()
    stats.unlink()
    graphstash("run", "--", *command, f"wait={GRAPHS}", check=True, **settings)
    counted = [json.loads(line) for line in stats.read_text().splitlines()]
    assert [each["hits_prefetched"] for each in counted] == [GRAPHS] * 3
    assert sum(each["prefetched_bytes"] > 0 for each in counted) == 1
    assert sum("GET" in each and "/manifests/" in each for each in link.requests) == 1
    assert len(downloads_in(link)) == GRAPHS


def _namespace_of(link):
    return downloads_in(link)[0].split("/")[2]


def _key(number):
    return key(number, "schedule").model_copy(update={"device_type": "cpu"})


def _metadata(size, seconds):
    return ArtifactMetadata(
        compile_seconds=seconds, raw_size_bytes=size, toolchain="", producer="", parts={}
    )
