"""compose.yaml without containers: PostgreSQL, `graphstash migrate`, two servers and nginx."""

import re
import shlex

import pytest

from graphstash_schema import Digest
from support.compose import DOCKER
from support.load import Load
from support.waiting import until

pytestmark = pytest.mark.extended


@pytest.fixture
def deployment(standing_deployment):
    return standing_deployment


def test_artifact_of_one_host_reaches_another_by_nginx_and_both_servers(deployment, http):
    key = deployment.new_key()
    deployment.put(key)
    assert deployment.get(key) == deployment.payload

    path = str(key.artifact_path("default"))
    answer = http.get(deployment.url + path, headers=deployment.headers)
    assert deployment.nginx.has_sent(answer.headers["x-request-id"])
    for port in deployment.ports.values():
        answer = http.get(f"http://127.0.0.1:{port}{path}", headers=deployment.headers)
        assert (answer.status_code, Digest.of(answer.content).etag) == (200, answer.headers["etag"])
    for _ in range(6):
        assert http.get(deployment.url + "/readyz").status_code == 200
    for port in deployment.ports.values():
        assert f'"server":"127.0.0.1:{port}"' in deployment.nginx.log, "nginx asks both"


def test_every_address_refuses_requests_without_a_token(deployment, http):
    path = str(deployment.new_key().artifact_path("default"))
    blob = deployment.payload
    digest = {"Repr-Digest": Digest.of(blob).repr_digest}

    ports = [deployment.nginx.port, *deployment.ports.values()]
    for url in (f"http://127.0.0.1:{port}" for port in ports):
        for headers in ({}, {"Authorization": "Bearer gst_" + "a" * 16 + "_" + "A" * 43}):
            put = http.put(url + path, content=blob, headers=headers | digest)
            got = [http.get(url + each, headers=headers) for each in (path, "/v1/stats")]
            assert [answer.status_code for answer in (put, *got)] == [401] * 3
    assert http.get(deployment.url + path, headers=deployment.headers).status_code == 404


def test_first_commands_of_guide_let_ci_write_and_developers_read(deployment, http):
    guide = (DOCKER / "README.md").read_text()
    form = re.compile(r"^dc exec -T server-1 (graphstash (?:namespace|token) .*)", re.MULTILINE)
    commands = form.findall(guide)
    done = [deployment.exec("server-1", *shlex.split(each)) for each in commands]
    assert [each.returncode for each in done] == [0] * 4, [each.stderr for each in done]
    callers = [{"Authorization": f"Bearer {each.stdout.strip()}"} for each in done[1:]]
    path = str(deployment.new_key().artifact_path("trusted"))
    blob = deployment.payload
    digest = {"Repr-Digest": Digest.of(blob).repr_digest}

    _, ci, developers = callers
    put = [
        http.put(deployment.url + path, content=blob, headers=each | digest).status_code
        for each in (developers, ci)
    ]
    got = [http.get(deployment.url + path, headers=each).status_code for each in callers]
    ends = [
        http.get(deployment.url + "/v1/-/access", headers=each).json()["expires_at"]
        for each in callers
    ]
    assert (put, got) == ([403, 201], [200] * 3)
    assert all(ends)


def until_nginx_asks(deployment, service):
    """Wait until nginx sends requests to a server, which it avoids for a while after failures."""
    at, asked = len(deployment.nginx.log), f'"server":"127.0.0.1:{deployment.ports[service]}"'
    until(lambda: asked in deployment.nginx.log[at:])


def test_rolling_restart_under_load_fails_no_request(deployment):
    with Load(deployment.url, deployment.headers, puts=True) as load:
        for service in ("server-1", "server-2"):
            load.wait_for(20)
            assert deployment.stop(service) == 0
            load.wait_for(20)
            deployment.start(service)
            until_nginx_asks(deployment, service)
        load.wait_for(20)
    assert load.failures == []


def test_health_checks_distinguish_healthy_from_broken(deployment):
    """The image's own check, for users without compose.yaml, depends on the process only."""
    own = [deployment.substituted("server-1", part) for part in deployment.image.healthcheck]
    for service in ("postgres", "server-1", "server-2", "nginx"):
        assert deployment.check(service) == 0, service
    assert deployment.exec("server-1", *own).returncode == 0

    deployment.postgres.kill()
    assert deployment.check("postgres") != 0
    until(lambda: deployment.check("server-1") != 0)  # a result is valid for one second
    assert deployment.exec("server-1", *own).returncode == 0
    assert deployment.check("nginx") == 0, "nginx is not to blame"
    deployment.postgres.start()
    until(lambda: deployment.check("server-1") == 0)

    deployment.kill("server-1")
    assert deployment.check("server-1") != 0
    assert deployment.exec("server-1", *own).returncode != 0
    deployment.start("server-1")
    deployment.nginx.close()
    assert deployment.check("nginx") != 0
    deployment.start_nginx()


def test_server_does_not_start_before_the_database_is_migrated(deploy):
    deployment = deploy("compose.yaml")

    refused = deployment.run("server-1")

    assert refused.returncode != 0
    assert "migrate" in refused.stderr
