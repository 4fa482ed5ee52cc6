"""Environment variables of a process that lead to another executable."""

import json
import mmap
import os
import subprocess
import sys

import pytest

from graphstash.hooks.environment import EnvironmentStates, environment_parts, omitted_flags
from graphstash.hooks.mappings import memory_mappings


def parts(**environ):
    return environment_parts(environ)


def test_order_of_flags_does_not_matter_except_for_repeated_flags():
    assert parts(XLA_FLAGS="--xla_a=1 --xla_b=2") == parts(XLA_FLAGS="--xla_b=2 --xla_a=1")
    assert parts(XLA_FLAGS="--xla_a=1 --xla_a=2") != parts(XLA_FLAGS="--xla_a=2 --xla_a=1")


def test_a_value_that_stands_beside_its_flag_stays_with_it():
    one = parts(NEURON_CC_FLAGS="--optlevel 1 --lnc 2")
    assert one != parts(NEURON_CC_FLAGS="--optlevel 2 --lnc 1")


def test_variables_that_identify_the_process_do_not_matter():
    assert parts(TPU_WORKER_ID="3", NEURON_PJRT_PROCESS_INDEX="3", HOME="/root") == {}
    assert parts(TPU_HOSTNAME_OVERRIDE="a", TPU_VISIBLE_DEVICE_PATHS="/dev/accel3") == {}
    assert parts(TPU_ML_PLATFORM="JAX", TPU_RUNTIME_PRIMARY_METRIC_PORT="8431") == {}
    assert parts(TPU_MEGACORE="megacore_dense") != {}


def test_flags_that_only_name_output_directories_change_no_part():
    assert parts(XLA_FLAGS="--xla_dump_to=/one", LIBTPU_INIT_ARGS="") == {}


def test_pipes_in_a_directory_that_a_flag_names_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path.parent / "file")

    def of_directory():
        return parts(XLA_FLAGS=f"--xla_gpu_pgle_profile_file_or_directory_path={tmp_path}")

    without = of_directory()
    (tmp_path.parent / "file").write_text("one")
    one = of_directory()
    (tmp_path.parent / "file").write_text("another")
    assert len({str(without), str(one), str(of_directory())}) == 3


def test_other_variables_differ_from_absent_ones_if_they_are_set_but_empty():
    assert parts(XLA_RNG_BIT_GENERATOR="") == {"env.XLA_RNG_BIT_GENERATOR": ""}


def observed(monkeypatch, *values, without=()):
    """Return the parts after a variable that torch_xla reads late has had these values."""
    states = EnvironmentStates(without=without)
    for value in values:
        monkeypatch.setenv("XLA_RNG_BIT_GENERATOR", value)
        states.observe()
    return states.parts()


def test_an_environment_that_never_changes_has_the_parts_of_its_variables(monkeypatch):
    once = observed(monkeypatch, "three_fry")
    assert once["env.XLA_RNG_BIT_GENERATOR"] == "three_fry"
    assert "environment_before" not in once
    assert observed(monkeypatch, "three_fry", "three_fry") == once


def test_every_earlier_state_is_a_part(monkeypatch):
    orders = [("philox",), ("three_fry", "philox"), ("default", "philox")]
    orders += [("three_fry", "default", "philox"), ("philox", "three_fry", "philox")]
    found = [observed(monkeypatch, *values) for values in orders]
    assert all(each["env.XLA_RNG_BIT_GENERATOR"] == "philox" for each in found)
    assert len({each.get("environment_before") for each in found}) == len(found)


def test_order_of_libtpus_flags_counts_if_one_is_repeated():
    def omitted(*flags):
        return omitted_flags({"LIBTPU_INIT_ARGS": " ".join(flags)})

    assert omitted("--a=1", "--a=2") != omitted("--a=2", "--a=1")
    assert omitted("--a=1", "--b=2") == omitted("--b=2", "--a=1") == {}


def test_parts_contain_files_that_flags_name_but_not_those_that_they_write(tmp_path):
    def parts(flag, content):
        (tmp_path / "file").write_text(content)
        return environment_parts({"LIBTPU_INIT_ARGS": f"--{flag}={tmp_path}/file"})

    assert parts("flagfile", "--a=1") != parts("flagfile", "--a=2")
    assert parts("results_to_dump", "1") == parts("results_to_dump", "2")


def test_a_variable_that_is_left_out_changes_no_state(monkeypatch):
    name = "env.XLA_RNG_BIT_GENERATOR"
    once = observed(monkeypatch, "philox", without={name})
    assert observed(monkeypatch, "philox", "default", without={name}) == once
    assert name not in once


def test_start_of_a_compiler_tells_states_apart_and_is_no_state_alone(monkeypatch):
    def observed(*values):
        states = EnvironmentStates()
        for has_started, value in values:
            monkeypatch.setenv("XLA_RNG_BIT_GENERATOR", value)
            states.observe(has_started=has_started)
        return states.parts()

    assert observed((False, "philox"), (True, "philox")) == observed((True, "philox"))
    before = observed((False, "default"), (True, "philox"))
    after = observed((False, "default"), (True, "default"), (True, "philox"))
    assert before != after


def test_mapped_file_may_have_any_name(tmp_path):
    path = tmp_path / "one\rtwo\u2028three \udcff"
    path.write_bytes(b"text")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert str(path) in {each.path for each in memory_mappings()}


READS_LIBRARIES = """
import ctypes, json, sys
from types import ModuleType

from graphstash.hooks import device_libraries

versions = ModuleType("jax_cuda12_plugin._versions")
versions.cudnn_get_version, versions.cudnn_build_version = lambda: 91300, lambda: 90100
versions.cublas_get_version = lambda: 1 / 0
sys.modules[versions.__name__] = versions
for path in sys.argv[1:]:
    ctypes.CDLL(path)
print(json.dumps({**device_libraries.gpu_parts(), "libtpu": device_libraries.libtpu()}))
"""


@pytest.fixture
def libraries(tmp_path):
    """Return a function that returns the parts of a process with libraries of these names."""

    def read(*names, version=12080):
        source = f"int cuDriverGetVersion(int *to) {{ *to = {version}; return 0; }}"
        paths = [tmp_path / name for name in names]
        for path in paths:
            command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", path]
            subprocess.run(command, input=source, text=True, check=True)
        command = [sys.executable, "-c", READS_LIBRARIES, *paths]
        return json.loads(subprocess.check_output(command))

    return read


def test_parts_for_gpus_hold_the_loaded_driver_and_libraries(libraries):
    parts = libraries("libcuda.so.570.86.10")
    assert parts["driver"] == "libcuda 12080"
    assert "cublas:none (ZeroDivisionError)" in parts["libraries"]
    assert "cudnn:91300" in parts["libraries"]
    assert "90100" not in parts["libraries"]
    assert libraries("libcuda.so.580.65.06", version=13000)["driver"] == "libcuda 13000"


def test_sample_of_the_loaded_libtpu_differs_between_builds(libraries):
    assert libraries()["libtpu"] == "none"
    assert (
        libraries("libtpu.so", version=1)["libtpu"] != libraries("libtpu.so", version=2)["libtpu"]
    )
