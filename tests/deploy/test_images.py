"""The image and the compose files in a container engine, by the commands of docker/README.md.

`make test-images` runs these tests. `make test-all` runs them if an engine is present.
"""

import json
import os
import re
import secrets
import shutil
import ssl
import subprocess
from contextlib import contextmanager
from ipaddress import IPv4Network

import httpx
import pytest
import yaml

from graphstash_schema import ArtifactKey, Digest
from support.compose import DOCKER, copy_build_context
from support.load import Load
from support.ports import reserved_port
from support.processes import captured
from support.swift import Swift
from support.waiting import until

pytestmark = [pytest.mark.extended, pytest.mark.images, pytest.mark.timeout(900)]

BLOB = os.urandom(3_000_000)
SERVERS = ("server-1", "server-2")


_DEADLINE_SECONDS = 600

_OVERRIDES = re.compile("GRAPHSTASH_|AWS_|COMPOSE_")
"""Variables of a shell that override docker/.env in Compose."""


def bridge_address():
    """Return the address at which containers reach this host."""
    inspect = ["docker", "network", "inspect", "bridge", "--format", "{{json .IPAM.Config}}"]
    done = captured(inspect, check=True)
    (config, *_) = json.loads(done.stdout)
    first = next(IPv4Network(config["Subnet"]).hosts())  # for engines that do not name it
    return str(config.get("Gateway") or first)


def guide(heading=""):
    """Return the bash blocks below a heading of docker/README.md, or above the first heading."""
    text = (DOCKER / "README.md").read_text()
    if heading:
        text = text[text.index(f"\n## {heading}\n") + 4 :]
    return re.findall(r"^```sh\n(.*?)^```$", text.partition("\n## ")[0], re.MULTILINE | re.DOTALL)


class Project:
    """Context manager that starts the deployment of docker/README.md beside other deployments.

    The test replaces only names that a host must not have twice: project, volumes, tags, port and
    subnet. It removes all of them at the end.

    Attributes:
        directory: checkout in which commands run.
        files: compose files, in order.
        port: port of nginx on loopback.
    """

    def __init__(self, directory):
        self.name = f"graphstash-test-{secrets.token_hex(4)}"
        self.directory = directory
        self.files = ["docker/compose.yaml"]
        self.port = reserved_port()
        self._subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"

    def __enter__(self):
        copy_build_context(self.directory)
        shutil.copytree(
            DOCKER, self.directory / "docker", dirs_exist_ok=True, ignore=lambda *_: [".env"]
        )
        return self

    def __exit__(self, *_):
        self.sh("dc down --volumes --remove-orphans --timeout 5", check=False)
        tags = self.sh(f"docker image ls --quiet {self.name}", check=False).stdout.split()
        subprocess.run(["docker", "image", "rm", "--force", *tags], check=False)

    def set(self, **variables):
        """Add variables to docker/.env. The last value of a name counts."""
        with (self.directory / "docker" / ".env").open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in variables.items())

    def set_names(self):
        """Set the names in docker/.env that two deployments of a host must not share."""
        self.set(
            GRAPHSTASH_PUBLISHED_PORT=str(self.port),
            GRAPHSTASH_SUBNET=self._subnet,
            GRAPHSTASH_IMAGE=f"{self.name}:0.1.0",
        )

    def sh(self, script, *, check=True):
        """Run lines of the guide. `dc` stands for compose with the current files.

        Raises:
            AssertionError: a command failed. The message is the commands' output.
        """
        names = {
            "graphstash:0.": f"{self.name}:0.",
            "graphstash_data": f"{self.name}_data",
            "docker compose --file docker/compose.yaml": "dc",
        }
        for name, own in names.items():
            script = script.replace(name, own)
        compose = ["docker", "compose", "--project-name", self.name]
        for file in self.files:
            compose += ["--file", file]
        done = captured(
            ["bash", "-euc", f'dc() {{ {" ".join(compose)} "$@"; }}\n{script}'],
            cwd=self.directory,
            env={name: value for name, value in os.environ.items() if not _OVERRIDES.match(name)},
            stdin=subprocess.DEVNULL,
            timeout=_DEADLINE_SECONDS,
        )
        if check and done.returncode:
            logs = self.sh("dc ps --all; dc logs --tail 30", check=False)
            raise AssertionError(f"{script}\n{done.stdout}{done.stderr}\n{logs.stdout}")
        return done

    def containers(self):
        """Return the container of each service, as `docker inspect` describes it."""
        ids = self.sh("dc ps --all --quiet").stdout.split()
        found = json.loads(self._docker("inspect", *ids))
        label = "com.docker.compose.service"
        return {each["Config"]["Labels"][label]: each for each in found}

    def log(self, service):
        """Return the lines that a service's container has written to its standard output."""
        return self._docker("logs", self.containers()[service]["Id"]).splitlines()

    @staticmethod
    def _docker(*arguments):
        return captured(["docker", *arguments], check=True).stdout


class Caller:
    """A caller of a deployment, with a token."""

    def __init__(self, project, token, *, ca=None):
        self.headers = {"Authorization": f"Bearer {token}"}
        self.url = f"{'https' if ca else 'http'}://127.0.0.1:{project.port}"
        self._verify = ssl.create_default_context(cafile=ca) if ca else True

    @staticmethod
    def path(number, namespace="trusted"):
        key = ArtifactKey.parse("jax", "cpu", f"{number:064x}")
        return str(key.artifact_path(namespace))

    def put(self, number, blob=BLOB, namespace="trusted"):
        headers = {"Repr-Digest": Digest.of(blob).repr_digest}
        return self._call("PUT", self.path(number, namespace), headers, content=blob)

    def get(self, number, namespace="trusted", **headers):
        return self.read(self.path(number, namespace), **headers)

    def read(self, path, **headers):
        return self._call("GET", path, headers)

    def _call(self, method, path, headers, **body):
        return httpx.request(
            method,
            self.url + path,
            headers=self.headers | headers,
            verify=self._verify,
            timeout=60,
            trust_env=False,
            **body,
        )


@contextmanager
def started(directory, *overrides, **variables):
    """Start a deployment with the first block of the guide."""
    build, copy, password, up = guide()[0].splitlines()
    with Project(directory) as project:
        project.sh(f"{build}\n{copy}\n{password}")
        project.set_names()
        project.set(**variables)
        for name, override in overrides:
            (directory / name).write_text(yaml.safe_dump(override))
            project.files.append(name)
        project.sh(up)
        yield project


def callers_of(project):
    """Return admin, CI and developers with tokens from the second block of the guide."""
    dc, policy, *tokens = guide()[1].splitlines()
    assert dc.startswith("dc() {")
    project.sh(policy)
    return [Caller(project, project.sh(each).stdout.strip()) for each in tokens]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    with started(tmp_path_factory.mktemp("images") / "checkout") as project:
        yield project


@pytest.fixture(scope="module")
def callers(project):
    return callers_of(project)


@pytest.fixture
def admin(callers):
    return callers[0]


def entry_of(project, answer):
    """Return the log entry that nginx wrote about an answer."""
    wanted = answer.headers["x-request-id"]

    def found():
        lines = [line for line in project.log("nginx") if line.startswith("{")]
        return [each for each in map(json.loads, lines) if wanted in each.values()]

    until(found)
    return found()[0]


def test_first_block_of_guide_starts_healthy_locked_down_deployment(project):
    containers = project.containers()
    migrate = containers.pop("migrate")
    assert (migrate["State"]["Status"], migrate["State"]["ExitCode"]) == ("exited", 0)
    assert sorted(containers) == ["nginx", "postgres", *SERVERS]
    for name, each in containers.items():
        assert each["State"]["Health"]["Status"] == "healthy", name
        assert each["HostConfig"]["ReadonlyRootfs"], name
    for name in SERVERS:
        assert project.sh(f"dc exec -T {name} id -u").stdout.strip() == "10001"
        refused = project.sh(f"dc exec -T {name} touch /opt/graphstash/x", check=False)
        assert "Read-only file system" in refused.stderr
    published = [each for each in containers.values() if each["HostConfig"]["PortBindings"]]
    assert published == [containers["nginx"]]


def test_ci_writes_developers_read_and_nginx_sends_the_bytes(project, callers):
    _, ci, developers = callers
    assert developers.put(1).status_code == 403
    assert ci.put(1).status_code == 201
    answer = developers.get(1)
    assert (answer.status_code, answer.content) == (200, BLOB)
    assert entry_of(project, answer)["server_bytes"] == "0"
    part = developers.get(1, Range="bytes=5-9")
    assert (part.status_code, part.content) == (206, BLOB[5:10])
    assert Caller(project, "gst_nobody").get(1).status_code == 401


def test_restore_after_backup_of_the_guide_returns_blobs_and_tokens(project, callers):
    _, ci, developers = callers
    assert ci.put(2).status_code == 201
    backup, restore = guide("Backup and restore")
    project.sh(backup)
    project.sh("dc down --volumes")
    *steps, fsck = restore.splitlines()
    project.sh("\n".join(steps))
    assert "0 problems found" in project.sh(fsck).stdout
    answer = developers.get(2)  # the restore includes tokens
    assert (answer.status_code, answer.content) == (200, BLOB)
    assert entry_of(project, answer)["server_bytes"] == "0"
    assert ci.put(3).status_code == 201


def test_rolling_upgrade_of_the_servers_fails_no_request(project, admin):
    build, migrate, one, two, nginx = guide("Upgrade")[0].splitlines()
    project.sh(build)
    project.set(GRAPHSTASH_IMAGE=f"{project.name}:0.2.0")
    with Load(admin.url, admin.headers, puts=True) as load:
        load.wait_for(20)
        for step in (migrate, one, two):
            project.sh(step)
            load.wait_for(20)
        assert load.failures == []
        project.sh(nginx)  # nginx has one container, so connections fail here
        load.wait_for(20)
    containers = project.containers()
    images = {containers[name]["Config"]["Image"] for name in SERVERS}
    assert images == {f"{project.name}:0.2.0"}
    lost = [path for path, blob in load.stored.items() if admin.read(path).content != blob]
    assert lost == []
    assert load.stored


@contextmanager
def over(project, file):
    """Add an override, and remove it afterwards."""
    project.files.append(file)
    try:
        project.sh("dc up --detach --wait")
        yield
    finally:
        project.files.remove(file)
        project.sh("dc up --detach --wait")


def test_tls_variant_needs_two_files_and_refuses_plain_http(project, callers, certificate):
    certificate, key = certificate
    key.chmod(0o644)  # user 10001 reads it
    ci = callers[1]
    assert ci.put(4).status_code == 201
    project.set(GRAPHSTASH_TLS_CERTIFICATE=str(certificate), GRAPHSTASH_TLS_KEY=str(key))
    with over(project, "docker/compose.tls.yaml"):
        token = ci.headers["Authorization"].removeprefix("Bearer ")
        answer = Caller(project, token, ca=certificate).get(4)
        assert (answer.status_code, answer.content) == (200, BLOB)
        assert entry_of(project, answer)["server_bytes"] == "0"
        assert ci.get(4).status_code == 400
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"https://127.0.0.1:{project.port}/nginx/healthz", trust_env=False)
    assert ci.get(4).content == BLOB


@pytest.fixture
def s3(tmp_path):
    with Swift(tmp_path, address=bridge_address()) as swift:
        yield swift


def test_with_another_s3_the_bucket_is_created_and_shared_by_all_servers(s3, tmp_path):
    """As in the guide: compose.s3.yaml without its S3. The servers reach another one by `out`."""
    override = yaml.safe_load((DOCKER / "compose.s3.yaml").read_text())
    services = override["services"]
    del services["s3"], services["bucket"]["depends_on"], override["volumes"]["s3"]
    services["bucket"]["networks"] = ["out"]
    variables = {
        "AWS_ACCESS_KEY_ID": s3.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.secret_key,
        "GRAPHSTASH_S3_BUCKET": "from-compose",
        "GRAPHSTASH_S3_ENDPOINT_URL": s3.url,
    }
    own = ("docker/compose.own-s3.yaml", override)
    with started(tmp_path / "checkout", own, **variables) as project:
        _, ci, developers = callers_of(project)
        assert ci.put(5).status_code == 201
        stored = s3.client.list_objects_v2(Bucket="from-compose")["Contents"]
        assert [Digest.of(BLOB).sha256 in each["Key"] for each in stored] == [True]
        for other in SERVERS:  # each server answers while the other one is down
            project.sh(f"dc stop {other}")
            answer = developers.get(5)
            assert (answer.status_code, answer.content) == (200, BLOB)
            assert int(entry_of(project, answer)["server_bytes"].split(",")[-1]) >= len(BLOB)
            project.sh(f"dc up --detach --wait {other}")
        assert "0 problems found" in project.sh("dc exec -T server-1 graphstash fsck --deep").stdout
