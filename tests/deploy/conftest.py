"""Promise: the files of docker/ make the deployment that docker/README.md describes.

The services of compose.yaml run here without containers, with their commands, environments and
checks. `Deployment` replaces only addresses, ports and directories.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from graphstash._artifacts.stash import Stash
from graphstash.config import ClientConfig
from graphstash_schema import ArtifactKey, ArtifactMetadata
from support.compose import Image, load
from support.nginx import Nginx
from support.ports import reserved_port
from support.postgres import EMPTY, Postgres
from support.processes import captured
from support.waiting import PATIENT

PASSWORD = "secret"  # of support.postgres
_START_SECONDS = 90


class Deployment:
    """Context manager that runs a deployment on loopback.

    Attributes:
        postgres, nginx: running servers.
        processes: each running service's process.
        url: address that clients use.
    """

    def __init__(self, directory, *files, postgres, **variables):
        self.directory = directory
        self.postgres = postgres
        self.image = Image()
        self.services = load(
            *files, variables={"GRAPHSTASH_DATABASE_PASSWORD": PASSWORD, **variables}
        )["services"]
        self.ports = {"server-1": reserved_port(), "server-2": reserved_port()}
        self.processes = {}
        self.nginx = None
        self.scripts = sysconfig.get_path("scripts")
        self.prefix = []  # precedes every server's command
        self.more = {"PYTHONDONTWRITEBYTECODE": ""}  # the image contains compiled modules
        self.database = postgres.new_database(template=EMPTY).rpartition("/")[2]
        self.payload = os.urandom(500_000)
        self.token = None  # token of the jobs
        self._keys = itertools.count()
        (directory / "tmp").mkdir(parents=True)

    @property
    def url(self):
        return self.nginx.url if self.nginx else f"http://127.0.0.1:{self.ports['server-1']}"

    def substitutes(self, service):
        """Return the replacement of each address, port and directory inside the containers."""
        subnet = self.services["server-1"]["networks"]["back"]["ipv4_address"].rpartition(".")[0]
        volumes = self.services[service].get("volumes", ())
        data = next((each.split(":")[0] for each in volumes if "/var/lib/graphstash" in each), "")
        return {
            "@postgres:5432/graphstash": f"@127.0.0.1:{self.postgres.port}/{self.database}",
            f"{subnet}.11:8077": f"127.0.0.1:{self.ports['server-1']}",
            f"{subnet}.12:8077": f"127.0.0.1:{self.ports['server-2']}",
            "/var/lib/graphstash": str(self.directory / (data or "none")),
            "0.0.0.0": "127.0.0.1",
            "8077": str(self.ports.get(service, 0)),
            "8080": str(self.nginx.port) if self.nginx else "8080",
        }

    def substituted(self, service, text):
        for name, value in self.substitutes(service).items():
            text = text.replace(name, value)
        return text

    def environment(self, service):
        """Return the variables of a container of our image: the image's, then the service's."""
        given = {**self.image.environment, **self.services[service]["environment"]}
        replaced = {name: self.substituted(service, str(value)) for name, value in given.items()}
        path = f"{self.scripts}:{replaced['PATH']}:/usr/sbin:/sbin"
        return {**replaced, "PATH": path, "HOME": str(self.directory / "tmp"), **self.more}

    def command(self, service):
        described = self.services[service]
        entrypoint = described.get("entrypoint", self.image.entrypoint)
        return [*entrypoint, *described.get("command", self.image.command)]

    def run(self, service):
        """Run a service that ends without a signal, such as `migrate`."""
        return self.exec(service, *self.command(service))

    def exec(self, service, *command):
        """Run a command like `docker compose exec -T`."""
        return captured(
            command, env=self.environment(service), cwd=self.directory / "tmp", timeout=120
        )

    def start(self, *services):
        """Start services and wait until their health checks succeed."""
        for service in services:
            self._start(service)
        for service in services:
            self._wait(service)

    def _start(self, service):
        with (self.directory / f"{service}.log").open("ab") as log:
            self.processes[service] = subprocess.Popen(
                [*self.prefix, *self.command(service)],
                stdout=log,
                stderr=log,
                env=self.environment(service),
                cwd=self.directory / "tmp",
            )

    def _wait(self, service):
        deadline = time.monotonic() + _START_SECONDS
        while self.check(service) != 0:
            log = (self.directory / f"{service}.log").read_text()
            assert self.processes[service].poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.3)

    def check(self, service):
        """Return the exit code of a service's health check."""
        test = self.services[service]["healthcheck"]["test"]
        assert test[0] == "CMD"
        command = [self.substituted(service, part) for part in test[1:]]
        environment = os.environ | {"PGPORT": str(self.postgres.port)}
        postgres = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)
        environment["PATH"] = ":".join([self.scripts, *postgres, os.environ["PATH"]])
        command[0] = shutil.which(command[0], path=environment["PATH"])
        return subprocess.run(
            command, check=False, capture_output=True, env=environment, timeout=60
        ).returncode

    def stop(self, service):
        """Stop a service like `docker compose stop`, within its grace. Return the exit code."""
        process = self.processes.pop(service)
        process.terminate()
        return process.wait(int(self.services[service]["stop_grace_period"].rstrip("s")))

    def kill(self, service):
        process = self.processes.pop(service)
        process.send_signal(signal.SIGKILL)
        process.wait(30)

    def start_nginx(self, **variables):
        self.nginx = None
        environment = self.services["nginx"]["environment"]
        given = {
            name: self.substituted("nginx", str(value))
            for name, value in environment.items()
            if name.startswith("GRAPHSTASH_")
        }
        tls = "ssl" in environment["GRAPHSTASH_NGINX_LISTEN"]
        self.nginx = Nginx(self.directory / "nginx", variables={**given, **variables}, tls=tls)

    def migrate(self):
        migrated = self.run("migrate")
        assert migrated.returncode == 0, migrated.stderr

    def up(self, *servers):
        """Start everything in the order of depends_on, with both servers or only the named ones."""
        self.migrate()
        self.start(*servers or ("server-1", "server-2"))
        self.start_nginx()
        self.make_token()
        return self

    def make_token(self):
        """Create a token as docker/README.md does. Jobs and `headers` use the latest token."""
        options = ("--grant", "admin:*", "--description", "these tests")
        made = self.exec("server-1", "graphstash", "token", "create", *options)
        assert made.returncode == 0, made.stderr
        self.token = made.stdout.strip()
        return self.token

    @property
    def headers(self):
        return {"Authorization": f"Bearer {self.token}"}

    def new_key(self):
        return ArtifactKey.parse("jax", "cpu", f"{next(self._keys):064x}")

    def put(self, key):
        """Store an artifact like a job on one host. `get` reads it on another host."""
        metadata = ArtifactMetadata(compile_seconds=60, raw_size_bytes=len(self.payload))
        with self._stash(tempfile.mkdtemp(dir=self.directory)) as stash:
            stash.put(key, self.payload, metadata)

    def get(self, key):
        with self._stash(tempfile.mkdtemp(dir=self.directory)) as stash:
            return stash.get(key)

    def _stash(self, disk):
        return Stash(ClientConfig(url=self.url, cache_dir=disk, token=self.token, **PATIENT))

    def close(self):
        if self.nginx is not None:
            self.nginx.close()
        for service in list(self.processes):
            self.stop(service)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture(scope="session")
def compose_postgres():
    """PostgreSQL with the settings of compose.yaml."""
    composed = load("compose.yaml", variables={"GRAPHSTASH_DATABASE_PASSWORD": PASSWORD})
    program, *options = composed["services"]["postgres"]["command"]
    assert (program, {*options[::2]}) == ("postgres", {"-c"})
    with Postgres(**dict(each.split("=", 1) for each in options[1::2])) as postgres:
        yield postgres


@pytest.fixture
def deploy(tmp_path, compose_postgres):
    """Start a deployment of compose files with an empty database, and end it after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *files, **variables: stack.enter_context(
            Deployment(tmp_path, *files, postgres=compose_postgres, **variables)
        )


@pytest.fixture(scope="module")
def standing_deployment(tmp_path_factory, compose_postgres):
    """A deployment for tests that restart each service that they stop."""
    directory = tmp_path_factory.mktemp("deployment")
    with Deployment(directory, "compose.yaml", postgres=compose_postgres) as deployment:
        yield deployment.up()


@pytest.fixture
def http():
    with httpx.Client(timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def certificate(tmp_path):
    """Paths of a certificate for 127.0.0.1 and of its key."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=cache", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", tmp_path / "tls.key", "-out", tmp_path / "tls.crt"),
        ],
        check=True,
        capture_output=True,
    )
    return tmp_path / "tls.crt", tmp_path / "tls.key"
