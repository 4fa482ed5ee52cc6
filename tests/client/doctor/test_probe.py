"""The doctor's probes import the compilers, acquire a lease and release it."""

import os

import httpx
import pytest

from graphstash._cli.doctor.compilers import probe_hooks
from graphstash._cli.doctor.findings import State
from graphstash_server.testing import LiveServer
from support.doctor import diagnose, expect, line


def probe(site, **terms):
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"PYTHONPATH": path, "GRAPHSTASH_URL": "http://127.0.0.1:9"}
    return list(probe_hooks(environ, {"url": "http://127.0.0.1:9"}, **terms))


WHILE = "while it imported triton"


def test_the_probe_imports_a_real_compiler_and_finds_its_hook_in_place(installed, tmp_path):
    installed(jax="0.10.2")
    finding = expect(probe(tmp_path), "import probe", State.OK)
    assert finding.found in {"installed: jax, pjrt", "installed: pjrt, jax"}


@pytest.mark.parametrize(
    ("code", "seconds", "state", "found"),
    [
        ("import time; time.sleep(600)", 1, State.FAIL, "Python did not finish within 1 s"),
        ("import os; os.kill(os.getpid(), 9)", 200, State.FAIL, f"was killed by SIGKILL {WHILE}"),
        ("raise OSError('no libcuda')", 200, State.WARN, "import triton: OSError: no libcuda"),
    ],
)
def test_failing_exiting_or_endless_import_is_reported_with_module(
    installed, code, seconds, state, found
):
    site = installed(triton="3.3.0")
    (site / "triton.py").write_text(code)
    finding = expect(probe(site, limit_seconds=seconds), "import probe", state, found=found)
    assert ("the job's import fails too" in finding.advice) == (state == State.WARN)


def test_inactive_hook_is_reported_with_its_own_message(installed):
    site = installed(triton="4.0.0")
    (site / "triton.py").write_text("__version__ = '4.0.0'")
    findings = probe(site)
    assert any(each.state == State.WARN and "triton" in each.found for each in findings), findings
    expect(findings, "import probe", State.OK, found="installed: no hook")


@pytest.fixture
def unused(tmp_path):
    """A server without leases of other tests."""
    with LiveServer(tmp_path / "data") as server:
        yield server


def test_the_write_probe_leaves_nothing_on_the_server(unused, installed, namespace):
    findings = diagnose(unused.url, namespace=namespace, probe=True)
    answer = httpx.get(f"{unused.url}/v1/stats", trust_env=False).json()
    expect(findings, "write probe", State.OK)
    assert answer["leases_held"] == 0
    assert all(row["artifacts"] == 0 for row in answer["namespaces"])
    reader = diagnose(unused.url, read_only="1", probe=True)
    assert line(reader, "write probe").state == State.SKIPPED


def test_write_probe_detects_what_a_token_must_not_write(installed, guarded, namespace):
    def probed(grant):
        token = guarded.token(grant)
        return diagnose(guarded.url, token=token, namespace=namespace, probe=True)

    reader = probed(f"read:{namespace}")
    expect(reader, "write probe", State.FAIL, advice="GRAPHSTASH_READ_ONLY=true")
    guarded.set_policy(namespace, trusted=True)
    inexact = probed("write:test-*")
    assert line(inexact, "namespace").state == State.OK
    expect(inexact, "write probe", State.FAIL, found=namespace)
