"""The doctor's findings about compilers, their hooks, and the start of the cache in a job."""

import sys

import pytest

from graphstash._cli.doctor.findings import State
from graphstash.hooks.registry import hook_specs
from support.doctor import diagnose, expect, line


@pytest.mark.parametrize(
    ("hook", "distributions", "state", "text"),
    [
        ("torch_xla", {"torch_xla": "2.7.1"}, State.OK, "torch_xla 2.7.1 (supported: 2.7)"),
        ("torch_xla", {"torch_xla": "2.9.0"}, State.WARN, "install torch_xla 2.7"),
        ("torch_xla", {"torch_xla": "2.9.0", "libtpu": "0.0.17"}, State.OK, "libtpu"),
        ("torch_xla", {"torch_xla": "2.6.0"}, State.WARN, "install torch_xla 2.7"),
        ("torch_xla", {"jax": "0.10.2"}, State.OK, "torch_xla is not installed"),
        ("pjrt", {"jax": "0.10.2", "libtpu": "0.0.17"}, State.OK, "will be installed into libtpu"),
        ("jax", {"jax": "0.99.1"}, State.WARN, "graphstash doctor --probe"),
        ("inductor", {"torch": "2.6.0"}, State.WARN, "install torch 2.7 to 2.15"),
        ("inductor", {"torch": "2.16.0+cpu"}, State.WARN, "graphstash doctor --probe"),
        ("inductor", {"torch": "2.15.3"}, State.OK, "2.7 to 2.15"),
        ("triton", {"triton": "2.9.1"}, State.WARN, "install triton"),
        ("triton", {"triton": "3.0.0"}, State.OK, "triton 3.0.0"),
        ("triton", {"triton": "3.9.2"}, State.OK, "triton 3.9.2"),
        ("triton", {"triton": "3.10.0"}, State.WARN, "or a newer graphstash"),
    ],
)
def test_compiler_version_is_compared_with_range_of_its_hook(
    installed, hook, distributions, state, text
):
    advice = "-m graphstash doctor"
    expect(diagnose(), "compilers", State.WARN, found=sys.executable, advice=advice)
    installed(**distributions)
    found = line(diagnose(), f"{hook} hook")
    assert found.state == state, found
    assert text in found.found + found.advice
    others = ",".join(hook_specs().keys() - {hook})
    found = line(diagnose(hooks=others), f"{hook} hook")
    assert found.state == State.OK
    assert state == State.OK or "GRAPHSTASH_HOOKS" in found.found


@pytest.mark.parametrize(
    ("value", "state"), [("1", State.WARN), ("true", State.WARN), ("0", State.OK), ("", State.OK)]
)
def test_method_of_installation_is_reported(installed, value, state):
    installed(jax="0.10.2")
    finding = expect(diagnose(autoload=value), "start", state)
    # graphstash, found by its metadata alone, registers no entry point with torch and JAX.
    assert (
        "graphstash run" in finding.found + finding.advice
        or "GRAPHSTASH_AUTOLOAD=1" in finding.advice
    )
