"""`graphstash export` and `import` between real servers and hosts."""

import json
import os
import re
import stat
import tarfile
import time

import pytest

from graphstash._artifacts.bundle import Bundle
from graphstash._http.client import ServerClient
from graphstash._replacing import replacing
from graphstash.errors import BusyError, TransportError
from graphstash_schema import ArtifactKey, ArtifactMetadata
from graphstash_schema.explanation import make_description
from support.processes import graphstash_on_terminal
from support.waiting import until, variables_of

DEVICE = "cpu-x86_64-0123456789abcdef"


def key_of(number, *, kind="jax", device=DEVICE):
    return ArtifactKey.parse(kind, device, f"{number:02x}" * 32)


KEYS = (key_of(1), key_of(2), key_of(3, kind="triton", device="cuda-sm_90"))


@pytest.fixture
def filled(hosts):
    """Return a function that publishes three described artifacts, two in the manifest `nightly`."""

    def fill(**settings):
        host = hosts("publisher", **settings)
        for number, key in enumerate(KEYS):
            metadata = ArtifactMetadata(compile_seconds=30 + number, raw_size_bytes=4)
            host.put(key, b"%d" % number * 10_000, metadata)
        host.server.describe(
            [
                make_description(key, f"jit(step {n})", {"program": str(n)})
                for n, key in enumerate(KEYS)
            ]
        )
        host.server.update_manifest("nightly", KEYS[:2])
        return host

    return fill


@pytest.fixture
def file(tmp_path):
    return tmp_path / "a.bundle"


def keys_in(path):
    with Bundle(path) as bundle:
        return [found.entry.key for found in bundle.entries()]


def test_a_bundle_carries_artifacts_their_labels_and_metadata(
    filled, command, file, hosts, namespace, server
):
    filled()
    before = server.stats(namespace)
    output = command("export", file).stdout
    assert re.fullmatch(rf"3 artifacts \(.*\) of the namespace {namespace} in .*a.bundle\n", output)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    other = f"{namespace}-there"
    output = command("import", file, "--check", "--namespace", other, url="none").stdout
    assert output.startswith("sound: 3 artifacts")
    assert server.stats(other)["artifacts"] == 0
    output = command("import", file, "--namespace", other).stdout
    assert output == f"3 imported into {other}, 0 already there\n"
    reader = hosts("reader", namespace=other)
    assert reader.get(KEYS[0]) == b"0" * 10_000
    listed = json.loads(command("ls", "--json", namespace=other).stdout)["artifacts"]
    assert sorted(each["label"] for each in listed) == [f"jit(step {n})" for n in range(3)]
    assert {each["metadata"]["compile_seconds"] for each in listed} == {30, 31, 32}
    shown = command("show", KEYS[1].fingerprint[:8], "--json", namespace=other).stdout
    assert json.loads(shown)["description"]["program"] == {"program": "1"}

    assert hosts("counted").get(KEYS[0])  # the server writes counts in order
    until(lambda: server.stats(namespace)["hits"] > before["hits"])
    after = server.stats(namespace)
    assert after["hits"] == before["hits"] + 1  # an export is neither a hit nor a miss
    assert after["misses"] == before["misses"]
    assert after["saved_seconds"] == before["saved_seconds"] + 30
    assert after["served_bytes"] > before["served_bytes"]


def test_a_part_of_a_namespace_is_exported(filled, command, file):
    filled()
    for options, wanted in {
        ("--job", "nightly"): KEYS[:2],
        ("--kind", "triton"): KEYS[2:],
        ("--device-type", DEVICE): KEYS[:2],
        ("--fingerprint", "0303"): KEYS[2:],
        ("--fingerprint", "01", "--fingerprint", "0101", "--fingerprint", "03"): KEYS[::2],
        ("--job", "nightly", "--fingerprint", "02"): KEYS[1:2],
    }.items():
        command("export", file, *options)
        assert keys_in(file) == list(wanted), options
        file.unlink()


def test_an_export_replaces_nothing_but_a_file(filled, command, tmp_path):
    filled()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = command("export", pipe, status=1)
    assert f"{pipe}: not a regular file; name a file to create or replace" in done.stderr
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.glob("pipe*")) == [pipe]
    with pytest.raises(OSError, match="not a regular file"), replacing(pipe):
        pytest.fail("it would replace the pipe")


def test_long_commands_show_progress_on_a_terminal(filled, config, file):
    filled()
    variables = variables_of(config("reader")) | {"COLUMNS": "120"}
    for arguments, last in (
        (("export", file), r"writing .* [\d.]+/[\d.]+ "),
        (("import", file), r"importing .* [\d.]+/[\d.]+ "),
        (("ls", "--sort", "compile"), r"reading the list .* 3/"),
    ):
        status, shown = graphstash_on_terminal(*arguments, **variables)
        assert status == 0, shown
        assert re.search(last, shown), shown


def test_export_is_repeatable_and_removes_nothing_but_its_own_downloads(
    filled, command, tmp_path, file
):
    filled()
    theirs = tmp_path / "a.bundle.partial" / "thesis.txt"
    theirs.parent.mkdir(mode=0o700)
    theirs.write_text("years of work")
    for options in (("--kind", "pjrt"), ("--job", "nobody-ran-it")):
        assert "graphstash: error: " in command("export", file, *options, status=1).stderr
    assert not file.exists()
    command("export", file)
    assert list(theirs.parent.iterdir()) == [theirs]
    assert theirs.read_text() == "years of work"
    command("export", tmp_path / "again", host="another")
    assert file.read_bytes() == (tmp_path / "again").read_bytes()
    with tarfile.open(file) as tar:
        names = tar.getnames()
    assert names[0].startswith("manifest-")
    assert len(names) == 4


def test_import_skips_stored_artifacts_and_keeps_different_ones(
    filled, command, file, hosts, namespace, server
):
    filled()
    command("export", file)
    other = f"{namespace}-there"
    there = hosts("there", namespace=other)
    there.put(KEYS[0], b"0" * 10_000, ArtifactMetadata(compile_seconds=1, raw_size_bytes=1))
    there.put(KEYS[1], b"other", ArtifactMetadata(compile_seconds=1, raw_size_bytes=1))
    totals = json.loads(command("import", file, "--namespace", other, "--json").stdout)
    assert (totals["imported"], totals["present"]) == (1, 1)
    assert totals["differing"] == [str(KEYS[1])]
    assert hosts("fresh", namespace=other).get(KEYS[1]) == b"other"
    again = json.loads(command("import", file, "--namespace", other, "--json").stdout)
    assert (again["imported"], again["present"]) == (0, 2)
    assert server.stats(other)["puts"] == 3


def test_a_host_without_a_network_uses_a_bundle_and_exports_its_own(
    filled, command, file, hosts, tmp_path
):
    filled()
    command("export", file, "--job", "nightly")
    alone = {"host": "alone", "url": "none"}
    assert command("import", file, "--local", **alone).stdout.startswith("2 imported")
    host = hosts("alone", url="none")
    assert host.get(KEYS[0]) == b"0" * 10_000
    assert host.get(KEYS[2]) is None
    assert command("import", file, "--local", **alone).stdout.startswith("0 imported")

    own = tmp_path / "own"
    output = command("export", own, "--local", "--kind", "jax", host="publisher").stdout
    assert output.startswith("2 artifacts")
    command("import", own, "--local", host="another", url="none")
    assert hosts("another", url="none").get(KEYS[1]) == b"1" * 10_000


def test_interrupted_export_resumes_with_intact_entries(
    filled, command, file, monkeypatch, server, namespace
):
    filled()
    download = ServerClient.download
    seen = []

    def breaking(self, key, target):
        seen.append(key)
        if len(seen) == 3:
            target.write(b"half of it")
            raise TransportError("reset", "the cable was pulled")
        return download(self, key, target)

    monkeypatch.setattr(ServerClient, "download", breaking)
    stopped = command("export", file, status=1)
    assert "the cable was pulled; run it again to continue" in stopped.stderr
    assert not file.exists()
    left = file.with_name("a.bundle.partial")
    damaged, _ = (each for each in left.iterdir() if not each.name.startswith("."))
    damaged.write_bytes(b"something else")
    export = json.loads(command("export", file, "--json").stdout)
    assert (export["fetched"], export["reused"]) == (2, 1)
    assert KEYS[2] in seen[3:]
    assert keys_in(file) == list(KEYS)
    assert not left.exists()


def test_artifact_deleted_during_export_is_left_out_and_named(filled, command, file, monkeypatch):
    filled()
    download = ServerClient.download

    def going(self, key, target):
        return None if key == KEYS[1] else download(self, key, target)

    monkeypatch.setattr(ServerClient, "download", going)
    result = command("export", file, "--json")
    assert json.loads(result.stdout)["gone"] == [str(KEYS[1])]
    assert f"gone meanwhile: {KEYS[1]}" in result.stderr
    assert keys_in(file) == [KEYS[0], KEYS[2]]


def test_export_waits_for_a_busy_server(filled, command, file, monkeypatch):
    filled()
    listed, pauses = ServerClient.list_artifacts, []

    def busy(self, query, **others):
        if len(pauses) < 3:
            raise BusyError("later", retry_after_seconds=7)
        return listed(self, query, **others)

    monkeypatch.setattr(ServerClient, "list_artifacts", busy)
    monkeypatch.setattr(time, "sleep", pauses.append)
    command("export", file)
    assert pauses == [7, 7, 7]


def test_unverified_artifact_is_not_exported(filled, command, file, team, hosts, namespace):
    filled(signing_key=team.trust("ci"))
    stranger = hosts("stranger", signing_key=team.key("stranger"))
    bad = key_of(9)
    stranger.put(bad, b"poison", ArtifactMetadata(compile_seconds=1, raw_size_bytes=6))
    result = command("export", file, "--json", status=1, trusted_keys=team.file)
    (rejected,) = json.loads(result.stdout)["rejected"]
    assert rejected["key"] == str(bad)
    assert f"rejected: {bad}: " in result.stderr
    assert keys_in(file) == list(KEYS)
    # The bundle carries signatures, so a host that requires them uses the artifacts.
    command("import", file, "--local", host="strict", url="none", trusted_keys=team.file)
    strict = hosts("strict", url="none", trusted_keys=team.file)
    assert strict.get(KEYS[0]) == b"0" * 10_000


def test_import_into_another_namespace_is_signed_by_this_host(
    filled, command, file, team, hosts, namespace
):
    filled(signing_key=team.trust("ci"))
    command("export", file)
    other = f"{namespace}-there"
    options = ("import", file, "--namespace", other)
    refused = command(*options, status=2, trusted_keys=team.file)
    assert "set GRAPHSTASH_SIGNING_KEY to sign" in refused.stderr
    signing_key = team.trust("importer", namespaces=[other])
    command(*options, trusted_keys=team.file, signing_key=signing_key)
    strict = hosts("strict", namespace=other, trusted_keys=team.file)
    assert strict.get(KEYS[0]) == b"0" * 10_000


def test_a_bundle_that_does_not_fit_the_local_tier_is_refused_before_it_evicts(
    filled, command, file
):
    filled()
    command("export", file)
    result = command("import", file, "--local", status=2, local_limit=1000)
    assert "more than GRAPHSTASH_LOCAL_LIMIT (1000 B): raise it" in result.stderr
