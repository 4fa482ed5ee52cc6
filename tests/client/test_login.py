"""`graphstash login --oidc`, with a JWT from GitHub, from a cluster, and from a file."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from graphstash._cli.doctor.findings import State
from graphstash._http.credentials import Credentials
from graphstash.config import ClientConfig
from graphstash_schema import TOKEN_FORM
from support.doctor import diagnose, line
from support.hostile import Middlebox
from support.http_server import Answer
from support.issuer import Cluster, Issuer
from support.processes import graphstash_here
from support.tokens import Guarded
from support.waiting import PATIENT_VARIABLES

RULES = [{"claims": {"repository": "team/model"}, "grants": ["write:ci-*", "read:trusted"]}]
ACCOUNT = {"namespace": "ci", "serviceaccount": {"name": "trainer"}}
CLUSTER = [{"claims": {"kubernetes.io": ACCOUNT}, "grants": ["read:trusted"]}]


GITHUB = ("--audience", "graphstash")


@pytest.fixture(scope="module")
def github():
    with Issuer() as issuer:
        issuer.add_key("first")
        yield issuer


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as issuer:
        issuer.add_key("first")
        yield issuer


@pytest.fixture(scope="module")
def guarded(github, cluster, tmp_path_factory):
    issuers = [
        {"name": name, "issuer": each.url, "audience": "graphstash", "rules": rules}
        for name, each, rules in (("github", github, RULES), ("k8s", cluster, CLUSTER))
    ]
    with Guarded(tmp_path_factory.mktemp("server"), oidc_issuers=issuers) as guarded:
        yield guarded


@pytest.fixture
def place(tmp_path):
    return tmp_path / "secrets" / "token"


@pytest.fixture
def login(guarded, place):
    def login(*arguments, status=0, **variables):
        given = {"GRAPHSTASH_URL": guarded.url, "GRAPHSTASH_TOKEN_FILE": place, "COLUMNS": 200}
        done = graphstash_here(
            "login", "--oidc", *arguments, **given | PATIENT_VARIABLES | variables
        )
        assert done.returncode == status, done.stderr
        return done

    return login


@pytest.fixture
def access(guarded, place):
    """Return a function that returns the access granted to the token in the file."""

    def access():
        token = Credentials(ClientConfig(url=guarded.url, token_file=place)).token()
        answer = guarded.http(token).get("/v1/-/access")
        return answer.json() if answer.status_code == 200 else answer.status_code

    return access


def test_a_job_of_github_logs_in_with_all_rights_or_fewer(login, github, guarded, place, access):
    output = login(*GITHUB, **github.job).stdout

    assert "oidc/github:repo:team/model (write:ci-*, read:trusted) until" in output
    assert str(place) in output
    assert place.read_text().strip() not in output
    assert place.stat().st_mode & 0o777 == 0o600
    assert place.parent.stat().st_mode & 0o777 == 0o700
    assert access()["grants"] == [
        {"scope": "write", "namespaces": "ci-*"},
        {"scope": "read", "namespaces": "trusted"},
    ]
    finding = line(diagnose(guarded.url, token_file=place, namespace="ci-1"), "token")
    assert (finding.state, "expires in 6.0 hours" in finding.found) == (State.OK, True)

    fewer = ("--grant", "read:ci-1", "--grant", "read:trusted", "--hours", "0.5")
    login(*GITHUB, *fewer, **github.job)

    left = datetime.fromisoformat(access()["expires_at"]) - datetime.now(UTC)
    assert timedelta(minutes=20) < left <= timedelta(minutes=30)
    assert [each["scope"] for each in access()["grants"]] == ["read", "read"]


def test_a_pod_logs_in_with_the_token_of_its_service_account(login, cluster, tmp_path, access):
    (tmp_path / "projected").write_text(cluster.token("first"))

    login("--jwt-file", tmp_path / "projected")

    assert access()["name"].endswith(" oidc/k8s:system:serviceaccount:ci:trainer")
    assert access()["issuer"] == cluster.url


def test_a_job_logs_in_with_a_jwt_from_standard_input(guarded, github, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "graphstash", "login", "--oidc", "--jwt-file", "-", "--json"],
        input=github.token("first") + "\n",
        env=os.environ
        | PATIENT_VARIABLES
        | {"GRAPHSTASH_URL": guarded.url, "GRAPHSTASH_TOKEN_FILE": "token"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    saved = json.loads(done.stdout)
    token = (tmp_path / "token").read_text().strip()
    assert saved["file"] == str(tmp_path / "token")
    assert saved["id"] == TOKEN_FORM.fullmatch(token)["id"]
    assert TOKEN_FORM.fullmatch(token)["secret"] not in done.stdout + done.stderr


def test_second_login_replaces_token_of_running_jobs_and_a_link(
    login, github, guarded, place, tmp_path
):
    (tmp_path / "other").write_text("mine")
    place.parent.mkdir()
    place.symlink_to(tmp_path / "other")
    login(*GITHUB, **github.job)
    assert (tmp_path / "other").read_text() == "mine"
    assert not place.is_symlink()
    place.chmod(0o644)
    credentials = Credentials(ClientConfig(url=guarded.url, token_file=place))
    first = credentials.token()

    login(*GITHUB, **github.job)

    assert first != credentials.token() == place.read_text().strip()
    assert place.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("arguments", "variables", "status", "text"),
    [
        ((), {}, 2, "--audience"),
        (GITHUB, {"ACTIONS_ID_TOKEN_REQUEST_URL": ""}, 2, "id-token: write"),
        (GITHUB, {"ACTIONS_ID_TOKEN_REQUEST_TOKEN": "of-another"}, 1, "answered 401"),
        (GITHUB, {"ACTIONS_ID_TOKEN_REQUEST_URL": "http://a:port"}, 1, "REQUEST_URL"),
        (GITHUB, {"ACTIONS_ID_TOKEN_REQUEST_URL": "x"}, 1, "connect"),
        (("--audience", "another"), {}, 1, "its audience"),
        ((*GITHUB, "--grant", "own:x"), {}, 2, "own"),
        ((*GITHUB, *(["--grant", "read:trusted"] * 65)), {}, 2, "64"),
        ((*GITHUB, "--grant", "admin:*"), {}, 1, "admin:*"),
        ((*GITHUB, "--grant", "write:ci-1"), {}, 1, "trusted"),
        ((*GITHUB, "--hours", "7"), {}, 1, "21600"),
        ((*GITHUB, "--hours", "0.01"), {}, 2, "--hours 0.01: expected from 1/60"),
        ((*GITHUB, "--hours", "nan"), {}, 2, "8760"),
        (GITHUB, {"GRAPHSTASH_TOKEN": "gst_x"}, 2, "unset it"),
        (GITHUB, {"GRAPHSTASH_TOKEN_FILE": ""}, 2, "GRAPHSTASH_TOKEN_FILE"),
        (GITHUB, {"GRAPHSTASH_TOKEN_FILE": "/dev/null/x"}, 2, "/dev/null/x"),
        (GITHUB, {"GRAPHSTASH_URL": "http://127.0.0.1:1"}, 1, "connect"),
        (("--jwt-file", "/nowhere"), {}, 2, "/nowhere"),
        (("--jwt-file", "/etc/passwd"), {}, 2, "holds no JWT"),
    ],
)
def test_failed_login_reports_reason_and_keeps_old_token(
    login, github, place, arguments, variables, status, text
):
    place.parent.mkdir()
    place.write_text("old")

    done = login(*arguments, status=status, **github.job | variables)

    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert place.read_text() == "old"
    assert [each.name for each in place.parent.iterdir()] == ["token"]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{}", 201, "TokenIssued"),
        (b"gst_", 201, "TokenIssued"),
        (lambda body: body.replace(b'"gst_', b'"gst_x\\nmachine evil'), 201, "something else"),
        (b"{}", 404, "older than this command"),
    ],
)
def test_unexpected_answer_of_server_leaves_no_token(
    login, github, guarded, place, body, status, text
):
    def change(_, answer):
        sent = body(answer.body) if callable(body) else body
        headers = {name: value for name, value in answer.headers.items() if name[:7] != "content"}
        return Answer(status, headers, sent)

    with Middlebox(guarded.url, change) as box:
        done = login(*GITHUB, status=1, **github.job, GRAPHSTASH_URL=box.url)

    assert text in done.stderr
    assert list(place.parent.iterdir()) == []
