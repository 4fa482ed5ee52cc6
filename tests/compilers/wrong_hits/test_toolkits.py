"""Programs for a GPU share a key only if XLA compiles them with the same toolkit.

XLA compiles for a GPU that need not exist: the environment has no libraries of CUDA. Triton's wheel
brings an assembler and a device library.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from compilers.wrong_hits.hosts import Host

TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100"
"""

PROGRAM = f"""
import os

import jax
import jax.numpy as jnp
from jax.experimental import topologies

jax.config.update("jax_platforms", "cpu")  # those of this host
FLAGS
devices = topologies.get_topology_desc(
    "", "cuda", topology="1x1x1", target_config='''{TARGET}'''
).devices
sharding = jax.sharding.SingleDeviceSharding(devices[0])
x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
jax.jit(lambda x: jnp.sin(x)).lower(x).compile(OPTIONS)
"""

CHANGES = {
    "the assembler that it runs": ("bin/ptxas", b"# another\n"),
    "the device library": ("nvvm/libdevice/libdevice.10.bc", b"\0" * 4),
}


@pytest.fixture
def toolkit(tmp_path):
    """Return a function that makes a toolkit in a directory of this name."""
    tools = Path(find_spec("triton").origin).parent / "backends" / "nvidia"

    def make(name):
        files = {
            "bin/ptxas": f'#!/bin/sh\nexec {tools}/bin/ptxas "$@"\n'.encode(),
            "nvvm/libdevice/libdevice.10.bc": (tools / "lib" / "libdevice.10.bc").read_bytes(),
        }
        for place, content in files.items():
            path = tmp_path / name / place
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
            path.chmod(0o755)
        return tmp_path / name

    return make


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    directory = tmp_path_factory.mktemp("jax") / "host"
    with Host("jax", directory, seed=1, environment="jax-cuda-ahead") as host:
        yield host


def key(host, folder, *, by):
    name = f"xla_gpu_cuda_data_dir={folder}"
    flags = f"os.environ['XLA_FLAGS'] += ' --{name}'" if by == "flag" else ""
    flags = f"os.environ['CUDA_HOME'] = '{folder}'" if by == "variable" else flags
    options = f"{dict([name.split('=')])}" if by == "option" else ""
    return host.ask(PROGRAM.replace("FLAGS", flags).replace("OPTIONS", options)).key


@pytest.mark.extended
@pytest.mark.parametrize(
    "variable", ["NVIDIA_TF32_OVERRIDE", "TF_ENABLE_WINOGRAD_NONFUSED", "MINE"]
)
def test_program_has_another_key_if_a_variable_that_xla_reads_differs(host, variable):
    setting = f"os.environ['{variable}'] = '0'"
    with_variable, without = (
        host.ask(PROGRAM.replace("FLAGS", flags).replace("OPTIONS", "")).key
        for flags in (setting, "")
    )
    assert (with_variable == without) == (variable == "MINE")


@pytest.mark.extended
@pytest.mark.parametrize("by", ["flag", "option", "variable"])
@pytest.mark.parametrize("changed", CHANGES)
def test_program_with_another_toolkit_has_another_key(host, toolkit, changed, by):
    one, same, other = (toolkit(name) for name in ("one", "same", "other"))
    place, added = CHANGES[changed]
    with (other / place).open("ab") as file:
        file.write(added)
    assert key(host, one, by=by) == key(host, same, by=by) != key(host, other, by=by)
