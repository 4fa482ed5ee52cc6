"""`graphstash ls`, `show` and `explain` on the artifacts of a server."""

import json
import os

import httpx
import pytest

from graphstash_schema import ArtifactKey, ArtifactMetadata
from graphstash_schema.explanation import make_description
from support.hostile import Middlebox
from support.http_server import Answer
from support.processes import graphstash_on_terminal
from support.waiting import variables_of

DEVICE = "cpu-x86_64-0123456789abcdef"


def key_of(namespace, number, *, kind="jax", device=DEVICE):
    """Return a key that no other test uses, because jobs may read all namespaces of the server."""
    start = namespace.encode().hex()[:20]
    return ArtifactKey.parse(kind, device, f"{number:04x}{start}".ljust(64, "0"))


@pytest.fixture
def put(hosts, namespace):
    def put(number, *, label="", seconds=1.0, size=10, parts=None, where=None, **settings):
        host = hosts("publisher", **({"namespace": where} if where else {}), **settings)
        key = key_of(namespace, number)
        metadata = ArtifactMetadata(
            compile_seconds=seconds,
            raw_size_bytes=size,
            toolchain="jax 0.10.2",
            producer="ana@host:1",
        )
        host.put(key, os.urandom(size), metadata)
        host.server.describe([make_description(key, label, parts or {"program": str(key)})])
        return key

    return put


def listed(command, *options, **settings):
    return json.loads(command("ls", "--json", *options, **settings).stdout)


def numbers(found):
    return [int(each["key"]["fingerprint"][:4], 16) for each in found["artifacts"]]


def test_the_list_is_sorted_filtered_and_read_page_by_page(put, command):
    put(3, size=200, seconds=5, label="jit(train_step)")
    put(1, size=100, seconds=9, label="jit(init)")
    put(2, size=300, seconds=1)
    for sort, order in {
        "size": [2, 3, 1],
        "compile": [1, 3, 2],
        "fingerprint": [1, 2, 3],
        "newest": [2, 1, 3],
    }.items():
        assert numbers(listed(command, "--sort", sort)) == order, sort
        assert numbers(listed(command, "--sort", sort, "--limit", "2")) == order[:2], sort
    assert numbers(listed(command, "TRAIN")) == [3]
    assert numbers(listed(command, "--kind", "triton")) == []
    assert numbers(listed(command, "--device-type", DEVICE)) == [2, 1, 3]
    nothing = command("ls", "no such label")
    assert nothing.stdout.startswith("no such artifacts in the namespace")
    page = listed(command, "--limit", "1")
    assert numbers(page) == [2]
    rest = listed(command, "--after", page["next"], "--limit", "0")
    assert (numbers(rest), rest["next"]) == ([1, 3], None)
    assert command("ls", "--limit", "1").stderr == f"more: --after {page['next']}\n"


def test_largest_artifacts_are_sorted_by_the_server_or_here_if_it_is_older(server, put, command):
    for number, size in ((1, 200), (2, 3000), (3, 1000)):
        put(number, size=size)
    with Middlebox(server.url) as box:
        page = listed(command, "--sort", "size", "--limit", "2", url=box.url)
        assert numbers(page) == [2, 3]
        after = ("--after", page["next"], "--limit", "1")
        assert numbers(listed(command, "--sort", "size", *after, url=box.url)) == [1]
        assert len(box.requests) == 2

        def refuse_size(request, answer):
            other = request.path.replace("order=size", "order=largest")
            return answer if other == request.path else box.ask(request, path=other)

        box.change = refuse_size
        assert numbers(listed(command, "--sort", "size", "--limit", "2", url=box.url)) == [2, 3]
        refused = command("ls", "--sort", "size", *after, url=box.url, status=1)
        assert "order" in refused.stderr


def test_labels_are_cut_to_a_terminal_of_80_columns_and_whole_elsewhere(put, command, config):
    def terminal(*arguments):
        shown = graphstash_on_terminal(
            *arguments, is_output_shown=True, COLUMNS="80", **variables_of(config("reader"))
        )
        assert shown[0] == 0, shown
        return shown[1].splitlines()

    label = "jit(" + "x" * 100 + ")"
    put(1, label=label, size=9999)
    put(2, where="x" * 64)
    assert label in command("ls").stdout
    heading, first, second = terminal("ls")
    assert heading.split() == ["fingerprint", "kind", "size", "compile", "hits", "age", "label"]
    assert len(first) == 80
    assert first.endswith("…")
    assert second == f"              on {DEVICE}, by ana@host:1"
    lines = terminal("status")
    assert len([line for line in lines if line.startswith("x")]) == 1
    assert all(len(line) <= 80 for line in lines[1:-1])


def test_show_prints_all_details_of_the_one_artifact(put, command, namespace, hosts):
    key = put(0x1234, label="jit(step)", parts={"program": "text", "jax": "0.10.2"})
    output = command("show", key.fingerprint[:6]).stdout
    for each in (
        *("jit(step)", namespace, key.fingerprint, DEVICE, "sha256:", "jax 0.10.2", "ana@host:1"),
        *("the program\n  program: text", "its environment\n  jax: 0.10.2", "on this host  no"),
        "signature     none, and this host requires none",
    ):
        assert each in output
    hosts("reader").get(key)
    whole = json.loads(command("show", str(key), "--json").stdout)
    assert whole["key"]["fingerprint"] == key.fingerprint
    assert whole["is_on_this_host"]
    assert whole["trust"]["state"] == "unsigned"
    assert command("show", f"{namespace}/{key}").stdout
    put(0x12345)
    several = command("show", "1234", status=1).stderr
    assert "2 artifacts begin with '1234'" in several
    assert str(key) in several
    assert "`graphstash ls` lists them" in command("show", "ffff", status=1).stderr


@pytest.mark.parametrize(
    ("signer", "is_trusting", "state", "text"),
    [
        ("ci", False, "unchecked", "which this host does not check"),
        ("ci", True, "trusted", "(ci), trusted on this host"),
        ("stranger", True, "refused", "refused on this host: "),
        (None, True, "refused", "is not signed"),
    ],
)
def test_show_reports_whether_signature_is_trusted(
    put, command, team, signer, is_trusting, state, text
):
    team.trust("ci")
    settings = {"trusted_keys": team.file} if is_trusting else {}
    key = put(1, **({"signing_key": team.key(signer)} if signer else {}))
    assert text in command("show", key.fingerprint, **settings).stdout
    shown = json.loads(command("show", key.fingerprint, "--json", **settings).stdout)
    assert shown["trust"]["state"] == state


def test_hostile_labels_and_metadata_are_shown_as_text(put, command, hosts, namespace):
    label = "[red]\u202ejit[/red][link=http://evil]x"
    key = key_of(namespace, 1)
    metadata = ArtifactMetadata(
        compile_seconds=1, raw_size_bytes=1, producer="[bold]\u2066root", toolchain="[/]\u200b"
    )
    host = hosts("publisher")
    host.put(key, b"x", metadata)
    parts = {"program": str(key), "jax": "0.10\x1b[2J\n[blink]"}
    host.server.describe([make_description(key, label, parts)])
    for arguments in (("ls",), ("show", "0001"), ("explain", "0001")):
        text = command(*arguments).stdout
        assert not set("\u202e\u2066\u200b\x1b") & set(text), arguments
        assert "[red]\\u202ejit[/red][link=http://evil]x" in text, arguments


def test_a_stored_artifact_is_explained_by_its_nearest_relative(put, command, namespace, server):
    program = {"program": f"of {namespace}"}
    put(1, label=f"step {namespace}", parts={**program, "jax": "0.10.2"})
    newer = put(2, label=f"step {namespace}", parts={**program, "jax": "0.11.0"})
    text = command("explain", newer.fingerprint[:4]).stdout
    assert "compared with its nearest relative: jax: 0.11.0 here, 0.10.2 there" in text
    (cause,) = json.loads(command("explain", newer.fingerprint[:4], "--json").stdout)
    assert cause["nearest"]["namespace"] == namespace
    with httpx.Client(base_url=f"{server.url}/v1/{namespace}") as http:
        assert http.delete(f"/artifacts/{newer}").status_code == 204
    put(2, label=f"step {namespace}", parts={**program, "jax": "0.11.0"})
    assert command("explain", newer.fingerprint[:4]).stdout.count("jax: 0.11.0 here") == 1


def test_a_server_of_an_earlier_release_is_named(server, command):
    with Middlebox(server.url) as box:
        box.change = lambda request, _: box.ask(request, path="/v1/no/such/path")
        for name in ("ls", "status"):
            assert "is older than this command" in command(name, status=1, url=box.url).stderr


@pytest.mark.parametrize("arguments", [["ls", "--limit", "0"], ["export", "PLACE/bundle"]])
def test_listing_ends_if_server_repeats_a_page(server, command, arguments, tmp_path):
    def endless(request, answer):
        if not request.path.partition("?")[0].endswith("/artifacts"):
            return answer
        page = {"artifacts": [], "next": "again"}
        return Answer(200, answer.headers, json.dumps(page).encode())

    with Middlebox(server.url, endless) as box:
        status = 1 if arguments[0] == "export" else 0
        arguments = [argument.replace("PLACE", str(tmp_path)) for argument in arguments]
        done = command(*arguments, url=box.url, status=status)
        assert len(box.to("/artifacts")) == 2
    assert "no such artifacts" in done.stdout or "nothing to export" in done.stderr
