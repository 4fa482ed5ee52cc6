import os
import subprocess
import sys

import httpx
import pytest

from graphstash_server.testing import LiveServer

_TOKEN_COMMAND = "from graphstash_server.commands.token import token; token()"


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    """Neither this user's netrc nor his cache plays a part."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Guarded:
    """A server that asks for tokens, and its administrator."""

    def __init__(self, server):
        self.url = server.url
        issued = subprocess.run(
            [
                *(sys.executable, "-c", _TOKEN_COMMAND),
                *("create", "--grant", "admin:*", "--description", "the tests"),
            ],
            env=os.environ | {"GRAPHSTASH_DATA_DIR": str(server.data_dir)},
            check=True,
            capture_output=True,
            text=True,
        )
        self.http = httpx.Client(
            base_url=f"{self.url}/v1/-",
            headers={"Authorization": f"Bearer {issued.stdout.strip()}"},
            trust_env=False,
        )

    def issue(self, *grants, **terms):
        scopes = [each.partition(":") for each in grants]
        request = {
            "description": "a job",
            "grants": [{"scope": scope, "namespaces": names} for scope, _, names in scopes],
        }
        answer = self.http.post("/tokens", json=request | terms)
        assert answer.status_code == 201, answer.text
        return answer.json()["token"], answer.json()["info"]["id"]


@pytest.fixture(scope="session")
def guarded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("guarded") / "data"
    with LiveServer(directory, auth="tokens", log_level="error") as server:
        guarded = Guarded(server)
        yield guarded
        guarded.http.close()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes distributions the only ones that this Python finds, by their metadata."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site)])

    def install(**versions):
        for name, version in versions.items():
            folder = site / f"{name}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        return site

    install(graphstash="0.1.0")
    return install
