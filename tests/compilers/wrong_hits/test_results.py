"""A program computes the same result with another program's artifacts as without a cache."""

import importlib

import pytest

from compilers.wrong_hits.hosts import Host
from compilers.wrong_hits.pairs import Relation
from compilers.wrong_hits.triton import WITH_ASSEMBLER
from support.tiers import most_extended

REPLACES_A_FILE = {
    "jax": """
import os
from pathlib import Path

Path("mine.ptx").write_text("one")
os.environ["XLA_FLAGS"] += " --xla_gpu_ptx_file=mine.ptx"
import jax
from jax._src import compiler

compile_program = compiler.backend_compile_and_load


def compile_and_replace(*arguments, **named):
    compiled = compile_program(*arguments, **named)
    Path("mine.ptx").write_text("CONTENT")
    return compiled


compiler.backend_compile_and_load = compile_and_replace
jax.jit(lambda x: jax.numpy.sort(x))(jax.numpy.ones(8))
""",
    "pjrt": """
from pathlib import Path

from graphstash.hooks.pjrt.call import OriginalCall

Path("mine.ptx").write_text("one")
import jax

compile_program = OriginalCall.__call__


def compile_and_replace(call):
    error = compile_program(call)
    Path("mine.ptx").write_text("CONTENT")
    return error


OriginalCall.__call__ = compile_and_replace
jax.jit(lambda x: x / 3, compiler_options={"xla_gpu_ptx_file": "mine.ptx"})(jax.numpy.ones(8))
""",
    "torch_xla": """
import os
from pathlib import Path

Path("mine.ptx").write_text("one")
os.environ["XLA_FLAGS"] = "--xla_gpu_ptx_file=mine.ptx"
import torch
import torch_xla
from graphstash.hooks.torch_xla.fingerprint import Fingerprints

describe = Fingerprints.request
described = []


def replace_and_describe(fingerprints, name):
    described.append(name)
    if described.count(name) == 2:  # torch_xla has compiled the graph
        Path("mine.ptx").write_text("CONTENT")
    return describe(fingerprints, name)


Fingerprints.request = replace_and_describe
print(torch.ones(4, device=torch_xla.device()).sin())
""",
}


@pytest.mark.extended
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "environment"), [("jax", "")])
def test_program_beside_artifacts_of_another_computes_the_same_bits(name, environment, tmp_path):
    wrong, served = [], 0
    with Host(name, tmp_path / "host", environment=environment) as host:
        for number, pair in enumerate(
            importlib.import_module(f"compilers.wrong_hits.{name}").PAIRS
        ):
            tier = tmp_path / f"{number}"
            host.run(pair.a, tier)
            ran = host.run(pair.b, tier)
            if ran.result != host.run(pair.b, None).result:
                wrong.append(pair.name)
            served += ran.hits > 0 and pair.relation is Relation.EQUAL
    assert wrong == []
    assert served > 0


@pytest.mark.parametrize(("change", "hits"), [("", 1), ('echo "# another" >> "$0"', 0)])
def test_kernel_is_not_published_if_its_assembler_changes_meanwhile(change, hits, tmp_path, jobs):
    program = WITH_ASSEMBLER.replace("CHANGE", change)
    with Host("triton", tmp_path / "host", zygote=jobs.zygote("triton")) as host:
        host.run(program, tmp_path / "tier")
        assert host.run(program, tmp_path / "tier").hits == hits


@pytest.mark.parametrize(
    "compiler", most_extended(["jax", "pjrt", "torch_xla"], quick=["jax", "pjrt"])
)
def test_program_is_not_published_if_a_file_in_its_key_changes_meanwhile(compiler, tmp_path, jobs):
    """XLA may have read the file before the change or after it."""
    text = REPLACES_A_FILE[compiler]
    replacing = {each: text.replace("CONTENT", each) for each in ("one", "two")}
    zygote = jobs.zygote("jax") if compiler == "jax" else None
    with Host(compiler, tmp_path / "host", zygote=zygote) as host:
        tiers = {content: tmp_path / content for content in replacing}
        for content, program in replacing.items():
            host.run(program, tiers[content])
        again = {each: host.run(replacing["one"], tiers[each]).hits for each in tiers}
    assert again["one"] > again["two"]
