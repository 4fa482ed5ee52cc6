"""`graphstash run` adds little to a script that imports a compiler and compiles nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import graphstash
from support.tiers import most_extended

NOT_AT_START = {"httpx", "httpcore", "pydantic", "cryptography", "typer", "rich"}


HOOKS = {
    "torch": set(),
    "triton": {"triton"},
    "jax": {"jax", "pjrt"},
    "torch_xla": {"torch_xla", "triton", "pjrt"},
}


@pytest.mark.parametrize("compiler", most_extended(list(HOOKS), quick=["jax"]))
def test_script_that_compiles_nothing_imports_no_client_of_the_server(compiler, tmp_path):
    script = f"""
import sys, {compiler}
session = sys.modules.get("graphstash._process.session")
print(sorted(session._current.hooks_in_place) if session else [])
print(sorted({NOT_AT_START} & sys.modules.keys()))
"""
    variables = {"GRAPHSTASH_CACHE_DIR": str(tmp_path), "GRAPHSTASH_URL": "none"}
    done = graphstash("run", "--", sys.executable, "-c", script, check=True, **variables)
    assert done.stdout.splitlines() == [str(sorted(HOOKS[compiler])), "[]"]


LIBRARY = """
import torch
INSTALL
library = torch.library.Library("mine", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", torch.empty_like, "Meta")
from graphstash.hooks.inductor.recorded import kernels_by_library
print(kernels_by_library("mine::twice", "Meta")[0].function)
"""


@pytest.mark.parametrize("install", ["", "import graphstash; graphstash.install()"])
def test_kernels_that_packages_register_after_torch_are_recorded(install, tmp_path):
    program = LIBRARY.replace("INSTALL", install)
    variables = {"GRAPHSTASH_CACHE_DIR": str(tmp_path), "GRAPHSTASH_URL": "none"}
    run = [] if install else [Path(sys.executable).with_name("graphstash"), "run", "--"]
    command = [*run, sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, check=True)
    assert b"empty_like" in done.stdout
