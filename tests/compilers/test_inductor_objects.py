"""C++ objects in this process, by real compilations of a tenth of a second."""

import ctypes
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphstash.errors import CacheError
from support.deferred import Deferred
from support.fault_proxy import Fault, FaultProxy
from support.server import Server

codecache = Deferred("torch._inductor.codecache")
cpp_builder = Deferred("torch._inductor.cpp_builder")
exc = Deferred("torch._inductor.exc")
fingerprint = Deferred("graphstash.hooks.inductor.fingerprint")
objects = Deferred("graphstash.hooks.inductor.objects")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def commands(monkeypatch):
    """Record the commands for `builder`, without torch's own probes of the processor."""
    run = cpp_builder.run_compile_cmd
    commands = []

    def record(command, *args, **kwargs):
        if "/ab/" in command:
            commands.append(command)
        return run(command, *args, **kwargs)

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", record)
    return commands


def builder(source, *, name="kernel", cflags=("shared", "fPIC", "O1"), **options):
    """Return a builder of a file in torch's own directory, which differs between hosts."""
    path = Path(codecache.cache_dir()) / "ab" / f"{name}.cpp"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return cpp_builder.CppBuilder(
        name=name,
        sources=str(path),
        BuildOption=cpp_builder.BuildOptionsBase(compiler="g++", cflags=list(cflags), **options),
        output_dir=str(path.parent),
    )


def answer(built):
    return ctypes.CDLL(built.get_target_file_path()).answer()


def build(source, **options):
    built = builder(source, **options)
    assert built.build() is None
    return built


SOURCE = 'extern "C" int answer() { return 42; }\n'
HEADER = "#pragma once\n#define ANSWER 42\n"


def including(content):
    """Return source code that includes a header from torch's own directory, as Inductor's does."""
    path = Path(codecache.cache_dir()) / "cd" / "header.h"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return f'#include "{path}"\nextern "C" int answer() {{ return ANSWER; }}\n'


def test_object_is_built_once_and_content_of_files_changes_key_and_path_does_not(host, commands):
    with host("a") as a:
        assert answer(build(including(HEADER), name="here")) == 42
        assert a.stats.published == 1
        assert next(iter(a.cache.used)).device_type.platform == "cpu"
    with host("b") as b:
        assert answer(build(including(HEADER), name="there")) == 42
        assert (b.stats.hits_server, b.stats.misses) == (1, 0)
        assert answer(build(SOURCE.replace("42", "43"), name="other")) == 43
        assert answer(build(SOURCE, name="flags", cflags=("shared", "fPIC", "O2"))) == 42
        assert b.stats.misses == 2
    assert len(commands) == 3


def test_a_host_with_the_default_directory_shares_with_one_that_sets_it(
    host, commands, monkeypatch, tmp_path
):
    with host("a"):
        assert answer(build(including(HEADER))) == 42
    with host("b") as b:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
        assert Path(codecache.cache_dir()).parent == tmp_path / "shared"
        assert answer(build(including(HEADER))) == 42
        assert b.stats.hits_server == 1
    assert len(commands) == 1


def test_parts_name_compiler_and_processor_and_no_directory_but_one_in_the_object(host):
    with host("a"):
        built = builder(SOURCE)
        parts = objects.object_parts(built.get_command_line(), Path(built.get_target_file_path()))
        assert codecache.cache_dir() not in parts["command"]
        searched = builder(
            SOURCE, ldflags=[f"Wl,-rpath,{codecache.cache_dir()}"]
        ).get_command_line()
        command = objects.object_parts(searched, Path(built.get_target_file_path()))["command"]
        assert f"-rpath,{codecache.cache_dir()}" in command
    assert "gcc" in parts["compiler"]
    assert parts["cpu_features"]
    assert parts["libc"].startswith("glibc")


@pytest.fixture
def compiler_part(monkeypatch):
    """Return a function that returns the key's part for the compiler in CXX."""

    def part(compiler):
        monkeypatch.setattr(fingerprint, "get_cpp_compiler", lambda: str(compiler))
        return fingerprint.host_parts()["compiler"]

    return part


@pytest.mark.parametrize(
    "options", ["-O1  -Dname=1\t-x c++ ", "-Dtext='a  b' -O1", '-Dtext=\\"a\\" -O1', '-D"x=1"']
)
def test_command_is_split_as_a_shell_splits_it(tmp_path, options):
    parts = objects.object_parts(f"g++ {options}", tmp_path / "kernel.so")
    assert parts["command"] == " ".join(["g++", *shlex.split(options)])


def test_spelling_of_compiler_does_not_change_key(compiler_part):
    assert compiler_part("g++") == compiler_part(shutil.which("g++"))


@pytest.mark.parametrize(
    ("argument", "more"), [("-ffast-math", "-O1"), ("$MORE", "-ffast-math")], ids=["text", "MORE"]
)
def test_command_that_a_wrapper_runs_changes_key(
    compiler_part, monkeypatch, tmp_path, argument, more
):
    wrapper = tmp_path / "g++"

    def part(argument, more):
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} {argument} "$@"\n')
        wrapper.chmod(0o755)
        os.utime(wrapper, (1, 1))  # as `cp --preserve` does
        monkeypatch.setenv("MORE", more)
        return compiler_part(wrapper)

    before = part("$MORE", "-O1")
    assert part(argument, more) != before


def test_key_of_graph_on_gpu_holds_no_part_of_cpu(monkeypatch):
    graph = "pt2:fx-graph-v1::fabc_gpu:c1"
    before = fingerprint.entry_parts(graph, variant=0)
    assert not {"cpu_model", "cpu_features", "compiler", "threads", "vec_isa"} & before.keys()
    monkeypatch.setattr(fingerprint, "get_cpp_compiler", lambda: "/absent")
    assert fingerprint.entry_parts(graph, variant=0) == before


@pytest.mark.parametrize("name", ["CPATH", "SOURCE_DATE_EPOCH", "LD_RUN_PATH"])
def test_variable_that_compiler_reads_changes_key(monkeypatch, tmp_path, name):
    monkeypatch.delenv(name, raising=False)
    before = objects.object_parts("g++ -O1", tmp_path / "kernel.so")
    monkeypatch.setenv(name, "1")
    assert objects.object_parts("g++ -O1", tmp_path / "kernel.so") != before


def test_failed_build_is_reported_and_leaves_no_lease(host, tmp_path):
    with Server(tmp_path / "server") as quiet, host("a", url=quiet.url) as a:
        with pytest.raises(exc.CppCompileError):
            build("no C++")
        (lease,) = a.cache._leases
        lease.join(20)
        assert quiet.leases_held() == 0


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.TRUNCATE, Fault.GARBAGE])
def test_a_damaged_object_is_built_here(host, server, commands, fault):
    with host("a") as a:
        build(SOURCE)
        assert a.stats.published == 1
    with FaultProxy(server.port) as proxy:
        proxy.fault = fault
        with host("b", url=proxy.url) as b:
            assert answer(build(SOURCE)) == 42
            assert b.stats.hits_server == 0
    assert len(commands) == 2


def test_ahead_of_time_export_is_not_cached(host):
    with host("a") as a:
        build(SOURCE, aot_mode=True)
        assert a.stats.misses == 0


def test_a_header_is_prepared_when_the_first_object_is_built(host, tmp_path, commands):
    header = tmp_path / "prepared.h"
    prepared = []

    def prepare(name):
        header.write_text("#define ANSWER 42\n")
        prepared.append(name)
        return str(header)

    def with_header():
        built = builder(SOURCE.replace("42", "ANSWER"))
        built._build_option.precompiled_header = objects.defer_precompilation(prepare)("header.h")
        return built

    with host("a") as a:
        built = with_header()
        assert built._build_option.precompiled_header == ""
        assert isinstance(built._build_option.precompiled_header, objects.LateHeader)
        built.build()
        assert prepared == ["header.h"]
        assert answer(built) == 42
        assert a.stats.published == 1
    with host("b"):
        fetched = with_header()
        fetched.build()
        assert answer(fetched) == 42
    assert prepared == ["header.h"]
    assert len(commands) == 1


@pytest.fixture
def on_gpu(monkeypatch):
    """Return a function that returns the key's parts of a graph for GPUs, as on a host with GPUs of
    these kinds.
    """
    torch, functions = fingerprint.torch, ("_fixed_accelerator_parts", "_triton_target")

    def forget():
        for name in functions:
            getattr(fingerprint, name).cache_clear()

    def parts(*kinds):
        module = SimpleNamespace(
            get_device_properties=kinds.__getitem__, device_count=kinds.__len__
        )
        monkeypatch.setattr(fingerprint, "accelerator_type", lambda: "cuda")
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        forget()
        return fingerprint.entry_parts("pt2:fx-graph-v1::fabc_gpu:c1", variant=0)

    yield parts
    forget()


def kind(**properties):
    named = {"name": "NVIDIA H100", "major": 9, "minor": 0, "multi_processor_count": 132}
    return SimpleNamespace(**named | properties)


def test_key_of_graph_on_gpu_holds_every_kind_of_device(on_gpu):
    whole = on_gpu(kind())
    assert on_gpu(kind(), kind()) == whole
    assert on_gpu(kind(multi_processor_count=66)) != whole
    assert on_gpu(kind(), kind(name="NVIDIA A100")) != whole


@pytest.mark.parametrize(
    ("name", "is_in_key"),
    [
        *((name, True) for name in ("TRITON_DEFAULT_FP_FUSION", "TRITON_F32_DEFAULT")),
        *((name, False) for name in ("TRITON_CACHE_DIR", "TRITON_PRINT_AUTOTUNING")),
    ],
)
def test_key_of_graph_on_gpu_holds_what_changes_kernels_of_triton(
    on_gpu, monkeypatch, name, is_in_key
):
    monkeypatch.delenv(name, raising=False)
    before = on_gpu(kind())
    monkeypatch.setenv(name, "0")
    assert (on_gpu(kind()) != before) is is_in_key


def test_key_of_graph_on_gpu_holds_digests_of_the_assembler_and_the_library(
    on_gpu, monkeypatch, tmp_path
):
    parts = on_gpu(kind())
    assert re.fullmatch(r"\d+ [0-9a-f]{64}", parts["triton_ptxas"])
    assert re.fullmatch(r"libdevice=[0-9a-f]{64}", parts["triton_libraries"])
    library = tmp_path / "libdevice.bc"
    library.write_bytes(b"of the user")
    monkeypatch.setenv("TRITON_LIBDEVICE_PATH", str(library))
    assert on_gpu(kind())["triton_libraries"] != parts["triton_libraries"]


def test_graph_on_gpu_whose_kernels_the_user_replaces_is_not_shared(on_gpu, monkeypatch):
    monkeypatch.setenv("TRITON_KERNEL_OVERRIDE", "1")
    with pytest.raises(CacheError, match="TRITON_KERNEL_OVERRIDE is set"):
        on_gpu(kind())
