"""This release continues with the data of the previous one, and both releases interoperate.

The previous release runs from its commit, in its own environment, with real processes. See
`support.release_before`.
"""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import httpx
import pytest

from graphstash_server.testing import ServerProcess
from support.postgres import EMPTY
from support.release_before import python_of_release_before, sources_of_release_before
from support.run_case import RUN_CASE, case_arguments

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "tests" / "support"
CLIENT = JOBS / "release_job.py"
TRAIN = JOBS / "train_job.py"
WITHHELD, LEASED = 5, 6
STORED = (1, 2, 3, 4)


class Release:
    """One release. A process of its Python forks for each command and client."""

    def __init__(self, python):
        self.python = str(python)
        self._forks = subprocess.Popen(
            [self.python, "-P", str(CLIENT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": ""},
        )

    def serve(self, directory, **settings):
        """Start `graphstash serve` in its own process."""
        return ServerProcess(
            directory,
            command=(self.python, "-m", "graphstash", "serve"),
            environment={"GRAPHSTASH_MIN_FREE_BYTES": "0"} | variables(settings),
        )

    def command(self, *arguments, **settings):
        """Return the output of a command."""
        return self._fork(settings, arguments=list(map(str, arguments)))

    def client(self, *steps, **settings):
        """Return the results of a client's steps; see `release_job.py`."""
        return json.loads(self._fork(settings, steps=steps))

    def _fork(self, settings, **request):
        request["environment"] = dict(os.environ) | variables(settings)
        self._forks.stdin.write(json.dumps(request) + "\n")
        self._forks.stdin.flush()
        status, output = json.loads(self._forks.stdout.readline())
        assert status == 0, output
        return output

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self._forks:
            self._forks.stdin.close()


def variables(settings):
    return {f"GRAPHSTASH_{name.upper()}": str(value) for name, value in settings.items()}


def everything(url, token):
    """Return all data that an administrator gets from a server, except clock and counters."""
    with httpx.Client(
        base_url=f"{url}/v1", headers={"Authorization": f"Bearer {token}"}, timeout=30
    ) as http:
        seen = {}
        for number in (*STORED, WITHHELD, LEASED):
            answer = http.get(f"/team/artifacts/jax/cpu-x86_64-0123456789abcdef/{number:064x}")
            headers = dict(answer.headers)
            for free in ("date", "x-request-id"):
                headers.pop(free)
            body = answer.content if answer.status_code == 200 else answer.json()["code"]
            if answer.status_code != 200:
                headers.pop("content-length")
            seen[number] = (answer.status_code, headers, body)
        paths = ("-/tokens", "-/namespaces", "-/quarantine", "-/access", "team/manifests/train")
        for path in paths:
            answer = http.get(f"/{path}")
            assert answer.status_code == 200, answer.text
            seen[path] = answer.json()
        for listed in seen["-/tokens"]["tokens"]:
            listed.pop("last_used_at")
        for known in (seen["-/access"], *seen["-/tokens"]["tokens"]):
            assert known.pop("issuer", None) is None  # this release adds the field
        for added in ("subject", "token"):
            seen["-/access"].pop(added, None)
        return seen


@pytest.fixture(scope="module")
def before():
    with Release(python_of_release_before()) as release:
        yield release


@pytest.fixture(scope="module")
def now():
    with Release(sys.executable) as release:
        yield release


def test_this_release_serves_all_data_of_the_previous_one(before, now, database, tmp_path):
    data, host = tmp_path / "data", tmp_path / "host"
    signing, trusted = tmp_path / "key.pem", tmp_path / "trusted.json"
    admins = {"data_dir": data, **database}
    public = json.loads(before.command("keys", "generate", signing, "--json"))["public"]
    before.command("keys", "trust", public, "--name", "ci", "--file", trusted)

    def token(*grants):
        options = [part for grant in grants for part in ("--grant", grant)]
        output = before.command("token", "create", *options, "--description", "a test", **admins)
        return output.split()[-1]

    with before.serve(data, auth="tokens", **database) as server:
        tokens = {
            name: token(grant)
            for name, grant in {
                "admin": "admin:*",
                "writer": "write:team",
                "reader": "read:team",
                "revoked": "read:team",
            }.items()
        }
        before.command("token", "revoke", tokens["revoked"], **admins)
        before.command("namespace", "set", "frozen", "--mode", "read_only", **admins)
        before.command("namespace", "set", "team", "--max-artifact", "1MiB", **admins)
        job = {"namespace": "team", "cache_dir": host, "token": tokens["writer"]}
        signed = job | {"signing_key": signing}
        strict = {"trusted_keys": trusted, "signatures": "require"}
        url = {"url": server.url}
        puts = [("put", number, f"payload {number}" * 1000) for number in (1, 2, 3)]
        assert before.client(*puts, **signed, **url) == [True] * 3
        before.client(("put", 4, "payload 4"), **job, **url, **strict)
        _, ((_, digest),) = before.client(
            ("put", WITHHELD, "wrong"), ("lookup", WITHHELD), **job, **url
        )
        # An administrator's report alone withholds an artifact.
        (report,) = before.client(
            ("report", WITHHELD, digest), **(job | {"token": tokens["admin"]}), **url
        )
        lease, *_ = before.client(
            ("acquire", LEASED),
            ("remember", "train", 1, 2),
            ("remember", "train", 2, 4),
            **job,
            **url,
            lease_seconds=600,
        )
        assert report == [True, True]
        assert lease[0] == "granted"
        stored = everything(server.url, tokens["admin"])
        server.stop()

    with now.serve(data, auth="tokens", **database) as server:
        assert everything(server.url, tokens["admin"]) == stored
        url = {"url": server.url}
        steps = [("source", number) for number in STORED]
        # The local tier starts empty: its copies do not record from which server they came.
        got = now.client(*steps, **job, **url, **strict)
        assert got == ["remote"] * 3 + ["error: unsigned"]
        fresh = job | {"cache_dir": tmp_path / "another host"}
        assert now.client(*steps[:3], **fresh, **url, **strict) == ["remote"] * 3
        assert now.client(("source", 4), **fresh, **url, **strict) == ["error: unsigned"]
        got = now.client(*[("get", number) for number in STORED], **fresh, **url)
        assert got == [f"payload {number}" * 1000 for number in (1, 2, 3)] + ["payload 4"]
        (_, _, held, renewed, _, again), stats = (
            now.client(
                ("verify", 1),
                ("get", WITHHELD),
                ("acquire", LEASED),
                ("renew", LEASED, lease[1]),
                ("release", LEASED, lease[1]),
                ("acquire", LEASED),
                **job,
                **url,
            ),
            now.client(("stats",), **job, **url),
        )
        assert (held[0], renewed, again[0]) == ("held", "renewed", "granted")
        assert stats == [[5, 1]]
        reader = fresh | {"token": tokens["reader"]}
        assert now.client(("get", 1), ("put", 7, "x"), **reader, **url)[1] == "error: forbidden 403"
        revoked = fresh | {"token": tokens["revoked"]}
        assert now.client(("lookup", 1), **revoked, **url) == ["error: unauthenticated 401"]
        frozen = fresh | {"namespace": "frozen", "token": tokens["admin"]}
        assert now.client(("put", 1, "x"), **frozen, **url) == ["error: forbidden 403"]
        (listed,) = stored["-/quarantine"]["artifacts"]
        name = "/".join([listed["namespace"], *listed["key"].values()])
        now.command("quarantine", "release", name, **admins)
        # The first artifact stays. Both releases seal equal payloads to equal bytes.
        put = now.client(("put", WITHHELD, "wrong"), ("put", 2, "else"), **fresh, **url)
        assert put == [True, "error: refused 409"]
        # Clients of the previous release, which are upgraded later, work with this server.
        later = job | {"cache_dir": tmp_path / "a third host"}
        assert before.client(*steps, ("get", WITHHELD), **later, **url) == ["remote"] * 4 + [
            "wrong"
        ]


@pytest.mark.parametrize("upgraded", ["server", "client"])
def test_client_of_one_release_works_with_a_server_of_the_other(before, now, upgraded, tmp_path):
    here, there = (before, now) if upgraded == "server" else (now, before)
    with there.serve(tmp_path / "data") as server:
        job = {"url": server.url, "namespace": "team"}
        # A colleague uses the release of the server.
        colleague = job | {"cache_dir": tmp_path / "colleague"}
        mine = job | {"cache_dir": tmp_path / "mine"}
        there.client(("put", 1, "theirs"), ("remember", "train", 1), **colleague)
        answers = here.client(
            ("get", 1),
            ("get", 2),
            ("acquire", 2),
            ("renew", 2),
            ("put", 2, "mine"),
            ("acquire", 2),
            ("acquire", 3),
            ("release", 3),
            ("verify", 2),
            ("remember", "train", 1, 2),
            ("stats",),
            **mine,
        )
        granted, ready, freed = answers[2], answers[5], answers[6]
        assert answers[:2] == ["theirs", None]
        assert (granted[0], ready[0], freed[0]) == ("granted", "ready", "granted")
        assert answers[3:5] == ["renewed", True]
        assert answers[7:] == [None, [True, False], None, [2, 0]]
        # The release before has no time to the first step.
        assert here.client(("report_run", "run-1"), **mine) == [[1, None]]
        found, missing, mine_of_them, manifest = there.client(
            ("lookup", 1, 2), ("lookup", 9), ("get", 2), ("manifest", "train"), **colleague
        )
        assert [number for number, _ in found] == [1, 2]
        assert (missing, mine_of_them) == ([], "mine")
        assert {number: runs for number, (runs, _) in manifest.items()} == {"1": 2, "2": 1}
        assert here.client(("lookup", 1, 2), ("manifest", "train"), **mine) == [found, manifest]
        assert here.client(("put", 1, "else"), **mine) == ["error: refused 409"]
        assert here.client(("report", 1, found[0][1]), **mine) == [[True, True]]
        assert there.client(("lookup", 1), **colleague) == [[]]


def test_servers_of_both_releases_serve_one_store_during_a_rolling_upgrade(
    before, now, postgres, tmp_path
):
    shared = {"database_url": postgres.new_database(template=EMPTY)}
    with (
        before.serve(tmp_path / "data", **shared) as old,
        now.serve(tmp_path / "data", **shared) as new,
    ):

        def client(release, server, host, *steps):
            settings = {"cache_dir": tmp_path / host, "namespace": "team", "lease_seconds": 600}
            return release.client(*steps, url=server.url, **settings)

        client(before, old, "a", ("put", 1, "old"), ("remember", "train", 1))
        client(now, new, "b", ("put", 2, "new"), ("remember", "train", 2))
        for number, (release, server) in enumerate(
            [(before, old), (before, new), (now, old), (now, new)]
        ):
            got = client(
                release, server, f"c{number}", ("get", 1), ("get", 2), ("manifest", "train")
            )
            assert got[:2] == ["old", "new"]
            assert sorted(got[2]) == ["1", "2"]
        ((state, token),) = client(before, old, "a", ("acquire", 3))
        assert state == "granted"
        held, renewed = client(now, new, "b", ("acquire", 3), ("renew", 3, token))
        assert (held[0], renewed) == ("held", "renewed")
        client(now, new, "b", ("put", 3, "made"))
        assert client(before, old, "a", ("acquire", 3), ("get", 3))[1] == "made"
        digests = client(now, old, "d", ("lookup", 1))
        ((_, digest),) = digests[0]
        assert client(now, old, "d", ("report", 1, digest)) == [[True, True]]
        assert client(before, new, "e", ("lookup", 1)) == [[]]


def run_in(sources, *command, **settings):
    """Run a command in the environment of the tests, with another release's sources if given."""
    paths = [] if sources is None else [sources / "client", sources / "schema"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [sys.executable, "-P", *map(str, command)],
        check=True,
        capture_output=True,
        text=True,
        env=environment | variables(settings),
        timeout=300,
    ).stdout


def test_training_resumes_from_a_checkpoint_of_the_previous_release(tmp_path):
    sources = sources_of_release_before()
    where = run_in(sources, "-c", "import graphstash; print(graphstash.__file__)")
    assert Path(where.strip()).is_relative_to(sources)
    steps = ("--steps", 24, "--accumulate", 2, "--precision", "fp16")

    def train(release, name, *options):
        report, losses = tmp_path / f"{name}.json", tmp_path / f"{name}.txt"
        run_in(release, TRAIN, report, losses, *steps, *options)
        return json.loads(report.read_text()), losses.read_text().splitlines()

    whole, losses = train(None, "whole")
    stored = ("--checkpoints", tmp_path / "checkpoints")
    _, first = train(sources, "first", *stored, "--stop-after", 12)
    resumed, rest = train(None, "rest", *stored)

    assert resumed["resumed_from"] == 12
    assert resumed["weights"] == whole["weights"]
    assert first + rest == losses


@pytest.fixture
def compile_on_both(server, tmp_path):
    """Run a compiler's job on the previous release, then on this one on another host.

    Check that both jobs compute equal losses. Return the counters of both jobs.
    """

    def compile_on_both(compiler, module, **options):
        case = case_arguments(f"{module}:training", install=True, **options)
        losses, counts = zip(
            *(
                compile_on(release, tmp_path / host, compiler, case)
                for release, host in ((sources_of_release_before(), "before"), (None, "now"))
            ),
            strict=True,
        )
        assert losses[0] == losses[1]
        return counts

    def compile_on(release, directory, compiler, case):
        directory.mkdir()
        report, stats = directory / "report.json", directory / "stats.jsonl"
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory / "inductor"))
            environment.setenv("TMPDIR", str(directory))
            environment.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # as in zygotes
            run_in(
                release,
                RUN_CASE,
                report,
                *case,
                url=server.url,
                namespace=f"release-before-{compiler}",
                hooks=compiler,
                drain_seconds=60,
                cache_dir=directory / "tier",
                stats_file=stats,
            )
        lines = [json.loads(line) for line in stats.read_text().splitlines()]
        counted = {name: sum(each[name] for each in lines) for name in ("misses", "published")}
        hits = ("hits_server", "hits_prefetched")
        counted["hits"] = sum(each[name] for each in lines for name in hits)
        return json.loads(report.read_text())["losses"], counted

    return compile_on_both


@pytest.mark.parametrize(
    ("hook", "cases", "keywords"),
    [
        ("inductor", "inductor", {"matmul": True}),  # needs no C++ compiler
        ("jax", "jax_programs", {}),
    ],
)
def test_graph_whose_key_lacked_state_code_or_threads_is_compiled_again(
    compile_on_both, hook, cases, keywords
):
    before, now = compile_on_both(hook, cases, **keywords)
    assert before["published"] == before["misses"] > 0
    assert now == {"hits": 0, "misses": before["misses"], "published": before["misses"]}


def test_entry_points_and_dotted_names_of_the_previous_release_exist():
    """Users' files and variables contain these names, and environments are upgraded in place."""
    project = tomllib.loads((sources_of_release_before() / "pyproject.toml").read_text())["project"]
    for group, named in project["entry-points"].items():
        for name in named:
            (point,) = entry_points(group=group, name=name)
            assert point.load()
    for group in ("jax_plugins", "torch.backends"):
        assert callable(
            _function(EntryPoint("x", project["entry-points"][group]["graphstash"], group))
        )
    for value in ("SharedCacheManager", "SharedCacheBackend"):
        assert EntryPoint("x", f"graphstash.hooks.triton:{value}", "x").load().__name__ == value


def _function(point):
    loaded = point.load()
    return getattr(loaded, "initialize", loaded)
