"""Variants of the deployment: workers, TLS, S3, read-only roots, the image's steps."""

import os
import ssl
import sys
import sysconfig

import httpx
import pytest

from graphstash_schema import Digest
from support.compose import copy_build_context, example_variables
from support.moto import Moto
from support.processes import captured

pytestmark = pytest.mark.extended


def test_example_variables_with_two_workers_are_a_working_deployment(deploy):
    variables = {name: value for name, value in example_variables().items() if value}
    deployment = deploy("compose.yaml", **variables | {"GRAPHSTASH_WORKERS": "2"}).up("server-1")
    key = deployment.new_key()
    deployment.put(key)

    assert deployment.get(key) == deployment.payload
    assert deployment.stop("server-1") == 0


def test_tls_variant_needs_two_files(deploy, certificate):
    deployment = deploy(
        "compose.yaml",
        "compose.tls.yaml",
        GRAPHSTASH_TLS_CERTIFICATE=str(certificate[0]),
        GRAPHSTASH_TLS_KEY=str(certificate[1]),
    )
    deployment.migrate()
    deployment.start("server-1")
    deployment.make_token()
    deployment.start_nginx(
        GRAPHSTASH_TLS_CERTIFICATE=str(certificate[0]), GRAPHSTASH_TLS_KEY=str(certificate[1])
    )
    assert deployment.check("nginx") == 0
    trusting = ssl.create_default_context(cafile=certificate[0])
    blob = deployment.payload
    path = deployment.url + str(deployment.new_key().artifact_path("default"))
    with httpx.Client(
        verify=trusting, headers=deployment.headers, trust_env=False, timeout=30
    ) as client:
        sent = client.put(path, content=blob, headers={"Repr-Digest": Digest.of(blob).repr_digest})
        assert sent.status_code == 201
        answer = client.get(path, headers={"Range": "bytes=5-9"})
        assert (answer.status_code, answer.content) == (206, blob[5:10])
        assert deployment.nginx.has_sent(answer.headers["x-request-id"])
        for response in (answer, sent, client.get(deployment.url + "/nothing")):
            assert response.headers["strict-transport-security"] == "max-age=31536000"
    with httpx.Client(trust_env=False) as client:
        with pytest.raises(httpx.ConnectError):
            client.get(path)
        plain = client.get(path.replace("https:", "http:"))
        assert plain.status_code == 400


@pytest.fixture
def moto():
    with Moto() as moto:
        yield moto


def test_with_s3_the_bucket_is_created_and_shared_by_all_servers(deploy, moto, http):
    deployment = deploy(
        "compose.yaml",
        "compose.s3.yaml",
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",
        GRAPHSTASH_S3_BUCKET="from-compose",
        GRAPHSTASH_S3_ENDPOINT_URL=moto.url,
    )
    for _ in range(2):
        made = deployment.run("bucket")
        assert made.returncode == 0, made.stderr
    deployment.up()
    key = deployment.new_key()
    deployment.put(key)

    assert deployment.get(key) == deployment.payload
    path = str(key.artifact_path("default"))
    for port in deployment.ports.values():
        answer = http.get(f"http://127.0.0.1:{port}{path}", headers=deployment.headers)
        assert (answer.status_code, Digest.of(answer.content).etag) == (200, answer.headers["etag"])
    behind = http.get(deployment.url + path, headers=deployment.headers)
    assert behind.status_code == 200
    assert not deployment.nginx.has_sent(behind.headers["x-request-id"])


# Like a container: a mount namespace in which only the volume and a tmpfs are writable.
READ_ONLY = """
set -e
mount --make-rprivate /
mount --bind "$GRAPHSTASH_DATA_DIR" "$GRAPHSTASH_DATA_DIR"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$TMPFS"
findmnt --noheadings --list --output TARGET | while read -r target; do
    case "$target" in "$GRAPHSTASH_DATA_DIR" | "$TMPFS" | /proc* | /sys* | /dev*) continue ;; esac
    mount -o remount,bind,ro "$target"
done
if touch "$OUTSIDE/probe" 2> /dev/null; then echo "the root is writable" >&2; exit 99; fi
exec "$@"
"""


def test_server_writes_only_to_its_volume_and_tmp(deploy, tmp_path):
    deployment = deploy("compose.yaml")
    deployment.migrate()
    deployment.prefix = ["unshare", "--mount", *as_root(), "sh", "-c", READ_ONLY, "read-only"]
    deployment.more = {"TMPFS": str(deployment.directory / "tmp"), "OUTSIDE": str(tmp_path)}
    deployment.start("server-1")
    deployment.make_token()
    url = f"http://127.0.0.1:{deployment.ports['server-1']}"
    path = url + str(deployment.new_key().artifact_path("default"))
    blob = deployment.payload * 5
    with httpx.Client(headers=deployment.headers, trust_env=False, timeout=30) as client:
        sent = client.put(path, content=blob, headers={"Repr-Digest": Digest.of(blob).repr_digest})
        assert sent.status_code == 201
        assert client.get(path).content == blob
    assert deployment.stop("server-1") == 0


def as_root():
    """Without root, a user namespace grants the right to mount."""
    return [] if os.geteuid() == 0 else ["--user", "--map-root-user"]


def test_steps_of_the_dockerfile_install_a_working_server(deploy, tmp_path):
    """The Dockerfile runs docker/install.sh. Here, both directories are elsewhere."""
    source, venv = tmp_path / "source", tmp_path / "opt" / "graphstash"
    copy_build_context(source)
    deployment = deploy("compose.yaml")
    (install,) = [rest for name, rest in deployment.image.instructions if "install.sh" in rest]
    command = install.replace("--mount=type=cache,target=/root/.cache/uv", "").split()
    assert command == ["docker/install.sh", "/source", "/opt/graphstash"]
    scripts = sysconfig.get_path("scripts")
    built = captured(
        [source / "docker" / "install.sh", source, venv, sys.executable],
        env=os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}"},
    )
    assert built.returncode == 0, built.stderr
    deployment.scripts = str(venv / "bin")

    heavy = "import importlib.util as u; print([n for n in ('torch', 'pytest') if u.find_spec(n)])"
    found = captured([venv / "bin" / "python", "-I", "-c", heavy], check=True)
    assert found.stdout.strip() == "[]"
    stores = "import boto3, google.cloud.storage, obstore"
    captured([venv / "bin" / "python", "-I", "-c", stores], check=True)
    deployment.migrate()
    deployment.start("server-1")
    deployment.make_token()
    key = deployment.new_key()
    deployment.put(key)
    assert deployment.get(key) == deployment.payload
