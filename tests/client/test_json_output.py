"""The JSON of each command matches docs/json-output.md."""

import json
from pathlib import Path

import httpx
import pytest

from graphstash_schema import ArtifactKey, ArtifactMetadata
from graphstash_schema.explanation import make_description
from support.json_page import fields_of
from support.processes import graphstash_here
from support.waiting import PATIENT_VARIABLES

ARTIFACT = {"key", "digest", "size_bytes", "created_at", "last_used_at", "hits", "label"}
ARTIFACT |= {"metadata", "description"}


@pytest.fixture
def command(command):
    return lambda *words: json.loads(command(*words, "--json", host="host").stdout)


@pytest.fixture
def key(hosts, namespace, server):
    """Publish an artifact in the manifest of a job that has reported a run."""
    key = ArtifactKey.parse("jax", "cpu", namespace.encode().hex().ljust(64, "0"))
    host = hosts("publisher")
    host.put(key, b"x", ArtifactMetadata(compile_seconds=1, raw_size_bytes=1))
    host.server.describe([make_description(key, "step", {"program": namespace})])
    host.server.update_manifest("nightly", [key])
    report = {"job": "nightly", "started_at": "2026-11-22T21:00:00Z", "seconds": 1}
    url = f"{server.url}/v1/{namespace}/runs/run-1/0"
    assert httpx.put(url, json=report, timeout=30).status_code == 204
    return key


def test_each_command_prints_the_fields_of_the_page(command, key, server, tmp_path):
    file = tmp_path / "a.bundle"
    for name, arguments in {
        "status": ("status",),
        "ls": ("ls",),
        "report": ("report",),
        "summary": ("summary",),
        "prefetch": ("prefetch", "nightly"),
        "publish": ("publish",),
        "export": ("export", file),
        "import": ("import", file),
        "explain --job": ("explain", "--job", "nightly"),
    }.items():
        assert set(command(*arguments)) == fields_of(name), name
    assert set(command("ls")["artifacts"][0]) == ARTIFACT
    assert set(command("show", key.fingerprint)) == ARTIFACT | fields_of("show")
    (cause,) = command("explain", key.fingerprint)
    assert set(cause) == fields_of("explain")
    assert set(command("forget", key.fingerprint)) == fields_of("forget")
    failed = graphstash_here(
        "status", "--json", GRAPHSTASH_URL="http://127.0.0.1:9", GRAPHSTASH_CACHE_DIR=tmp_path
    )
    assert failed.returncode == 1
    answer = json.loads(failed.stdout)
    assert (set(answer), answer["reachable"]) == ({"url", "reachable", "error"}, False)
    for words, expected in (
        (("explain",), []),
        (("explain", "--job", "never"), {"job": "never", "run": None, "against": None}),
    ):
        settings = {"GRAPHSTASH_URL": server.url, "GRAPHSTASH_CACHE_DIR": tmp_path / "none"}
        failed = graphstash_here(*words, "--json", **settings, **PATIENT_VARIABLES)
        assert failed.returncode == 1
        assert failed.stderr.startswith("graphstash: error: no run ")
        answer = json.loads(failed.stdout)
        assert answer == expected or answer == expected | {"new": [], "again": []}
    months = command("report")
    assert set(months["total"]) - {"group"} == {
        *("hits", "misses", "served_bytes", "puts", "saved_compile_seconds")
    }


def test_the_page_names_every_command_that_prints_json():
    from reference import command_line

    def named(command, path):
        if any("--json" in parameter.opts for parameter in command.params):
            yield path
        for name, below in getattr(command, "commands", {}).items():
            yield from named(below, f"{path} {name}".strip())

    page = (Path(__file__).parents[2] / "docs" / "json-output.md").read_text()
    for path in named(command_line(), ""):
        group, _, name = path.partition(" ")
        rows = [line for line in page.splitlines() if f"`{group}" in line]
        assert any(f"`{path}`" in row or f"`{name}`" in row for row in rows), path
