"""Each extra, alone in a new environment, installs and compiles once for two hosts."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.environments import link_bytecode, python_of

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
ENVIRONMENTS = ROOT / "tests" / "environments"

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

# A job without a compiler, whose result is still cached.
PLAIN = """
import {module}, graphstash
from graphstash_schema import ArtifactKey
key = ArtifactKey.parse("torch_xla", "cpu-test", "a" * 64)
assert graphstash.get_or_compile(key, lambda: b"graph") == b"graph"
"""

EIGHT_BIT = (
    PLAIN.format(module="torch")
    + """
from graphstash import training
weight = torch.nn.Parameter(torch.ones(64, 64))
optimizer = training.AdamW8bit([weight], lr=0.5, weight_decay=0.0)
weight.sum().backward()
optimizer.step()
assert (weight - 0.5).abs().max() < 1e-6
assert optimizer.state[weight]["exp_avg_codes"].dtype == torch.uint8
"""
)

JAX = """
import jax
print(jax.jit(lambda x: (x * 2).sum())(jax.numpy.arange(4.0)))
"""

TORCH = """
import torch
model = torch.compile(torch.nn.Linear(4, 4, bias=False))  # needs no C++ compiler
loss = model(torch.ones(2, 4)).sum()
loss.backward()  # torch stores the whole graph after that
print(loss.item())
"""

TORCH_XLA = """
import torch, torch_xla
x = torch.ones(3, device=torch_xla.device())
print((x * 2 + 1).sum().item())
"""

# For each extra: the pins, so that a machine loads each version once; the job; further packages.
CASES = {
    "server": ("", PLAIN.format(module="graphstash_server.__main__"), ()),
    "signing": ("", PLAIN.format(module="cryptography"), ()),
    "s3": ("", PLAIN.format(module="boto3"), ()),
    "gcs": ("", PLAIN.format(module="google.cloud.storage"), ()),
    "azure": ("", PLAIN.format(module="obstore"), ()),
    "postgres": ("", PLAIN.format(module="asyncpg"), ()),
    "tracing": ("", PLAIN.format(module="opentelemetry.sdk.trace"), ()),
    "tuning": ("", PLAIN.format(module="xgboost"), ()),
    "jax": ("jax-newest", JAX, ()),
    "torch": ("torch-newest", TORCH, ()),
    "torchao": ("", EIGHT_BIT, ()),
    "ray": ("ray", PLAIN.format(module="ray"), ()),
    "tvm": ("tvm", PLAIN.format(module="tvm"), ()),
    "torch-xla27": ("", TORCH_XLA, ()),
    "torch-xla": ("xla-newest", SUPPORT / "pjrt_torch_job.py", ("xla-cpu-pjrt==0.0.1",)),
}


def uv(*words):
    return subprocess.run(
        [sys.executable, "-m", "uv", *map(str, words)], check=True, capture_output=True, text=True
    ).stdout


def test_every_extra_has_a_case():
    assert CASES.keys() == EXTRAS.keys()


@pytest.mark.parametrize("extra", [each for each in EXTRAS if each.startswith("torch-xla")])
def test_extra_of_torch_xla_resolves_to_its_version_of_torch(extra, tmp_path):
    wanted = tmp_path / "wanted.in"
    wanted.write_text("\n".join(EXTRAS[extra]))
    chosen = uv("pip", "compile", "--quiet", "--no-header", "--no-annotate", wanted)
    versions = dict(re.findall(r"^(torch|torch-xla)==(\d+\.\d+)", chosen, re.MULTILINE))
    assert versions["torch"] == versions["torch-xla"]


@pytest.mark.extended
@pytest.mark.parametrize("extra", CASES)
def test_extra_alone_shares_compilations_between_hosts(extra, wheel, server, namespace, tmp_path):
    environment, job, more = CASES[extra]
    pins = ENVIRONMENTS / f"{environment}.txt" if environment else ROOT / "constraints.txt"
    python = tmp_path / "venv" / "bin" / "python"
    uv("venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    uv(
        *("pip", "install", "--quiet", "--python", python, "--constraint", pins),
        *(f"graphstash[{extra}] @ {wheel.as_uri()}", *more),
    )
    python_of(environment)  # other tests use this environment
    link_bytecode(tmp_path / "venv")
    words = ["-c", job] if isinstance(job, str) else [job, tmp_path / "report.json"]
    compiled = []
    for host in ("cold", "warm"):
        stats = tmp_path / f"{host}.json"
        done = subprocess.run(
            [
                *(python.with_name("graphstash"), "run", "--url", server.url),
                *("--namespace", namespace, "--stats-file", stats),
                *("--cache-dir", tmp_path / host, "--", python, *words),
            ],
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(tmp_path),
                "PJRT_DEVICE": "CPU",
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / host / "inductor"),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "TORCHINDUCTOR_VEC_ISA_OK": "1",  # as in zygotes
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        counts = [json.loads(line) for line in stats.read_text().splitlines()]
        assert not any(each["fallbacks"] for each in counts), done.stderr
        compiled.append(sum(each["misses"] for each in counts))
        hits = sum(each["hits_server"] + each["hits_prefetched"] for each in counts)
    assert compiled[0] > 0
    assert compiled[1] == 0
    assert hits > 0
