"""Artifacts that a job compiles during an outage reach the server as soon as it answers again."""

import json
import random
import sys
import time
from contextlib import ExitStack, closing
from functools import partial

import pytest

from graphstash import CacheError, ClientConfig, Stash
from graphstash._artifacts.catch_up import CatchUp, Sent
from graphstash._artifacts.stash import is_temporary
from graphstash._cli.patience import PatientClient
from graphstash._http.client import ServerClient
from graphstash._process.late_uploads import LateUploads
from graphstash._regular_file import open_ours
from graphstash.errors import ConflictError, Reason, RefusedError, TransportError
from graphstash_schema import RETRYABLE, STATUS, ArtifactMetadata, ManifestName
from graphstash_server.testing import ServerProcess
from support.build_job import RANKS
from support.host import METADATA, key
from support.ports import reserved_port
from support.processes import graphstash, started
from support.slow_link import SlowLink
from support.waiting import until, variables_of
from support.withdrawing import delete, withhold

JOB = """
import os, sys
from hashlib import sha256
import graphstash
from graphstash_schema import ArtifactKey

graphstash.install()
for number in range(3):
    key = ArtifactKey.parse("schedule", "cpu", sha256(str(number).encode()).hexdigest())
    graphstash.get_or_compile(
        key,
        lambda: b"graph %d" % number * 1000,
        parts={"inputs": f"f32[{number}]"},
        toolchain="compiler 1.0",
        label=f"step {number}",
    )
if "wait" in sys.argv:
    print(graphstash.stats().published, flush=True)
    sys.stdin.readline()
    print(graphstash.stats().published, flush=True)
"""

TURNS = """
import subprocess, sys
ranks = [subprocess.run([sys.executable, *sys.argv[1:]]) for _ in range(2)]
sys.exit(any(rank.returncode for rank in ranks))
"""


@pytest.fixture
def down():
    """The URL of a server that is down."""
    return f"http://127.0.0.1:{reserved_port()}"


@pytest.fixture
def up(server, down):
    """Return a function that starts the server at the URL of `down`; it records requests."""

    def start():
        return SlowLink(server.port, round_trip_seconds=0, port=int(down.rpartition(":")[2]))

    return start


@pytest.fixture
def run(down, tmp_path, namespace):
    """Return a function that runs the job on a host and returns each process's counters."""

    def run(host, *, launcher=(), **variables):
        stats = tmp_path / f"{host}.jsonl"
        stats.unlink(missing_ok=True)
        config = ClientConfig.load({}, url=down, namespace=namespace, cache_dir=tmp_path / host)
        settings = variables_of(config) | {"GRAPHSTASH_STATS_FILE": stats}
        command = (sys.executable, *launcher, "-c", JOB)
        graphstash("run", "--", *command, check=True, **settings | variables)
        return [json.loads(line) for line in stats.read_text().splitlines()]

    return run


@pytest.fixture
def left(next_job, down):
    """Return a function that leaves unsent artifacts on the host `a`."""

    def leave(*numbers, size_bytes=5, seconds=3.0, **settings):
        job = next_job("a", url=down, **settings)
        for number in numbers:
            payload = random.Random(number).randbytes(size_bytes)
            metadata = ArtifactMetadata(compile_seconds=seconds, raw_size_bytes=size_bytes)
            with pytest.raises(CacheError):
                job.put(key(number), payload, metadata)
        return job

    return leave


def caught_up(job, *, with_any=False, meanwhile=None, **limits):
    """Return the outcome of each unsent artifact that a job tries to publish, by key.

    `meanwhile` is called with the artifacts to publish, after the look-up on the server.
    """
    outcomes = {}
    with closing(PatientClient(job.config)) as client:
        catch_up = CatchUp(
            job, client, with_any=with_any, done=lambda e, o: outcomes.update({e.key: o}), **limits
        )
        wanted = catch_up.find_publishable()
        if meanwhile is not None:
            meanwhile(wanted)
        catch_up.publish(wanted)
    return outcomes


def stored(job, *numbers):
    return {each.key for each in job.server.lookup(map(key, numbers)).found}


def puts(link):
    return [each for each in link.requests if each.startswith("PUT") and "/artifacts/" in each]


def explained(command, url, namespace):
    """Return each artifact's label, description and metadata, as users see them."""
    listed = json.loads(command("ls", "--json", url=url, namespace=namespace).stdout)["artifacts"]
    shown = {}
    for each in listed:
        words = ("show", each["key"]["fingerprint"], "--json")
        artifact = json.loads(command(*words, url=url, namespace=namespace).stdout)
        for changing in ("compile_seconds", "producer"):
            assert artifact["metadata"].pop(changing)
        shown[each["label"]] = artifact["metadata"], artifact["description"]
    return shown


def test_next_run_publishes_artifacts_compiled_before_the_server_started(
    run, down, tmp_path, command, namespace
):
    (cold,) = run("a")
    assert cold["published"] == 0
    with ServerProcess(tmp_path / "data", "--port", down.rpartition(":")[2]) as server:
        assert server.url == down
        (again,) = run("a")
        assert (again["hits_host"], again["misses"], again["published"]) == (3, 0, 3)
        (other,) = run("b")
        assert other["hits_server"] + other["hits_prefetched"] == 3
        run("c", GRAPHSTASH_NAMESPACE="usual")
        late = explained(command, down, namespace)
        assert sorted(late) == ["step 0", "step 1", "step 2"]
        assert late == explained(command, down, "usual")


def test_rejected_token_is_reported_if_own_copies_serve_every_program(run, down, tmp_path):
    run("a")
    options = ("--port", down.rpartition(":")[2], "--auth", "tokens")
    with ServerProcess(tmp_path / "data", *options):
        (again,) = run("a", GRAPHSTASH_TOKEN="revoked")
    assert (again["hits_host"], again["fallbacks"]) == (3, {"unauthenticated": 1})


def test_own_server_receives_artifacts_compiled_before_its_start(run, tmp_path):
    here = {"GRAPHSTASH_URL": "", "XDG_STATE_HOME": tmp_path / "state"}
    run("a", **here)
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "GRAPHSTASH_INSECURE": ""}
    with ServerProcess(tmp_path / "data", environment=state):
        (again,) = run("a", **here)
    assert (again["hits_host"], again["published"]) == (3, 3)


@pytest.mark.extended
def test_one_process_of_a_run_publishes_each_artifact_once(run, up):
    run("a")
    with up() as link:
        ranks = run("a", launcher=("-c", RANKS))
        assert [each["hits_host"] for each in ranks] == [3] * 3
        assert len(puts(link)) == 3
    assert sorted(each["published"] for each in ranks) == [0, 0, 3]


@pytest.fixture
def running(down, tmp_path, namespace):
    """Return a function that starts the job on the host `a`.

    The job prints the number of published artifacts, and prints it again after each input line.
    """

    def start(job=JOB, **variables):
        config = ClientConfig.load({}, url=down, namespace=namespace, cache_dir=tmp_path / "a")
        return started(job, "wait", TMPDIR=tmp_path, **variables_of(config) | variables)

    return start


def test_running_job_publishes_when_its_server_starts(running, up):
    with running() as job:
        assert job.stdout.readline() == "0\n"
        with up() as link:
            until(lambda: len(puts(link)) == 3)
            job.stdin.write("\n")
            job.stdin.close()
            assert job.stdout.read() in ("2\n", "3\n")  # the last answer may not have arrived yet
            assert job.wait(60) == 0


def test_read_only_job_and_job_without_sharing_leave_nothing_to_publish(left, next_job, server):
    for number, settings in enumerate(({"read_only": True}, {"url": "none"}, {"url": server.url})):
        next_job("a", **settings).put(key(number), b"graph", METADATA)
    job = next_job("a")
    assert caught_up(job, with_any=True) == {}
    assert stored(job, 0, 1, 2) == {key(2)}


def test_job_of_another_namespace_or_server_publishes_nothing(left, up, next_job, namespace):
    left(1)
    with up() as link:
        for settings in ({"namespace": f"{namespace}-2", "url": link.url}, {}):
            job = next_job("a", **settings)
            assert caught_up(job) == {}
            assert not stored(job, 1)
        assert caught_up(next_job("a", url=link.url)) == {key(1): Sent.PUBLISHED}


def test_only_the_command_publishes_to_a_team_artifacts_compiled_without_a_server(
    next_job, command
):
    other = next_job("a")
    without = ClientConfig.load(
        {}, namespace=other.config.namespace, cache_dir=other.config.cache_dir
    )
    with Stash(without) as job:
        job.put(key(1), b"graph", METADATA)
    assert caught_up(other, with_any=other.config.is_own_server) == {}
    assert command("publish", "--dry-run", host="a").stdout.startswith("1 artifact (")
    assert not stored(other, 1)
    assert command("publish", host="a").stdout.startswith("1 published (")
    assert stored(other, 1) == {key(1)}
    assert command("publish", host="a").stdout == "0 published (0 B), 0 already there\n"


def test_imported_artifact_is_not_published(left, up, next_job, command, tmp_path):
    left(1)
    command("export", tmp_path / "a.bundle", "--local", host="a", url="none")
    command("import", tmp_path / "a.bundle", "--local", host="b", url="none")
    with up() as link:
        assert caught_up(next_job("b", url=link.url), with_any=True) == {}
        assert not puts(link)


def test_artifact_that_the_server_has_is_not_sent(left, up, next_job):
    left(1, 2)
    other = next_job("b")
    other.put(key(1), random.Random(1).randbytes(5), METADATA)
    other.put(key(2), b"other", METADATA)
    with up() as link:
        job = next_job("a", url=link.url)
        assert caught_up(job) == {key(1): Sent.PRESENT, key(2): Sent.DIFFERING}
        assert caught_up(job) == {}
        assert not puts(link)
        assert next_job("a", url=link.url).get(key(2)) == b"other"


def test_most_valuable_artifacts_are_published_within_the_limit(left, up, next_job):
    left(1, size_bytes=9000, seconds=5)
    left(2, size_bytes=5000, seconds=4)
    left(3, size_bytes=5000, seconds=9)
    with up() as link:
        job = next_job("a", url=link.url)
        assert caught_up(job, limit_bytes=11_000) == {
            key(3): Sent.PUBLISHED,
            key(2): Sent.PUBLISHED,
        }
        assert caught_up(job) == {key(1): Sent.PUBLISHED}


def test_upload_that_fails_in_every_job_comes_after_others(left, up, next_job, monkeypatch):
    real, tried = PatientClient.upload, []

    def upload(client, wanted, *arguments, **named):
        tried.append(wanted)
        if wanted == key(1):
            raise TransportError(Reason.TIMEOUT, "too large for this link")
        return real(client, wanted, *arguments, **named)

    monkeypatch.setattr(PatientClient, "upload", upload)
    left(1, seconds=100)
    left(2)
    for _ in range(2):
        with up() as link, pytest.raises(TransportError, match="too large for this link"):
            caught_up(next_job("a", url=link.url))
        left(3)
    assert tried == [key(number) for number in (1, 2, 3, 1)]


def test_damaged_or_evicted_artifact_is_not_published(left, up, next_job):
    job = left(1, 2, 3)
    damaged = job.local.path(job.config.namespace, key(1))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 4] ^= 1
    damaged.write_bytes(content)
    job.local.discard(job.config.namespace, key(2))
    with up() as link:
        job = next_job("a", url=link.url)
        outcomes = caught_up(job)
        assert outcomes.pop(key(3)) is Sent.PUBLISHED
        assert outcomes.pop(key(2)) is Sent.GONE
        (error,) = outcomes.values()
        assert isinstance(error, CacheError)
        assert stored(job, 1, 2, 3) == {key(3)}
        assert not job.is_on_this_host(key(1))
        assert caught_up(job) == {}


def test_oldest_records_are_dropped_above_the_limit(left, up, next_job, monkeypatch):
    monkeypatch.setattr("graphstash._artifacts.unsent._MAX_RECORDS", 10)
    left(*range(1, 15))
    with up() as link:
        job = next_job("a", url=link.url)
        assert caught_up(job).keys() == {key(number) for number in range(5, 15)}
        assert all(job.is_on_this_host(key(number)) for number in range(1, 15))


@pytest.mark.parametrize("status", [408, 500, 507])
def test_artifact_that_the_server_cannot_store_blocks_no_other(
    left, up, next_job, monkeypatch, status
):
    left(1, 2, 3)
    upload = PatientClient.upload

    def fail(client, wanted, *arguments, **options):
        if wanted == key(2):
            raise RefusedError("full", code=None, status=status)
        upload(client, wanted, *arguments, **options)

    with up() as link:
        job = next_job("a", url=link.url)
        monkeypatch.setattr(PatientClient, "upload", fail)
        with pytest.raises(RefusedError, match="full"):
            caught_up(job)
        assert stored(job, 1, 2, 3) == {key(1), key(3)}
        monkeypatch.undo()
        assert caught_up(job) == {key(2): Sent.PUBLISHED}


def test_ended_job_abandons_its_upload_which_counts_for_the_limit(left, up, next_job):
    left(1, 2, size_bytes=3 * 1024**2)
    with up() as link:
        job, polls, spent = next_job("a", url=link.url), [], []
        with pytest.raises(CacheError, match="the job ends"):
            caught_up(
                job,
                is_stopped=lambda: polls.append(1) or len(polls) == 3,
                spend=lambda size_bytes, _: spent.append(size_bytes),
                limit_bytes=4 * 1024**2,
            )
        assert not stored(job, 1, 2)
        assert sum(spent) > 3 * 1024**2
        assert job.get(key(1)) is not None
        published = dict.fromkeys((key(1), key(2)), Sent.PUBLISHED)
        assert caught_up(next_job("a", url=link.url)) == published


@pytest.mark.extended
def test_processes_of_a_run_share_its_limit(run, up, next_job, down):
    run("a")
    entries = list(next_job("a", url=down).unsent.entries(with_any=False))
    limit = max(entry.size_bytes for entry in entries) * 3 // 2
    with up() as link:
        ranks = run("a", launcher=("-c", TURNS), GRAPHSTASH_UNSENT_LIMIT=str(limit))
        assert [each["hits_host"] for each in ranks] == [3] * 2
        assert sum(each["published"] for each in ranks) == 1
        assert len(puts(link)) == 1


@pytest.mark.parametrize(("spent_seconds", "is_published"), [(0, True), (600, False)])
def test_processes_of_a_run_share_ten_minutes(left, up, next_job, spent_seconds, is_published):
    left(1)
    with up() as link:
        job, sizes = next_job("a", url=link.url), []
        name = f"catch-up-{job.standing.origin}-{job.config.namespace}"
        with closing(job.downloads.claim(name)) as earlier:
            earlier.keep(f"0 {spent_seconds:.3f}")
        uploads = LateUploads(
            job,
            job=lambda: ManifestName("job"),
            before_each=lambda: None,
            published=sizes.append,
            failed=pytest.fail,
        )
        uploads.start()
        uploads.end(time.monotonic() + 60)
        assert bool(sizes) is is_published
        assert stored(job, 1) == ({key(1)} if is_published else set())


def test_answer_about_another_key_is_ignored(left, up, next_job, monkeypatch):
    left(1)
    next_job("b").put(key(2), b"graph", METADATA)
    post = ServerClient._post

    def ask_for_both(client, call, request, **options):
        if call == "lookup":
            request = request.model_copy(update={"keys": (*request.keys, key(2))})
        return post(client, call, request, **options)

    with up() as link:
        job = next_job("a", url=link.url)
        monkeypatch.setattr(ServerClient, "_post", ask_for_both)
        assert caught_up(job) == {key(1): Sent.PUBLISHED}


def test_signed_artifact_keeps_its_signature_and_waits_for_its_key(left, up, next_job, team):
    ci, old = team.trust("ci"), team.trust("old")
    left(1, signing_key=ci)
    left(2)
    left(3, signing_key=old)
    with up() as link:
        outcomes = caught_up(next_job("a", url=link.url, signing_key=ci))
        assert outcomes.pop(key(1)) is Sent.PUBLISHED
        assert [outcomes[key(n)].reason for n in (2, 3)] == ["unsigned", "unknown_key"]
        reader = next_job("b", trusted_keys=team.file)
        assert reader.get(key(1)) == random.Random(1).randbytes(5)
        again = caught_up(next_job("a", url=link.url, signing_key=old))
        assert again.pop(key(3)) is Sent.PUBLISHED
        assert caught_up(next_job("a", url=link.url)) == {key(2): Sent.PUBLISHED}


UPLOAD = f"""
import sys
import graphstash
from graphstash_schema import ArtifactKey

graphstash.install()
key = ArtifactKey.parse(*"{key(1)}".split("/"))
graphstash.get_or_compile(key, lambda: b"graph")
sys.stdin.readline()
"""


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "drain ends"])
def test_upload_that_a_job_does_not_finish_is_published_later(running, up, next_job, is_killed):
    with up() as link:
        link.gather(100, method="PUT")
        with running(job=UPLOAD, GRAPHSTASH_DRAIN_SECONDS="0.1") as job:
            until(lambda: puts(link))
            other = next_job("a", url=link.url)
            assert caught_up(other) == {}
            if is_killed:
                job.kill()
            job.stdin.close()
            job.wait(30)
        assert not other.unsent.is_empty(with_any=False)
    with up() as link:
        job = next_job("a", url=link.url)
        assert caught_up(job) == {key(1): Sent.PUBLISHED}
        assert next_job("a", url=link.url).get(key(1)) == b"graph"
        assert job.unsent.is_empty(with_any=False)


def test_finished_upload_leaves_no_record(next_job):
    job = next_job("a")
    job.put(key(1), b"graph", METADATA)
    with pytest.raises(ConflictError):
        job.put(key(1), b"other", METADATA)
    assert job.unsent.is_empty(with_any=True)


def records(job):
    folder = job.local.server_folder(job.config.url) / "_unsent" / job.config.namespace
    return list(folder.iterdir())


def test_record_of_a_later_release_stays_for_its_jobs(left, up, next_job):
    (record,) = records(left(1))
    known = record.read_text()
    later = json.dumps(json.loads(known) | {"added_later": 1})
    record.write_text(later)
    with up() as link:
        job = next_job("a", url=link.url)
        assert caught_up(job) == {}
        assert record.read_text() == later
        record.write_text(known)
        assert caught_up(job) == {key(1): Sent.PUBLISHED}


def test_copy_that_cannot_be_read_now_is_published_later(left, up, next_job):
    job = left(1)
    copy = job.local.path(job.config.namespace, key(1))
    copy.chmod(0o620)  # not openable, because its group could change it
    with up() as link:
        job = next_job("a", url=link.url)
        assert caught_up(job)[key(1)].reason == "local_io"
        copy.chmod(0o600)
        assert caught_up(job) == {key(1): Sent.PUBLISHED}


def test_copy_that_moves_between_two_looks_is_published(left, up, next_job, monkeypatch):
    job = left(1)
    move = partial(job.local.change_origin, job.config.namespace, key(1))
    move(from_origin="own", to_origin=job.standing.offered)

    def look(path):
        with ExitStack() as stack:
            stack.callback(move, from_origin=job.standing.offered, to_origin="own")
            return open_ours(path)

    with up() as link:
        monkeypatch.setattr("graphstash._artifacts.catch_up.open_ours", look)
        assert caught_up(next_job("a", url=link.url)) == {key(1): Sent.PUBLISHED}


def test_record_of_other_bytes_is_not_removed(left):
    job = left(1)
    job.unsent.remove(key(1), "0" * 64)
    (entry,) = job.unsent.entries(with_any=False)
    job.unsent.remove(key(1), entry.sha256)
    assert job.unsent.is_empty(with_any=False)


def test_refusal_that_ends_by_itself_is_temporary():
    for code in RETRYABLE:
        assert is_temporary(RefusedError("later", code=code, status=STATUS[code])), code


@pytest.mark.parametrize(
    ("when", "withdraw"),
    [
        *(("before the lookup", each) for each in (delete, withhold)),
        *(("after it", each) for each in (delete, withhold)),
        ("while it is sent", delete),  # a withheld artifact refuses the upload
    ],
)
def test_withdrawn_artifact_is_not_published_again(left, up, next_job, withdraw, when, monkeypatch):
    """Meanwhile, another host published the same bytes, and the server withdrew them."""
    seconds = 60.0 if when == "while it is sent" else 0.0
    monkeypatch.setattr("graphstash._artifacts.catch_up._LOOKUP_SECONDS", seconds)
    left(1, 2)

    def withdrawn_by_another(_=None):
        other = next_job("b")
        other.put(key(1), random.Random(1).randbytes(5), METADATA)
        withdraw(other)

    is_early = when == "before the lookup"
    if is_early:
        withdrawn_by_another()
    with up() as link:
        job = next_job("a", url=link.url)
        outcomes = caught_up(job, meanwhile=None if is_early else withdrawn_by_another)
        assert outcomes == {key(1): Sent.GONE, key(2): Sent.PUBLISHED}
        assert stored(job, 1, 2) == {key(2)}
        assert len(puts(link)) == (2 if seconds else 1)


def test_withdrawal_that_the_process_reads_before_an_upload_prevents_it(left, up, next_job):
    left(1)
    with up() as link:
        job = next_job("a", url=link.url)

        def learn(wanted):
            named = [(each.key, each.sha256) for each in wanted]
            job.standing.on_withdrawn(job.config.namespace, named, at=time.time())

        outcomes = caught_up(job, meanwhile=learn)
        assert isinstance(outcomes[key(1)], CacheError)
        assert puts(link) == []


def test_artifact_stays_usable_while_it_is_sent(left, up, next_job):
    """A job that needs the artifact during its upload does not compile."""
    left(1, size_bytes=3 * 1024**2)
    with up() as link:
        seen = []

        def is_stopped():
            seen.append(next_job("a", url=link.url).get(key(1)) is not None)
            return False

        assert caught_up(next_job("a", url=link.url), is_stopped=is_stopped)
        assert len(seen) > 3
        assert all(seen)


def test_end_of_job_waits_for_a_held_upload_within_its_drain_time_only(run, running, up):
    """A held upload times out only after 40 s."""
    run("a")
    with up() as link:
        link.gather(100)
        with running(GRAPHSTASH_DRAIN_SECONDS="0.1") as job:
            until(lambda: len(puts(link)) == 1)
            job.stdin.write("\n")
            job.stdin.close()
            assert job.stdout.read() == "0\n0\n"
            assert job.wait(30) == 0


@pytest.mark.extended
def test_setting_ends_later_publication(run, up):
    run("a")
    with up() as link:
        (off,) = run("a", GRAPHSTASH_UNSENT_LIMIT="0")
        (read_only,) = run("a", GRAPHSTASH_READ_ONLY="true")
        assert (off["published"], read_only["published"]) == (0, 0)
        assert not puts(link)


def test_dry_run_changes_nothing(left, up, next_job, command, team):
    job = left(*range(1, 6))
    tier, namespace = job.local, job.config.namespace
    offered = job.standing.offered
    tier.change_origin(namespace, key(1), from_origin="own", to_origin=offered)
    tier.discard(namespace, key(2))
    damaged = tier.path(namespace, key(5))
    damaged.write_bytes(b"X" + damaged.read_bytes()[1:])
    other = next_job("b")
    other.put(key(3), b"other", METADATA)
    other.put(key(4), random.Random(4).randbytes(5), METADATA)

    def copies():
        origins = (offered, job.standing.origin, "own")
        return {each: {*tier.keys(namespace, origin=each)} for each in origins}

    with up() as link:
        before = copies(), {each.name for each in records(job)}
        words = ("publish", "--json")
        planned = json.loads(command(*words, "--dry-run", host="a", url=link.url, status=1).stdout)
        assert before == (copies(), {each.name for each in records(job)})
        (rejected,) = planned.pop("rejected")
        assert rejected["key"] == str(key(5))
        assert [planned[name] for name in ("published", "present", "gone", "left")] == [1, 1, 1, 0]
        assert planned["differing"] == [str(key(3))]
        done = json.loads(command(*words, host="a", url=link.url, status=1).stdout)
        assert done.pop("rejected") == [rejected]
        assert done == planned | {"is_dry_run": False}


def test_command_that_fails_midway_reports_its_progress(left, up, command, monkeypatch):
    left(1, 2, 3)
    upload, sent = PatientClient.upload, []

    def fail(client, *arguments, **options):
        if sent:
            raise TransportError(Reason.CONNECT, "the server went away")
        upload(client, *arguments, **options)
        sent.append(1)

    monkeypatch.setattr(PatientClient, "upload", fail)
    with up() as link:
        failed = command("publish", "--json", host="a", url=link.url, status=1)
        done = json.loads(failed.stdout)
        assert (done["published"], done["left"]) == (1, 2)
        assert "the server went away" in failed.stderr
        text = command("publish", host="a", url=link.url, status=1).stdout
        assert text == "0 published (0 B), 0 already there, 2 left\n"


def test_trusted_keys_that_cannot_be_read_now_are_reported(left, up, next_job, team):
    left(1, signing_key=team.trust("ci"))
    with up() as link:
        job = next_job("a", url=link.url, trusted_keys=team.file)
        trusted = team.file.read_text()
        team.file.write_text("{")
        assert caught_up(job)[key(1)].reason == "local_io"
        team.file.write_text(trusted)
        assert caught_up(next_job("a", url=link.url)) == {key(1): Sent.PUBLISHED}


def test_command_fails_if_nothing_can_be_published(left, command, down):
    left(1)
    refused = command("publish", host="a", status=2, read_only="true")
    assert "GRAPHSTASH_READ_ONLY is set" in refused.stderr
    unreachable = command("publish", host="a", url=down, status=1, connect_seconds="0.1")
    assert "run it again to continue" in unreachable.stderr
    nowhere = command("publish", host="a", url="none", status=1)
    assert "GRAPHSTASH_URL" in nowhere.stderr
