"""Promise: `graphstash doctor` names each problem with a remedy, and changes nothing."""

import sys

import pytest

from graphstash.hooks.environment import version_of
from graphstash.hooks.registry import hook_specs


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    """Hide the netrc and the cache of the user who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that makes distributions the only ones that this Python finds."""
    hook_specs()  # read the registry of the real path first
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site)])

    def install(**versions):
        for name, version in versions.items():
            folder = site / f"{name}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        version_of.cache_clear()
        return site

    install(graphstash="0.1.0")
    yield install
    version_of.cache_clear()
