"""OpenStack Swift with its S3 API: a real S3 on loopback, from PyPI packages and memcached.

Swift pins old libraries, so it has an environment of its own.
"""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import URLError
from urllib.request import urlopen

from support.environments import python_of
from support.moto import AnyS3, s3_client
from support.ports import reserved_port
from support.processes import captured

_READY_SECONDS = 120

_RINGS = """
import sys
from swift.common.ring import RingBuilder
directory, address, *ports = sys.argv[1:]
for name, port in zip(("account", "container", "object"), ports):
    builder = RingBuilder(4, 1, 0)
    builder.add_dev({
        "id": 0, "region": 1, "zone": 1, "ip": address, "port": int(port), "device": "d1",
        "weight": 1.0,
    })
    builder.rebalance()
    builder.get_ring().save(f"{directory}/{name}.ring.gz")
"""

_COMMON = """
[DEFAULT]
bind_ip = {address}
bind_port = {port}
swift_dir = {directory}
devices = {devices}
mount_check = false
fallocate_reserve = 0
user = {user}
workers = 0
log_level = ERROR
"""

_SWIFT = """
[swift-hash]
swift_hash_path_suffix = s
swift_hash_path_prefix = p
[storage-policy:0]
name = default
default = yes
"""

_STORAGE = """
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
"""

_PROXY = """
[pipeline:main]
pipeline = catch_errors healthcheck cache listing_formats bulk s3api tempauth slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
s3_acl = false
check_bucket_owner = false
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{memcached}
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:healthcheck]
use = egg:swift#healthcheck
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
"""


class Swift(AnyS3):
    """A running Swift; a context manager with boto3's `client`.

    Swift listens on one address of this host, because containers cannot reach the loopback.
    """

    access_key = "test:tester"
    secret_key = "testing"

    def __init__(self, directory: Path, *, address: str = "127.0.0.1") -> None:
        self._directory = directory
        self._address = address
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        memcached = shutil.which("memcached")
        if memcached is None:
            raise RuntimeError("the tests need memcached on PATH: apt-get install memcached")
        with self._stack:
            self._start(memcached)
            self.client = s3_client(self.url)
            self._stack.callback(self.client.close)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)  # `close` would hide `error` behind its own

    def _start(self, memcached: str) -> None:
        user = captured(["id", "-un"], check=True)
        account, container, objects, proxy = (reserved_port(self._address) for _ in range(4))
        cache = reserved_port()
        values: dict[str, Any] = {
            "address": self._address,
            "directory": self._directory,
            "devices": self._directory / "devices",
            "user": user.stdout.strip(),
            "memcached": cache,
        }
        (self._directory / "devices" / "d1").mkdir(parents=True)
        (self._directory / "swift.conf").write_text(_SWIFT)
        ports = [str(port) for port in (account, container, objects)]
        rings = [_bin("python"), "-c", _RINGS, str(self._directory), self._address, *ports]
        subprocess.run(rings, check=True)
        self._run([memcached, "-u", values["user"], "-l", "127.0.0.1", "-p", str(cache)])
        servers = {"account": account, "container": container, "object": objects, "proxy": proxy}
        for name, port in servers.items():
            pipeline = _PROXY if name == "proxy" else _STORAGE
            conf = self._directory / f"{name}-server.conf"
            conf.write_text((_COMMON + pipeline).format(name=name, port=port, **values))
            self._run([_bin(f"swift-{name}-server"), str(conf)])
        self.url = f"http://{self._address}:{proxy}"
        self._wait_until_ready(servers.values())

    def _run(self, command: Sequence[str]) -> None:
        log = self._stack.enter_context((self._directory / "log").open("ab"))
        # The processes end with this process, even if it is killed.
        command = ["setpriv", "--pdeathsig", "KILL", *command]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._directory)
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.kill)

    def _wait_until_ready(self, ports: Iterable[int]) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        for port in ports:
            while True:
                try:
                    socket.create_connection((self._address, port)).close()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise RuntimeError((self._directory / "log").read_text()) from None
                    time.sleep(0.05)
        try:
            urlopen(f"{self.url}/healthcheck", timeout=30).close()
        except URLError as error:
            raise RuntimeError((self._directory / "log").read_text()) from error


def _bin(name: str) -> str:
    return str(python_of("swift").with_name(name))
