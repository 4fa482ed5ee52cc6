"""The compared servers, each on loopback with data of its own.

All servers get the same bytes. A missing server is named with the command that installs it.
"""

import base64
import hashlib
import itertools
import os
import secrets
import shutil
import socket
import subprocess
from pathlib import Path

import httpx

from benchmarks.load import HttpConnection, RedisConnection, ask, get, many
from graphstash_server.testing import ServerProcess
from support.ports import reserved_port
from support.release_before import python_of_release_before
from support.server import Server
from support.waiting import until

NAMESPACE = "bench"
DEVICE_TYPE = "cpu-bench"
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
START_SECONDS = 30
MIB = 1024**2

_tail_bytes = 16


def unique_body(base):
    """Return unique bytes and their hash, without hashing all bytes again.

    Args:
        base: the common beginning, and a SHA-256 of it.

    Returns:
        The parts to send, and their digest.
    """
    beginning, hashed = base
    tail = secrets.token_bytes(_tail_bytes)
    digest = hashed.copy()
    digest.update(tail)
    return (beginning, tail), digest


def base_of(size):
    """Return the base of `unique_body` for bodies of `size` bytes."""
    beginning = secrets.token_bytes(size - _tail_bytes)
    return beginning, hashlib.sha256(beginning)


class Target:
    """A server that stores bytes under names.

    Attributes:
        name: name in the tables.
        port: port on loopback.
        pids: processes whose trees' CPU time counts.
        headers: header lines that every request needs.
        connection: class of connections for `put`.
        has_ranges: whether it answers range requests with the range.
        has_puts: whether it is measured with uploads.
    """

    name: str
    headers = ""
    connection = HttpConnection
    has_ranges = True
    has_puts = True

    def publish(self, name, payload):
        """Store bytes under a name, for later reads."""
        connection = self.connection(self.port)
        self.put(connection, (payload,), hashlib.sha256(payload), name)
        connection.close()

    def get(self, names, *, more="", **load):
        """GET published names in turn, with more headers."""
        paths = [self.path(name) for name in names]
        return get(self.port, paths, headers=self.headers + more, **load)

    def miss(self, **load):
        """GET names that were never stored."""
        paths = [self.unknown() for _ in range(1000)]
        return get(self.port, paths, headers=self.headers, status=404, **load)

    def head(self, names, *, connections, seconds):
        """HEAD published names in turn, for existence and size."""
        turns = itertools.cycle([self.path(name) for name in names])
        return many(self.port, connections, seconds, ask("HEAD", turns, self.headers, 200))


class Graphstash(Target):
    """`graphstash serve`, as its users start it: SQLite and a disk store, or a PostgreSQL."""

    name = "graphstash"

    def __init__(self, directory, database_url=None):
        self._paths = {}
        environment = {"GRAPHSTASH_DATABASE_URL": database_url} if database_url else {}
        self._server = self.start(directory, environment)
        self.port = self._server.port
        self.pids = [self._server.process.pid]

    def start(self, directory, environment):
        return Server(directory, **environment)

    @classmethod
    def missing(cls):
        return None

    def close(self):
        self._server.stop()

    def path(self, name):
        return artifact_path(self._paths[name])

    def unknown(self):
        return artifact_path(secrets.token_hex(32))

    def key(self, name):
        """Return the key in the form of the lookup call."""
        return {"kind": "torch_xla", "device_type": DEVICE_TYPE, "fingerprint": self._paths[name]}

    def put(self, connection, parts, digest, name=None):
        """Store a body under a new key."""
        fingerprint = secrets.token_hex(32)
        if name is not None:
            self._paths[name] = fingerprint
        return self.put_under(connection, fingerprint, parts, digest)

    def put_under(self, connection, fingerprint, parts, digest):
        """Store a body under a key."""
        headers = (
            f"Content-Length: {sum(map(len, parts))}\r\n"
            f"Repr-Digest: sha-256=:{base64.b64encode(digest.digest()).decode()}:\r\n"
        )
        status, *_ = connection.request("PUT", artifact_path(fingerprint), headers, *parts)
        assert status == 201, status
        return sum(map(len, parts))


class ReleaseBefore(Graphstash):
    """`graphstash serve` of the release before this one."""

    name = "release before"

    def start(self, directory, environment):
        command = (str(python_of_release_before()), "-m", "graphstash", "serve")
        return ServerProcess(directory / "data", command=command, environment=environment)


def artifact_path(fingerprint):
    return f"/v1/{NAMESPACE}/artifacts/torch_xla/{DEVICE_TYPE}/{fingerprint}"


class Peer(Target):
    """A server of another project, with a generated configuration."""

    install: str
    binary: str

    def __init__(self, directory):
        directory.mkdir(parents=True, exist_ok=True)
        self.port = reserved_port()
        self._log = (directory / "log").open("wb")
        command, environment = self.command(directory.absolute())
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env={**os.environ, **environment}
        )
        self.pids = [self._process.pid]
        until(lambda: answers(self.port) or self._process.poll() is not None)
        assert self._process.poll() is None, (directory / "log").read_text()

    @classmethod
    def missing(cls):
        """Return the command that installs it, or None if it is installed."""
        return None if cls.found() else cls.install

    @classmethod
    def found(cls):
        return shutil.which(cls.binary, path=SYSTEM_PATH)

    def close(self):
        self._process.terminate()
        self._process.wait(START_SECONDS)
        self._log.close()


class Files(Peer):
    """A server of static files in one directory, which takes no PUTs here."""

    has_puts = False

    def __init__(self, directory):
        self._root = directory.absolute() / "files"
        self._root.mkdir(parents=True)
        super().__init__(directory)

    def publish(self, name, payload):
        (self._root / name).write_bytes(payload)

    def path(self, name):
        return f"/{name}"

    def unknown(self):
        return f"/{secrets.token_hex(32)}"


class Nginx(Files):
    """nginx with one worker per core, sendfile and no access log: the ceiling for static files."""

    name = "nginx"
    install = "apt install nginx-light"
    binary = "nginx"

    def command(self, directory):
        for name in ("body", "proxy", "fastcgi", "uwsgi", "scgi"):
            (directory / name).mkdir()
        user = "user root;" if os.geteuid() == 0 else ""
        config = directory / "nginx.conf"
        config.write_text(f"""\
{user}
daemon off;
worker_processes auto;
pid {directory}/pid;
error_log {directory}/error.log crit;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 1000000;
    default_type application/octet-stream;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    server {{ listen 127.0.0.1:{self.port}; root {self._root}; }}
}}
""")
        return [self.found(), "-p", str(directory), "-c", str(config)], {}


class Lighttpd(Files):
    """lighttpd with one worker, its default, and no access log."""

    name = "lighttpd"
    install = "apt install lighttpd"
    binary = "lighttpd"

    def command(self, directory):
        config = directory / "lighttpd.conf"
        config.write_text(f"""\
server.bind = "127.0.0.1"
server.port = {self.port}
server.document-root = "{self._root}"
server.max-keep-alive-requests = 1000000
mimetype.assign = ("" => "application/octet-stream")
""")
        return [self.found(), "-D", "-f", str(config)], {}


class Caddy(Files):
    """caddy's `file-server` command."""

    name = "caddy"
    install = "apt install caddy"
    binary = "caddy"

    def command(self, directory):
        where = ("--root", str(self._root), "--listen", f"127.0.0.1:{self.port}")
        homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"), str(directory))
        return [self.found(), "file-server", *where], homes


class Varnish(Files):
    """varnish in front of nginx. Everything stored is in its memory; a 404 is never kept, because
    an artifact may be stored at any time.
    """

    name = "varnish"
    install = "apt install varnish nginx-light"
    binary = "varnishd"

    def __init__(self, directory):
        self._origin = Nginx(directory / "origin")
        try:
            super().__init__(directory / "varnish")
        except BaseException:
            self._origin.close()
            raise
        self.pids += self._origin.pids

    @classmethod
    def found(cls):
        return Nginx.found() and super().found()

    def command(self, directory):
        config = directory / "varnish.vcl"
        config.write_text(f"""\
vcl 4.1;
backend default {{ .host = "127.0.0.1"; .port = "{self._origin.port}"; }}
sub vcl_recv {{ unset req.http.Cookie; }}
sub vcl_backend_response {{
    set beresp.ttl = 1d;
    if (beresp.status == 404) {{ set beresp.ttl = 0s; set beresp.uncacheable = true; }}
}}
""")
        places = ("-a", f"127.0.0.1:{self.port}", "-f", str(config), "-n", str(directory / "work"))
        return [self.found(), "-F", "-j", "none", *places, "-s", "malloc,1G"], {}

    def publish(self, name, payload):
        self._origin.publish(name, payload)
        connection = HttpConnection(self.port)
        status, *_ = connection.request("GET", self.path(name))
        assert status == 200, status
        connection.close()

    def close(self):
        super().close()
        self._origin.close()


class Registry(Peer):
    """Debian's docker-registry with its file system driver, filled through its HTTP API."""

    name = "docker-registry"
    install = "apt install docker-registry"
    binary = "docker-registry"

    def command(self, directory):
        self._paths = {}
        config = directory / "config.yml"
        config.write_text(f"""\
version: 0.1
log:
  level: error
  accesslog: {{disabled: true}}
storage:
  cache: {{blobdescriptor: inmemory}}
  filesystem: {{rootdirectory: "{directory}/data"}}
http:
  addr: 127.0.0.1:{self.port}
""")
        return [self.found(), "serve", str(config)], {}

    def path(self, name):
        return self._paths[name]

    def unknown(self):
        return f"/v2/{NAMESPACE}/blobs/sha256:{secrets.token_hex(32)}"

    def put(self, connection, parts, digest, name=None):
        """Store a blob with two requests."""
        uploads = f"/v2/{NAMESPACE}/blobs/uploads/"
        status, lines, _ = connection.request("POST", uploads, "Content-Length: 0\r\n")
        assert status == 202, status
        fields = dict(line.split(": ", 1) for line in lines)
        path = "/" + fields["Location"].split("/", 3)[3]
        headers = f"Content-Length: {sum(map(len, parts))}\r\n"
        path += f"{'&' if '?' in path else '?'}digest=sha256:{digest.hexdigest()}"
        status, *_ = connection.request("PUT", path, headers, *parts)
        assert status == 201, status
        if name is not None:
            self._paths[name] = f"/v2/{NAMESPACE}/blobs/sha256:{digest.hexdigest()}"
        return sum(map(len, parts))


class Turborepo(Peer):
    """turborepo-remote-cache on Node, which stores on disk.

    It checks a token and does not wait for the disk.
    """

    name = "turborepo"
    binary = "turborepo-remote-cache"
    folder = Path("build/turborepo")
    install = f"npm install --prefix {folder} turborepo-remote-cache@2.12.0"
    token = "bench"
    headers = f"Authorization: Bearer {token}\r\n"
    has_ranges = False

    @classmethod
    def found(cls):
        return shutil.which(cls.binary, path=cls.folder / "node_modules" / ".bin")

    def command(self, directory):
        environment = {
            "NODE_ENV": "production",
            "PORT": str(self.port),
            "TURBO_TOKEN": self.token,
            "LOG_LEVEL": "fatal",
            "STORAGE_PROVIDER": "local",
            "STORAGE_PATH": str(directory / "data"),
            "BODY_LIMIT": str(256 * MIB),
        }
        return [self.found()], environment

    def path(self, name):
        return f"/v8/artifacts/{hashlib.sha256(name.encode()).hexdigest()}?teamId={NAMESPACE}"

    def unknown(self):
        return self.path(secrets.token_hex(32))

    def put(self, connection, parts, _digest, name=None):
        size = sum(map(len, parts))
        headers = f"{self.headers}Content-Type: application/octet-stream\r\n"
        path = self.path(name or secrets.token_hex(32))
        status, *_ = connection.request("PUT", path, f"{headers}Content-Length: {size}\r\n", *parts)
        assert status == 200, status
        return size


class Redis(Peer):
    """Redis with all data in memory. Every SET waits for its append-only file.

    Threads of Python send its requests even if the other targets get wrk's.
    """

    name = "redis"
    install = "apt install redis-server"
    binary = "redis-server"
    has_ranges = False
    connection = RedisConnection

    def command(self, directory):
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": directory,
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "auto-aof-rewrite-percentage": 0,
        }
        words = itertools.chain(*((f"--{key}", str(value)) for key, value in options.items()))
        return [self.found(), *words], {}

    def get(self, names, *, connections, seconds):
        return self._ask([(b"GET", name.encode()) for name in names], connections, seconds)

    def miss(self, *, connections, seconds):
        commands = [(b"GET", secrets.token_hex(32).encode()) for _ in range(1000)]
        return self._ask(commands, connections, seconds)

    def head(self, names, *, connections, seconds):
        return self._ask([(b"STRLEN", name.encode()) for name in names], connections, seconds)

    def put(self, connection, parts, _digest, name=None):
        key = (name or secrets.token_hex(32)).encode()
        connection.command(b"SET", key, b"".join(parts))
        return sum(map(len, parts))

    def _ask(self, commands, connections, seconds):
        turns = itertools.cycle(commands)

        def work(connection):
            size = connection.command(*next(turns))
            return max(size, 0)

        return many(self.port, connections, seconds, work, kind=RedisConnection)


PEERS = (Nginx, Lighttpd, Varnish, Caddy, Registry, Turborepo, Redis)


def fetch_sha256(target, name):
    """Return the SHA-256 of a target's answer over HTTP, read by another client than the load's."""
    headers = dict(line.split(": ") for line in target.headers.splitlines())
    url = f"http://127.0.0.1:{target.port}{target.path(name)}"
    answer = httpx.get(url, headers=headers, timeout=60, trust_env=False).raise_for_status()
    return hashlib.sha256(answer.content).hexdigest()


def answers(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
