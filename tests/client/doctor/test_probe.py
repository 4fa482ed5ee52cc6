import os

import httpx
import pytest

from graphstash._doctor.findings import State
from graphstash._doctor.probe import probe_hooks
from support.doctor import diagnose, line


def probe(site, **terms):
    environ = os.environ | {"PYTHONPATH": str(site), "GRAPHSTASH_URL": "http://127.0.0.1:9"}
    return list(probe_hooks(environ, {"url": "http://127.0.0.1:9"}, **terms))


def test_the_probe_imports_a_real_compiler_and_finds_its_hook_in_place(installed, tmp_path):
    installed(jax="0.10.2")
    told = line(probe(tmp_path), "import probe")
    assert told.state == State.OK
    assert told.found in {"in place: jax, pjrt", "in place: pjrt, jax"}


def test_an_import_that_fails_is_told_with_its_reason(installed):
    site = installed(triton="3.3.0")
    (site / "triton.py").write_text("raise OSError('libcuda.so.1: no such file')")
    told = line(probe(site), "import probe", State.WARN)
    assert "import triton: OSError: libcuda.so.1: no such file" in told.found
    assert "own import" in told.advice


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import time; time.sleep(600)", "a Python was not done after 6 s"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL while it imported triton"),
        ("import os; os._exit(3)", "ended with status 3 while it imported triton"),
    ],
)
def test_an_import_that_ends_or_never_ends_is_told_with_the_module(installed, code, found):
    site = installed(triton="3.3.0")
    (site / "triton.py").write_text(code)
    told = line(probe(site, limit_seconds=6), "import probe", State.FAIL)
    assert found in told.found


def test_a_hook_that_steps_aside_is_told_in_its_own_words(installed):
    site = installed(triton="4.0.0")
    (site / "triton.py").write_text("__version__ = '4.0.0'")
    findings = probe(site)
    assert any(each.state == State.WARN and "triton" in each.found for each in findings), findings
    assert "in place: no hook" in line(findings, "import probe", State.OK).found


def test_the_write_probe_leaves_nothing_on_the_server(installed, server, namespace):
    told = line(diagnose(server.url, namespace=namespace, probe=True), "write probe")
    assert told.state == State.OK
    assert server.stats(namespace)["artifacts"] == 0
    answer = httpx.get(f"{server.url}/v1/stats", trust_env=False).json()
    assert answer["leases_held"] == 0


def test_the_write_probe_tells_a_token_that_may_only_read(installed, guarded, namespace):
    token, _ = guarded.issue(f"read:{namespace}")
    findings = diagnose(guarded.url, token=token, namespace=namespace, probe=True)
    told = line(findings, "write probe")
    assert told.state == State.FAIL
    assert "GRAPHSTASH_READ_ONLY=true" in told.advice


def test_the_write_probe_finds_that_a_trusted_namespace_wants_an_exact_grant(
    installed, guarded, namespace
):
    assert guarded.http.put(f"/namespaces/{namespace}", json={"trusted": True}).is_success
    token, _ = guarded.issue("write:test-*")
    findings = diagnose(guarded.url, token=token, namespace=namespace, probe=True)
    assert line(findings, "namespace").state == State.OK
    told = line(findings, "write probe")
    assert told.state == State.FAIL
    assert namespace in told.found


def test_a_read_only_job_takes_no_lease(installed, server):
    findings = diagnose(server.url, read_only="1", probe=True)
    assert line(findings, "write probe").state == State.SKIPPED
