"""`graphstash prewarm` with the real libtpu, on a host without a TPU."""

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from support.compiler_jobs import JaxJobs
from support.environments import python_of

pytestmark = pytest.mark.extended

SUPPORT = Path(__file__).parents[1] / "support"
STEP = f"{SUPPORT / 'jax_prewarm_job.py'}:abstract_step"


def prewarm(*words, environment="jax-newest", **variables):
    return subprocess.run(
        [python_of(environment), "-m", "graphstash", "prewarm", *words],
        env=os.environ | {"COLUMNS": "300"} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def options(server, tmp_path_factory):
    """Options of the command, and variables that redirect it from this user's disk."""
    words = ("--topology", "v5e:2x2", "--url", server.url, "--namespace", "jax-prewarm")
    return words, {"GRAPHSTASH_CACHE_DIR": str(tmp_path_factory.mktemp("tier"))}


@pytest.fixture(scope="module")
def first(options, server):
    words, variables = options
    result = prewarm(*words, "--json", STEP, **variables)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_train_step_is_compiled_for_a_tpu_and_published(first, server):
    assert first["is_new"]
    assert first["compile_seconds"] > 0
    assert first["raw_size_bytes"] > first["size_bytes"] > 0
    assert first["key"].startswith("jax/tpu-v5_lite-2x2x1/")
    answer = httpx.get(f"{server.url}/v1/jax-prewarm/artifacts/{first['key']}", timeout=60)
    assert answer.status_code == 200
    assert len(answer.content) == first["size_bytes"]


LOADS_LIBTPU = """
from jax.experimental import topologies

topologies.get_topology_desc("v5e:2x2", "tpu")
print("loaded", flush=True)
input()
"""


def test_another_process_may_have_loaded_libtpu(first, options, tmp_path):
    words, _ = options
    with subprocess.Popen(
        [python_of("jax-newest"), "-c", LOADS_LIBTPU],
        env=os.environ | {"TPU_SKIP_MDS_QUERY": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "loaded\n"
        result = prewarm(*words, STEP, GRAPHSTASH_CACHE_DIR=str(tmp_path))
        other.communicate("\n", timeout=60)
    assert other.returncode == 0
    assert result.returncode == 0, result.stderr


def test_second_run_finds_the_program_and_compiles_nothing(first, options, server, tmp_path):
    words, _ = options
    puts = server.stats("jax-prewarm")["puts"]
    result = prewarm(*words, STEP, GRAPHSTASH_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "nothing was compiled" in result.stdout
    assert first["key"] in result.stdout
    assert all(f"{name} " in result.stdout for name in first["components"])
    assert all(digest in result.stdout for digest in first["components"].values())
    assert server.stats("jax-prewarm")["puts"] == puts


def test_prewarmed_key_and_artifact_equal_those_of_a_job_on_a_tpu_host(first, server, tmp_path):
    # JAX adds a flag of libtpu on hosts with TPUs, and the flag is a part of its key.
    variables = {"JAX_FORCE_TPU_INIT": "1"}
    with JaxJobs(tmp_path, url=server.url, namespace="jax-prewarm") as jobs:
        job = jobs.run(
            *("job", "prewarmed_by_hand"),
            environment="jax-newest",
            under="graphstash run",
            variables=variables,
        )
    assert job.report["components"] == first["components"]
    assert first["jax_key"] == f"jit_step-{job.report['whole']}"
    # A client that can only compile loads no artifact. Its own artifact has the same key.
    assert job.stats == {}
    assert server.stats("jax-prewarm")["artifacts"] == 1
    assert "persistent compilation cache" not in job.errors


@pytest.mark.parametrize(
    ("environment", "text"),
    [("jax-oldest", "pip install libtpu"), ("torch-newest", "pip install jax libtpu")],
)
def test_missing_package_is_named(options, environment, text):
    words, variables = options
    result = prewarm(*words, STEP, environment=environment, **variables)
    assert result.returncode == 2
    assert text in result.stderr


def test_unusable_argument_is_named(options, server, tmp_path):
    words, _ = options
    cases = {
        "step": "expected module:function or script.py:function",
        "no_such_module:step": "no module 'no_such_module' here",
        "no_such_script.py:step": "no_such_script.py: no such file",
        STEP.replace("abstract_step", "gone"): "has no function 'gone'",
        STEP.replace("abstract_step", "a_string"): "gave str; expected (jitted function",
        STEP.replace("abstract_step", "nothing"): "nothing was compiled for the topology",
    }
    commands = [["prewarm", *words, target] for target in cases]
    others = [
        (["--topology", "v5e:3x5", STEP], 2, "--topology v5e:3x5: INVALID_ARGUMENT"),
        (["--topology", "nonsense", STEP], 2, "does not match regex"),
        (["--topology", "v5e:2x2", "--platform", "abacus", STEP], 2, "not implemented for abacus"),
        (["--topology", "v5e:2x2", "--url", "http://127.0.0.1:9", STEP], 1, "Connection refused"),
    ]
    commands += [["prewarm", "--url", server.url, *more] for more, _, _ in others]
    with JaxJobs(tmp_path, url=server.url, namespace="jax-prewarm") as jobs:
        job = jobs.run(
            "a", "command_line", {"commands": commands}, under="python", environment="jax-newest"
        )
    results = job.report
    expected = [(2, text) for text in cases.values()] + [(code, text) for _, code, text in others]
    for (status, _, errors), (expected_status, text) in zip(results, expected, strict=True):
        assert text in errors
        assert status == expected_status


def test_the_command_line_imports_no_jax_otherwise():
    code = "from graphstash._cli.main import complete_app; complete_app()"
    code += "; import sys; print('jax' in sys.modules)"
    python = python_of("jax-newest")
    assert subprocess.check_output([python, "-c", code], text=True) == "False\n"
