"""The probes of the doctor: compilers are imported, and a lease is taken and given back."""

import os

import httpx
import pytest

from graphstash._cli.doctor.compilers import probe_hooks
from graphstash._cli.doctor.findings import State
from support.doctor import diagnose, expect, line
from support.server import Server


def probe(site, **terms):
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"PYTHONPATH": path, "GRAPHSTASH_URL": "http://127.0.0.1:9"}
    return list(probe_hooks(environ, {"url": "http://127.0.0.1:9"}, **terms))


def test_the_probe_imports_a_real_compiler_and_finds_its_hook_in_place(installed, tmp_path):
    installed(jax="0.10.2")
    told = expect(probe(tmp_path), "import probe", State.OK)
    assert told.found in {"installed: jax, pjrt", "installed: pjrt, jax"}


@pytest.mark.parametrize(
    ("code", "seconds", "state", "found"),
    [
        ("import time; time.sleep(600)", 6, State.FAIL, "Python did not finish within 6 s"),
        (
            "import os; os.kill(os.getpid(), 9)",
            200,
            State.FAIL,
            "was killed by SIGKILL while it imported triton",
        ),
        (
            "import os; os._exit(3)",
            200,
            State.FAIL,
            "exited with status 3 while it imported triton",
        ),
        (
            "raise OSError('libcuda.so.1: no such file')",
            200,
            State.WARN,
            "import triton: OSError: libcuda.so.1: no such file",
        ),
    ],
)
def test_failing_exiting_or_endless_import_is_reported_with_module(
    installed, code, seconds, state, found
):
    site = installed(triton="3.3.0")
    (site / "triton.py").write_text(code)
    told = expect(probe(site, limit_seconds=seconds), "import probe", state, found=found)
    assert ("the job's import fails too" in told.advice) == (state == State.WARN)


def test_inactive_hook_is_reported_with_its_own_message(installed):
    site = installed(triton="4.0.0")
    (site / "triton.py").write_text("__version__ = '4.0.0'")
    findings = probe(site)
    assert any(each.state == State.WARN and "triton" in each.found for each in findings), findings
    expect(findings, "import probe", State.OK, found="installed: no hook")


def test_the_write_probe_leaves_nothing_on_the_server(installed, tmp_path, namespace):
    with Server(tmp_path / "server") as server:  # nobody else holds leases there
        findings = diagnose(server.url, namespace=namespace, probe=True)
        answer = httpx.get(f"{server.url}/v1/stats", trust_env=False).json()
        assert server.stats(namespace)["artifacts"] == 0
    expect(findings, "write probe", State.OK)
    assert answer["leases_held"] == 0


def test_write_probe_detects_read_only_token(installed, guarded, namespace):
    token = guarded.token(f"read:{namespace}")
    findings = diagnose(guarded.url, token=token, namespace=namespace, probe=True)
    expect(findings, "write probe", State.FAIL, advice="GRAPHSTASH_READ_ONLY=true")


def test_write_probe_detects_missing_exact_grant_of_trusted_namespace(
    installed, guarded, namespace
):
    guarded.set_policy(namespace, trusted=True)
    token = guarded.token("write:test-*")
    findings = diagnose(guarded.url, token=token, namespace=namespace, probe=True)
    assert line(findings, "namespace").state == State.OK
    expect(findings, "write probe", State.FAIL, found=namespace)


def test_a_read_only_job_takes_no_lease(installed, server):
    findings = diagnose(server.url, read_only="1", probe=True)
    assert line(findings, "write probe").state == State.SKIPPED
