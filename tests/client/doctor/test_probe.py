import os

import httpx
import pytest

from graphstash._cli.doctor.compilers import probe_hooks
from graphstash._cli.doctor.findings import State
from support.doctor import diagnose, line
from support.server import Server


def probe(site, **terms):
    environ = os.environ | {"PYTHONPATH": str(site), "GRAPHSTASH_URL": "http://127.0.0.1:9"}
    return list(probe_hooks(environ, {"url": "http://127.0.0.1:9"}, **terms))


def test_the_probe_imports_a_real_compiler_and_finds_its_hook_in_place(installed, tmp_path):
    installed(jax="0.10.2")
    told = line(probe(tmp_path), "import probe")
    assert told.state == State.OK
    assert told.found in {"installed: jax, pjrt", "installed: pjrt, jax"}


def test_an_import_that_fails_is_told_with_its_reason(installed):
    site = installed(triton="3.3.0")
    (site / "triton.py").write_text("raise OSError('libcuda.so.1: no such file')")
    told = line(probe(site), "import probe", State.WARN)
    assert "import triton: OSError: libcuda.so.1: no such file" in told.found
    assert "the job's import fails too" in told.advice


@pytest.mark.parametrize(
    ("code", "seconds", "found"),
    [
        ("import time; time.sleep(600)", 6, "Python did not finish within 6 s"),
        (
            "import os; os.kill(os.getpid(), 9)",
            200,
            "was killed by SIGKILL while it imported triton",
        ),
        ("import os; os._exit(3)", 200, "exited with status 3 while it imported triton"),
    ],
)
def test_an_import_that_ends_or_never_ends_is_told_with_the_module(installed, code, seconds, found):
    site = installed(triton="3.3.0")
    (site / "triton.py").write_text(code)
    told = line(probe(site, limit_seconds=seconds), "import probe", State.FAIL)
    assert found in told.found


def test_a_hook_that_steps_aside_is_told_in_its_own_words(installed):
    site = installed(triton="4.0.0")
    (site / "triton.py").write_text("__version__ = '4.0.0'")
    findings = probe(site)
    assert any(each.state == State.WARN and "triton" in each.found for each in findings), findings
    assert "installed: no hook" in line(findings, "import probe", State.OK).found


def test_the_write_probe_leaves_nothing_on_the_server(installed, tmp_path, namespace):
    with Server(tmp_path / "server") as server:  # nobody else holds leases there
        told = line(diagnose(server.url, namespace=namespace, probe=True), "write probe")
        answer = httpx.get(f"{server.url}/v1/stats", trust_env=False).json()
        assert server.stats(namespace)["artifacts"] == 0
    assert told.state == State.OK
    assert answer["leases_held"] == 0


def test_the_write_probe_tells_a_token_that_may_only_read(installed, guarded, namespace):
    token = guarded.token(f"read:{namespace}")
    findings = diagnose(guarded.url, token=token, namespace=namespace, probe=True)
    told = line(findings, "write probe")
    assert told.state == State.FAIL
    assert "GRAPHSTASH_READ_ONLY=true" in told.advice


def test_the_write_probe_finds_that_a_trusted_namespace_wants_an_exact_grant(
    installed, guarded, namespace
):
    guarded.set_policy(namespace, trusted=True)
    token = guarded.token("write:test-*")
    findings = diagnose(guarded.url, token=token, namespace=namespace, probe=True)
    assert line(findings, "namespace").state == State.OK
    told = line(findings, "write probe")
    assert told.state == State.FAIL
    assert namespace in told.found


def test_a_read_only_job_takes_no_lease(installed, server):
    findings = diagnose(server.url, read_only="1", probe=True)
    assert line(findings, "write probe").state == State.SKIPPED
