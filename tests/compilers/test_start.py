"""`graphstash run` adds little to a script that imports a compiler and compiles nothing."""

import sys

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
