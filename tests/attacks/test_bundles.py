"""An import refuses a bundle that was changed on its way, and imports nothing of it."""

import hashlib
import io
import os
import random
import tarfile

import pytest
from typer.testing import CliRunner

from graphstash._artifacts.bundle import Bundle, BundleEntry, BundleHead, line_of
from graphstash._cli.main import complete_app
from graphstash.errors import BundleError
from graphstash_schema import ArtifactKey, ArtifactMetadata
from graphstash_schema.exit_status import ExitStatus
from support.bombs import bomb
from support.guarded_server import DEVICE, fingerprint
from support.signing import flipped, sealed, signature_of
from support.waiting import PATIENT_VARIABLES

NUMBERS = sorted(range(3), key=fingerprint)
"""Numbers of three artifacts, in the order of a bundle."""


def key_of(number):
    return ArtifactKey.parse("jax", DEVICE, fingerprint(number))


class Forge:
    """Write bundles like an attacker who knows the format.

    Attributes:
        entries: entries of the manifest.
        blobs: their blobs, in the same order.
    """

    def __init__(self, directory, namespace, *, signing_key=None):
        self.directory, self.namespace = directory, namespace
        self.entries, self.blobs = [], []
        for number in NUMBERS:
            envelope = sealed(directory, key_of(number), b"executable %d" % number * 99)
            signature = None
            if signing_key is not None:
                signature = signature_of(signing_key, namespace, key_of(number), envelope)
            metadata = ArtifactMetadata(
                compile_seconds=1.0, raw_size_bytes=envelope.raw_size_bytes, signature=signature
            )
            self.add(key_of(number), envelope.path.read_bytes(), metadata)

    def add(self, key, blob, metadata=None):
        sha256 = hashlib.sha256(blob).hexdigest()
        self.entries.append(
            BundleEntry(key=key, sha256=sha256, size_bytes=len(blob), metadata=metadata)
        )
        self.blobs.append(blob)

    def manifest(self, *, lines=None, artifacts=None):
        head = BundleHead(
            namespace=self.namespace,
            artifacts=len(self.entries) if artifacts is None else artifacts,
        )
        return line_of(head) + b"".join(lines or map(line_of, self.entries))

    def members(self):
        """Return the members of an honest export."""
        return [
            (member(entry.name, len(blob)), blob)
            for entry, blob in zip(self.entries, self.blobs, strict=True)
        ]

    def write(self, *, manifest=None, members=None):
        """Write a tar file of a manifest and members. Default: the ones of an honest export."""
        manifest = self.manifest() if manifest is None else manifest
        head = member(f"manifest-{hashlib.sha256(manifest).hexdigest()}.jsonl", len(manifest))
        path = self.directory / "forged.bundle"
        path.unlink(missing_ok=True)
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
            for info, content in [(head, manifest), *(members or self.members())]:
                tar.addfile(info, io.BytesIO(content))
        path.chmod(0o600)
        return path


def member(name, size=0):
    info = tarfile.TarInfo(name)
    info.size = size
    return info


def is_sound(path):
    """Return whether a bundle and all its blobs match its manifest."""
    try:
        with Bundle(path) as bundle:
            return all(
                hashlib.sha256(blob.read()).hexdigest() == entry.sha256
                for _, entry, blob in bundle.entries()
            )
    except BundleError:
        return False


@pytest.fixture
def forge(tmp_path, space):
    return Forge(tmp_path, space)


@pytest.fixture
def run(fort, space, tmp_path):
    """Import a file with the right to write."""
    token = fort.token(f"write:{space}")

    def run(path, **settings):
        variables = PATIENT_VARIABLES | {
            "GRAPHSTASH_URL": fort.url,
            "GRAPHSTASH_TOKEN": token,
            "GRAPHSTASH_CACHE_DIR": str(tmp_path / "host"),
            **{f"GRAPHSTASH_{name.upper()}": str(value) for name, value in settings.items()},
        }
        return CliRunner().invoke(complete_app(), ["import", str(path)], env=variables)

    return run


@pytest.fixture
def refuse(fort, run):
    """Assert that imports refuse files, and that the server stores nothing until the test ends."""

    def refuse(path, *named, **settings):
        result = run(path, **settings)
        assert result.exit_code == ExitStatus.REFUSED, result.output
        assert result.stderr.endswith("; nothing was imported\n")
        for name in named:
            assert name in result.stderr

    with fort.withstands():
        yield refuse


def test_honest_bundle_is_imported(forge, run, fort, space):
    """Control: each forgery below differs from this bundle in one thing."""
    result = run(forge.write())
    assert (result.exit_code, result.stderr) == (0, "")
    assert "3 imported" in result.stdout
    got = fort.http(fort.admin).get(key_of(NUMBERS[0]).artifact_path(space))
    assert got.content == forge.blobs[0]


def test_bundle_with_a_changed_byte_or_a_cut_anywhere_is_not_sound(forge, tmp_path):
    """Covers headers, manifest, padding and end of the file. The blobs' digests cover the blobs."""
    honest = forge.write().read_bytes()
    assert is_sound(forge.directory / "forged.bundle")
    path = tmp_path / "changed"
    path.touch(mode=0o600)
    places = {*range(0, len(honest), 97), *random.Random(7).sample(range(len(honest)), 200)}
    for place in sorted(places):
        changed = bytearray(honest)
        changed[place] ^= 0x41
        path.write_bytes(changed)
        assert not is_sound(path), place
    for size in (*range(0, len(honest), 512), len(honest) - 1):
        path.write_bytes(honest[:size])
        assert not is_sound(path), size


def a_byte_of_a_blob_is_changed(forge):
    path = forge.write()
    content = bytearray(path.read_bytes())
    content[content.index(forge.blobs[1]) + 100] ^= 1
    path.write_bytes(content)
    return path


def something_is_added_at_the_end(forge):
    path = forge.write()
    with path.open("ab") as file:
        file.write(bytes(tarfile.RECORDSIZE))
    return path


def the_entries_change_places(forge):
    forge.entries.reverse()
    forge.blobs.reverse()
    return forge.write()


def an_entry_comes_twice(forge):
    forge.entries.insert(1, forge.entries[0])
    forge.blobs.insert(1, forge.blobs[0])
    return forge.write()


def a_blob_is_left_out(forge):
    manifest = forge.manifest()
    del forge.entries[1], forge.blobs[1]
    return forge.write(manifest=manifest)


def the_manifest_lacks_an_artifact(forge):
    lines = list(map(line_of, forge.entries))[:2]
    return forge.write(manifest=forge.manifest(lines=lines, artifacts=2))


def the_manifest_declares_a_huge_size(forge):
    path = forge.write()
    content = path.read_bytes()
    name = content[: content.index(b"\0")].decode()
    path.write_bytes(member(name, 2**40).tobuf(tarfile.GNU_FORMAT) + content[512:])
    return path


def a_line_of_the_manifest_has_no_end(forge):
    return forge.write(manifest=forge.manifest() + b" " * 10 * 1024**2)


def an_entry_is_hidden_behind_a_long_name(forge):
    """Insert another header, as tar writes it for long names."""
    return forge.write(members=[(member("x" * 300, 1), b"x")])


def the_bundle_is_of_another_version(forge):
    manifest = forge.manifest().replace(b'"graphstash_bundle":1', b'"graphstash_bundle":2', 1)
    return forge.write(manifest=manifest)


def an_intact_blob_comes_under_another_key(forge):
    first = {"sha256": forge.entries[0].sha256, "size_bytes": forge.entries[0].size_bytes}
    forge.entries[1] = forge.entries[1].model_copy(update=first)
    forge.blobs[1] = forge.blobs[0]
    return forge.write()


def a_blob_is_no_envelope(forge):
    key = forge.entries[1].key
    forge.entries[1:], forge.blobs[1:] = [], []
    forge.add(key, b"#!/bin/sh\nrm -rf /\n")
    return forge.write()


def a_blob_unpacks_to_more_than_it_says(forge):
    key = forge.entries[2].key
    del forge.entries[2], forge.blobs[2]
    forge.add(key, bomb(key, claimed_bytes=1000, real_bytes=64 * 1024**2))
    return forge.write()


_FORGERIES = {
    a_byte_of_a_blob_is_changed: ("entry 2", str(key_of(NUMBERS[1])), "its bytes were changed"),
    something_is_added_at_the_end: ("after the last entry",),
    the_entries_change_places: ("artifact 2 in the manifest", "out of order"),
    an_entry_comes_twice: ("artifact 2 in the manifest", "is listed twice"),
    a_blob_is_left_out: ("entry 2", "is in its place"),
    the_manifest_lacks_an_artifact: ("after the last entry",),
    the_manifest_declares_a_huge_size: ("the manifest is cut",),
    a_line_of_the_manifest_has_no_end: ("artifact 4 in the manifest", "more than"),
    an_entry_is_hidden_behind_a_long_name: ("entry 1", "is in its place"),
    the_bundle_is_of_another_version: ("the manifest's first line",),
    an_intact_blob_comes_under_another_key: ("entry 2", "asked for"),
    a_blob_is_no_envelope: ("entry 2", "not a graphstash envelope"),
    a_blob_unpacks_to_more_than_it_says: ("entry 3",),
}


def test_forged_bundle_is_refused(tmp_path, space, refuse):
    for forgery, named in _FORGERIES.items():
        refuse(forgery(Forge(tmp_path, space)), *named)


def _said_twice(line):
    """The first and the last value differ, and parsers differ in which of them they return."""
    return line.replace(b'"sha256":', b'"sha256":"' + b"0" * 64 + b'","sha256":', 1)


_LINES = (
    *(lambda _, line=line: line for line in (b"{}\n", b"null\n", b"[" * 100_000 + b"\n")),
    *(lambda _, line=line: line for line in (b"\xff\n", b'{"key":1}\n', b"\n")),
    _said_twice,
    lambda line: line.replace(b'"kind":"jax"', b'"kind":"../x"'),
    lambda line: line.replace(DEVICE.encode(), b"../../x"),
    lambda line: line.replace(fingerprint(NUMBERS[1]).encode(), b"0" * 63 + b"/"),
)


def test_manifest_line_that_is_no_artifact_is_refused(forge, refuse):
    for change in _LINES:
        first, second, third = map(line_of, forge.entries)
        assert change(second) != second
        manifest = forge.manifest(lines=[first, change(second), third])
        refuse(forge.write(manifest=manifest), "artifact 2 in the manifest")


_TYPES = (
    {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd", "size": 0},
    {"type": tarfile.LNKTYPE, "linkname": "blobs/other", "size": 0},
    *({"type": each, "size": 0} for each in (tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)),
    *({"name": each} for each in ("../../etc/cron.d/job", "/etc/cron.d/job", "blobs/\x1b[2J")),
    *({"mode": 0o4755}, {"uid": 1000}, {"mtime": 1}, {"uname": "root"}),
)


def test_entry_with_another_type_name_or_owner_is_refused(forge, refuse):
    for fields in _TYPES:
        members = forge.members()
        for field, value in fields.items():
            setattr(members[1][0], field, value)
        path = forge.write(members=members)
        refuse(path, "entry 2", "is in its place")
    assert not any("cron" in str(each) for each in path.parent.rglob("*"))


def test_blob_that_declares_a_huge_size_is_refused(forge, refuse):
    for size in (2**33, 2**62):
        forge.entries[1] = forge.entries[1].model_copy(update={"size_bytes": size})
        path = forge.write()
        refuse(path, "entry 2")
        content = path.read_bytes()
        header = member(forge.entries[1].name, size).tobuf(tarfile.GNU_FORMAT)
        place = content.index(forge.entries[1].name.encode() + b"\0")
        path.write_bytes(content[:place] + header + content[place + 512 :])
        refuse(path, "entry 2", "is cut")


def test_artifacts_signed_by_a_stranger_or_a_revoked_key_are_refused(tmp_path, space, team, refuse):
    team.trust("ci")
    forge = Forge(tmp_path, space, signing_key=team.key("stranger"))
    refuse(forge.write(), "entry 1", "not trusted", trusted_keys=team.file)
    forge = Forge(tmp_path, space, signing_key=team.key("ci"))
    team.revoke("ci")
    refuse(forge.write(), "entry 1", "revoked", trusted_keys=team.file)


def test_one_absent_or_changed_signature_refuses_the_bundle(tmp_path, space, team, refuse):
    forge = Forge(tmp_path, space, signing_key=team.trust("ci"))
    sound, metadata = forge.entries[1], forge.entries[1].metadata
    for signature, reason in (
        (None, "is not signed"),
        (flipped(metadata.signature), "the signature is of other bytes"),
    ):
        changed = metadata.model_copy(update={"signature": signature})
        forge.entries[1] = sound.model_copy(update={"metadata": changed})
        refuse(forge.write(), "entry 2", reason, trusted_keys=team.file)


def test_signed_artifacts_of_another_namespace_are_refused(tmp_path, space, team, refuse):
    forge = Forge(tmp_path, f"{space}-untrusted", signing_key=team.trust("ci"))
    forge.namespace = space
    refuse(forge.write(), "entry 1", "another namespace", trusted_keys=team.file)


def test_link_pipe_or_file_that_others_may_write_is_refused(forge, refuse, tmp_path):
    path = forge.write()
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    refuse(tmp_path / "link", "copy it to a directory that only you can write to")
    refuse(tmp_path / "pipe", "copy it to a directory that only you can write to")
    path.chmod(0o666)
    refuse(path, "copy it to a directory that only you can write to")


def test_artifact_swapped_after_verification_is_not_stored(forge, run, fort, space, monkeypatch):
    """The attacker has this user's rights. The server checks the verified digest."""
    path = forge.write()
    content = bytearray(path.read_bytes())
    place = content.index(forge.blobs[1]) + 100

    from graphstash._cli import bundles

    publish = bundles._Import._publish

    def swapping(self, *arguments):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([content[place] ^ 1]))
        return publish(self, *arguments)

    monkeypatch.setattr(bundles._Import, "_publish", swapping)
    result = run(path)
    assert result.exit_code == ExitStatus.FAILED
    stored = fort.http(fort.admin).get(key_of(NUMBERS[1]).artifact_path(space))
    assert stored.status_code == 404


def test_import_with_a_read_token_stores_nothing(forge, fort, space, run):
    path, reader = forge.write(), fort.token(f"read:{space}")
    with fort.withstands():
        result = run(path, token=reader)
    assert result.exit_code == ExitStatus.FAILED
    assert "publishes nothing" in result.stderr
