"""Signing keys, the file of trusted keys, and the commands that create both."""

import json
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from graphstash._trust.signing_keys import SigningKey, is_signed_by
from graphstash._trust.trusted_keys import TrustedKeys
from graphstash.errors import ConfigError
from support.processes import graphstash_here as graphstash
from support.signing import trust_json

PUBLIC = SigningKey(Ed25519PrivateKey.generate()).public_text
DASHED = "-2ghv9Ud0lELeJEeBgR9gM0ACC3S_1iXeJyghOe1g4c"
"""A public key that looks like options."""


def answer(group, command, *arguments, **variables):
    done = graphstash(group, command, "--json", *arguments, check=True, **variables)
    return json.loads(done.stdout)


def test_generated_key_is_private_signs_and_is_never_overwritten(tmp_path):
    path = tmp_path / "key.pem"
    made = SigningKey.generate(path)
    assert path.stat().st_mode & 0o777 == 0o600
    signature = SigningKey.load(path).sign(b"statement")
    assert is_signed_by(made.public, signature, b"statement")
    assert not is_signed_by(made.public, signature, b"statement ")
    stranger = SigningKey(Ed25519PrivateKey.generate())
    assert not is_signed_by(stranger.public, signature, b"statement")
    with pytest.raises(ConfigError, match="the file exists; choose another path"):
        SigningKey.generate(path)
    assert SigningKey.load(path).public == made.public


@pytest.mark.parametrize(
    ("mode", "owner", "is_taken"),
    [(0o640, 0, True), (0o640, 1000, False), *((mode, 0, False) for mode in (0o604, 0o620, 0o601))],
)
def test_key_readable_by_others_is_refused_but_for_one_that_root_shares_with_a_group(
    tmp_path, monkeypatch, mode, owner, is_taken
):
    path = tmp_path / "key.pem"
    SigningKey.generate(path)
    status = list(path.stat()[:10])
    status[stat.ST_MODE], status[stat.ST_UID] = stat.S_IFREG | mode, owner
    monkeypatch.setattr("graphstash._trust.signing_keys.os.fstat", lambda _: os.stat_result(status))
    if is_taken:
        assert SigningKey.load(path).public_text
        return
    with pytest.raises(ConfigError, match=rf"mode {mode:o}.*chmod 600 {path}"):
        SigningKey.load(path)


def test_pipe_in_place_of_a_key_is_refused_without_waiting_for_a_writer(tmp_path):
    path = tmp_path / "key.pem"
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match=f"signing key {path}: not a regular file"):
        SigningKey.load(path)


def test_file_that_is_no_private_key_is_refused_without_prompt(tmp_path):
    path, password = tmp_path / "key.pem", BestAvailableEncryption(b"secret")
    form = (Encoding.PEM, PrivateFormat.PKCS8)
    encrypted = Ed25519PrivateKey.generate().private_bytes(*form, password)
    elliptic = generate_private_key(SECP256R1()).private_bytes(*form, NoEncryption())
    path.touch(mode=0o600)
    for content in (b"", bytes(100_000), encrypted, elliptic):
        path.write_bytes(content)
        with pytest.raises(
            ConfigError, match="expected an Ed25519 private key in PEM, not encrypted"
        ):
            SigningKey.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Invalid JSON"),
        (trust_json(keys=[{"public": PUBLIC, "namespaces": []}]), "keys.0.namespaces"),
        (trust_json(keys=[{"public": PUBLIC, "namespaces": ["../x"]}]), "keys.0.namespaces.0"),
        (trust_json(keys=[{"public": PUBLIC}] * 1001), "at most 1000"),
        (" " * (1024**2 + 1), "more than 1048576 bytes"),
    ],
)
def test_malformed_file_of_trusted_keys_is_refused_naming_the_place(tmp_path, text, message):
    path = tmp_path / "trusted.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        TrustedKeys.read(path)
    assert str(path) in str(caught.value)


def test_commands_generate_trust_and_revoke_a_key(tmp_path):
    secret, trusted = tmp_path / "ci.pem", tmp_path / "trust" / "keys.json"
    made = answer("keys", "generate", secret)
    assert answer("keys", "show", secret) == made
    assert "PRIVATE" not in json.dumps(made)

    options = ("--name", "ci 2026", "--namespace", "trusted", "--namespace", "ci-*")
    added = answer("keys", "trust", made["public"], *options, "--file", trusted)
    assert added["key_id"] == made["key_id"]
    assert made["key_id"] in graphstash("keys", "list", "--file", trusted, COLUMNS="30").stdout
    answer("keys", "trust", made["public"], "--file", trusted, "--not-after", "2030-01-01")
    (listed,) = answer("keys", "list", GRAPHSTASH_TRUSTED_KEYS=trusted)["keys"]
    assert (listed["name"], listed["namespaces"]) == ("", ["*"])  # the entry was replaced
    (key,) = TrustedKeys.read(trusted).keys
    assert key.not_after == datetime(2030, 1, 1, tzinfo=UTC)

    answer("keys", "revoke", made["key_id"], "--reason", "rotated", "--file", trusted)
    shown = graphstash("keys", "list", "--file", trusted)
    assert "revoked" in shown.stdout
    assert "rotated" in shown.stdout
    again = graphstash("keys", "trust", made["public"], "--file", trusted)
    assert again.returncode == 2
    assert "was revoked" in again.stderr
    for words in ((*options, DASHED), (DASHED, *options), (*options, "--", DASHED)):
        assert answer("keys", "trust", "--file", tmp_path / "a.json", *words)["public"] == DASHED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trust", "nonsense", "--file", "keys.json"), "public"),
        (("trust", PUBLIC, "--namespace", "No", "--file", "keys.json"), "namespace pattern"),
        (("revoke", "x", "--reason", "r", "--file", "keys.json"), "signing key id"),
        (("list", "--file", "absent.json"), "absent.json: No such file"),
        (("show", "absent.pem"), "absent.pem: No such file"),
        (("generate", "absent/key.pem"), "No such file"),
    ],
)
def test_bad_input_is_reported_in_one_line_and_changes_nothing(
    tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    result = graphstash("keys", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_concurrent_commands_lose_no_change(tmp_path):
    file = tmp_path / "trusted.json"
    made = [SigningKey.generate(tmp_path / f"{number}.pem") for number in range(4)]
    command = [sys.executable, "-m", "graphstash", "keys"]
    changes = [("trust", key.public_text) for key in made[:2]]
    changes += [("revoke", key.key_id, "--reason", "stolen") for key in made[2:]]
    running = [
        subprocess.Popen([*command, *change, "--file", file], stdout=subprocess.PIPE)
        for change in changes
    ]
    assert [process.communicate() and process.returncode for process in running] == [0] * 4
    trusted = TrustedKeys.read(file)
    assert {key.key_id for key in trusted.keys} == {key.key_id for key in made[:2]}
    assert {key.key_id for key in trusted.revoked} == {key.key_id for key in made[2:]}
