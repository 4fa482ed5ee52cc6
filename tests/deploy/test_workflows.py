"""The files of .github and of docs/ci.md are valid, and their shell commands work."""

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from support.compose import DOCKER
from support.environments import python_of
from support.issuer import Issuer
from support.processes import captured
from support.tokens import Guarded
from support.waiting import PATIENT_VARIABLES

pytestmark = pytest.mark.extended

ROOT = DOCKER.parent
GITHUB = ROOT / ".github"
ACTION = GITHUB / "actions" / "run" / "action.yml"
RULES = [{"claims": {"repository": "team/model"}, "grants": ["write:ci"]}]

TRAIN = """
import os, graphstash
from graphstash_schema import ArtifactKind, DeviceType, ArtifactKey, fingerprint_of
parts = {"program": os.environ["PROGRAM"]}
key = ArtifactKey(
    kind=ArtifactKind.SCHEDULE,
    device_type=DeviceType("cpu"),
    fingerprint=fingerprint_of(ArtifactKind.SCHEDULE, parts),
)
graphstash.get_or_compile(key, lambda: b"built", parts=parts, label=parts["program"])
"""


def files_of_the_page(directory):
    """Write the page's files, with placeholders filled in. Return the paths by title."""
    page = (ROOT / "docs" / "ci.md").read_text()
    blocks = dict(
        re.findall(r'^```yaml title="([^"]+)"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    )
    written = {}
    for title, text in blocks.items():
        path = directory / title
        path.parent.mkdir(parents=True, exist_ok=True)
        commit = text.replace("<this repository>", "team/graphstash").replace("<commit>", "1" * 40)
        path.write_text(commit)
        written[title] = path
    return written


def checked(*command):
    done = captured([str(python_of("workflows").parent / command[0]), *command[1:]], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_follow_the_schemas_of_their_systems(tmp_path):
    page = files_of_the_page(tmp_path)
    github = [*(GITHUB / "workflows").iterdir(), page[".github/workflows/train.yml"]]
    checked("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, github))
    checked("check-jsonschema", "--builtin-schema", "vendor.github-actions", str(ACTION))
    gitlab = ("--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci")
    checked("check-jsonschema", *gitlab, str(page[".gitlab-ci.yml"]))


def test_zizmor_finds_no_unsafe_workflow(tmp_path):
    page = files_of_the_page(tmp_path)
    checked("zizmor", "--offline", "--no-progress", str(GITHUB))
    checked("zizmor", "--offline", "--no-progress", str(page[".github/workflows/train.yml"].parent))


def test_workflows_run_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (GITHUB / "workflows").iterdir():
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                for target in re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.MULTILINE):
                    assert target in targets


# -- the shell of the action --


@pytest.fixture(scope="module")
def github():
    with Issuer() as issuer:
        issuer.add_key("first")
        yield issuer


@pytest.fixture(scope="module")
def guarded(github, tmp_path_factory):
    issuer = {"name": "g", "issuer": github.url, "audience": "graphstash", "rules": RULES}
    with Guarded(tmp_path_factory.mktemp("server"), oidc_issuers=[issuer]) as guarded:
        yield guarded


@pytest.fixture
def act(github, guarded, tmp_path):
    """Run the action's step on a new runner. Return the outcome and the job's summary."""

    def act(program, *, fork=False, job_environment=github.job, **inputs):
        (step,) = (
            each
            for each in yaml.safe_load(ACTION.read_text())["runs"]["steps"]
            if each["name"] == "Run"
        )
        inputs = {
            "url": guarded.url,
            "namespace": "ci",
            "read-namespaces": "",
            "read-only": "false",
            "audience": "graphstash",
            "job": "train me/smoke",
            "command": f"{sys.executable} train.py",
            "minimum-hit-rate": "0",
            "farm": "",
        } | inputs
        runner = tmp_path / f"runner-{len(list(tmp_path.iterdir()))}"
        runner.mkdir()
        (runner / "train.py").write_text(TRAIN)
        env = {name: evaluated(value, inputs, fork=fork) for name, value in step["env"].items()} | {
            "RUNNER_TEMP": str(runner),
            "GITHUB_STEP_SUMMARY": str(runner / "summary.md"),
            "PROGRAM": program,
            "HOME": str(runner),
            "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
        }
        done = captured(
            [shutil.which("bash"), "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=runner,
            env=env | PATIENT_VARIABLES | ({} if fork else job_environment),
            timeout=120,
        )
        summary = Path(env["GITHUB_STEP_SUMMARY"])
        return done, summary.read_text() if summary.exists() else ""

    return act


def evaluated(expression, inputs, *, fork):
    """Return GitHub's value of an expression that the action uses."""
    text = expression.removeprefix("${{ ").removesuffix(" }}")
    if text == "github.event.pull_request.head.repo.full_name || github.repository":
        return "stranger/model" if fork else "team/model"
    if text == "github.repository":
        return "team/model"
    assert text.startswith("inputs."), text
    return inputs[text.removeprefix("inputs.")]


def test_second_job_hits_what_the_first_one_published(act):
    done, summary = act("shared")
    assert done.returncode == 0, done.stderr
    assert "0 hits, 1 miss" in summary
    assert "| shared |" in summary
    done, summary = act("shared", **{"minimum-hit-rate": "1"})
    assert done.returncode == 0, done.stderr
    assert "1 hit, 0 misses (100% hits)" in summary


def test_job_below_the_rate_fails_and_still_has_its_summary(act):
    done, summary = act("new program", **{"minimum-hit-rate": "0.9"})
    assert done.returncode == 1
    assert "hit rate 0.0%" in done.stderr
    assert "| new program |" in summary


@pytest.mark.parametrize("status", [0, 7])
def test_status_of_the_command_is_the_status_of_the_job(act, status):
    done, summary = act("x", command=f"exit {status}")
    assert done.returncode == status
    assert "No run on this host" in summary


@pytest.mark.parametrize(
    "inputs",
    [
        {"job": ".github/workflows/train.yml/" + "j" * 200},
        {"url": "no address"},
        {"namespace": "no namespace!"},
        {"audience": ""},
    ],
)
def test_wrong_input_of_the_cache_does_not_fail_the_job(act, inputs):
    done, _ = act("x", **inputs)
    assert done.returncode == 0, done.stderr


def test_without_graphstash_the_command_runs_and_fails_a_minimum_hit_rate(act):
    empty = {"PATH": "/usr/bin:/bin"}
    done, _ = act("x", job_environment=empty, command="echo trained")
    assert (done.returncode, done.stdout.strip()) == (0, "trained")
    done, _ = act("x", job_environment=empty, command="echo trained", **{"minimum-hit-rate": "0.5"})
    assert (done.returncode, done.stdout.strip()) == (1, "trained")


def test_inputs_of_the_action_are_not_in_the_environment_of_the_command(act):
    done, _ = act("x", command="echo ${JOB-}${COMMAND-}${AUDIENCE-}${SOURCE-}.")
    assert done.stdout.splitlines()[-1] == "."


def test_failed_login_warns_and_the_job_compiles(act, github):
    done, summary = act("alone", audience="of another service")
    assert done.returncode == 0, done.stderr
    assert "::warning title=graphstash::the login failed" in done.stdout
    assert "| alone |" in summary


def test_pull_request_of_a_fork_does_not_log_in_and_publishes_nothing(act):
    done, summary = act("of a fork", fork=True)
    assert done.returncode == 0, done.stderr
    assert "login" not in done.stdout + done.stderr
    done, summary = act("of a fork")
    assert "0 hits, 1 miss" in summary


def test_farm_that_fails_warns_and_the_job_continues(act):
    farm = "\n--topology v5e:2x2\ntrain.py:step\n"  # there is no Ray here
    done, summary = act("after a farm", farm=farm)
    assert done.returncode == 0, done.stderr
    assert "farm needs Ray" in done.stderr
    assert "::warning title=graphstash::not every program was compiled ahead" in done.stdout
    assert "| after a farm |" in summary


def test_pull_request_of_a_fork_starts_no_farm(act):
    done, _ = act("of a fork", fork=True, farm="--topology v5e:2x2 train.py:step")
    assert done.returncode == 0, done.stderr
    assert "farm" not in done.stdout + done.stderr


def test_quoted_words_of_a_command_are_not_expanded_by_the_action(act, tmp_path):
    done, _ = act("x", command="echo '$(touch " + str(tmp_path / "never") + ")'")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "never").exists()
