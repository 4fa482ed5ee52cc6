"""Archives of kernels: unpacking returns exactly the packed files, or fails."""

import base64
import json
import os
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstash.errors import CacheError, Reason
from graphstash.hooks.triton.fingerprint import libraries_of, request_of
from graphstash.hooks.triton.hook import install
from graphstash.hooks.triton.kernel import (
    MAX_FILES,
    ArchiveError,
    KernelError,
    group_file,
    pack,
    pack_kernel,
    unpack,
    unpack_kernel,
)
from graphstash.hooks.triton.kernels import Kernels

KEY = base64.b32encode(bytes(range(32))).decode().rstrip("=")
ASSEMBLY = SimpleNamespace()  # a source without a function
TARGET = {"backend": "cuda", "arch": 90, "warp_size": 32}
DESCRIPTION = {"name": "k", "target": TARGET, "hash": bytes(range(32)).hex()}

names = st.text(
    st.characters(exclude_characters="/\\\x7f", min_codepoint=0x20, exclude_categories=["Cs"]),
    min_size=1,
    max_size=60,
).filter(lambda name: name not in {".", ".."})
archives = st.dictionaries(names, st.binary(max_size=200), min_size=1, max_size=8)


def kernel(**description):
    """Return the files of a kernel. Keywords replace fields of its description."""
    return {
        "k.ttir": b"module {}",
        "k.ptx": b".version 8.4",
        "k.cubin": b"\x7fELF\xff",
        "k.json": json.dumps(DESCRIPTION | description).encode(),
    }


def structure_of(packed):
    """Return the offsets of an archive that hold no file contents."""
    places = list(range(len(b"graphstash-triton\1") + 4))
    at = len(places)
    while at < len(packed):
        name_bytes = int.from_bytes(packed[at : at + 2])
        content_bytes = int.from_bytes(packed[at + 2 : at + 10])
        places += range(at, at + 10 + name_bytes)
        at += 10 + name_bytes + content_bytes
    return places


@given(archives)
def test_packed_files_round_trip(files):
    packed = pack(files)
    assert unpack(packed) == files
    assert pack(dict(reversed(files.items()))) == packed


@given(archives, st.data())
def test_a_cut_archive_is_refused(files, data):
    packed = pack(files)
    length = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ArchiveError):
        unpack(packed[:length])
    with pytest.raises(ArchiveError):
        unpack(packed + packed[length:])


@pytest.mark.parametrize("names", [(b"b", b"a"), (b"a", b"a")], ids=["unsorted", "twice"])
def test_archive_with_names_out_of_order_is_refused(names):
    files = b"".join(struct.pack(">HQ", 1, 0) + name for name in names)
    with pytest.raises(ArchiveError, match="behind"):
        unpack(b"graphstash-triton\1" + struct.pack(">I", 2) + files)


@given(st.binary(max_size=300))
def test_equal_files_make_equal_archives(noise):
    for candidate in (noise, b"graphstash-triton\1" + noise):
        try:
            files = unpack(candidate)
        except ArchiveError:
            continue
        assert pack(files) == candidate


@given(st.data())
def test_every_flipped_bit_of_kernel_structure_is_detected(data):
    packed = pack_kernel("k.json", kernel(), key=KEY)
    damaged = bytearray(packed)
    damaged[data.draw(st.sampled_from(structure_of(packed)))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(KernelError):
        unpack_kernel("k.json", bytes(damaged), key=KEY)


@pytest.mark.parametrize("key", [KEY, DESCRIPTION["hash"]], ids=["base32", "up to 3.1"])
def test_kernel_round_trips(key):
    assert unpack_kernel("k.json", pack_kernel("k.json", kernel(), key=key), key=key) == kernel()


UNSAFE = ["", ".", "..", "a/b", "/a", "../a", "a\\b", "a\0", "a\n", "a" * 256, "\udc80"]


@pytest.mark.parametrize(
    "names", [[], [str(n) for n in range(MAX_FILES + 1)], *([name] for name in UNSAFE)]
)
def test_too_many_files_and_names_with_a_path_are_refused(names):
    with pytest.raises(ArchiveError):
        pack(dict.fromkeys(names, b""))


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"k.so": b"\x7fELF"}, "code of the host"),
        ({"cuda_utils.so": b"\x7fELF"}, "not a file of"),
        ({"k.cpython-311-x86_64-linux-gnu.so": b"\x7fELF"}, "not a file of"),
        ({"k.cubin": b""}, "missing"),
        ({"k.ptx": b"\xff"}, "not text"),
        ({"k.json": b"{"}, "not JSON"),
        ({"k.json": b"[" * 100_000}, "not JSON"),
        ({"k.json": b"[]"}, "names no kernel"),
        ({"k.json": b'{"name": "k"}'}, "names no target"),
        (kernel(target={**TARGET, "backend": "cpu"}), "not shared"),
        (kernel(target={**TARGET, "backend": "hip"}), "'k.hsaco' is missing"),
        (kernel(ir_override="/home/me/k.ttir"), "file of the user"),
        (kernel(hash="00" * 32), "another kernel"),
        (kernel(hash="?"), "another kernel"),
    ],
)
def test_forbidden_files_are_neither_packed_nor_unpacked(files, text):
    children = kernel() | files
    with pytest.raises(KernelError, match=text):
        pack_kernel("k.json", children, key=KEY)
    packed = pack({**children, "__grp__k.json": group_file(children)})
    with pytest.raises(KernelError, match=text):
        unpack_kernel("k.json", packed, key=KEY)


def test_a_kernel_has_a_description_of_its_own_name():
    with pytest.raises(KernelError, match="missing"):
        pack_kernel("k.json", {"k.cubin": b"\x7fELF"}, key=KEY)
    with pytest.raises(KernelError, match="not a file of"):
        pack_kernel("other.json", kernel(), key=KEY)
    with pytest.raises(KernelError, match="'k' is missing"):
        pack_kernel("k", kernel(), key=KEY)


def test_paths_do_not_change_the_key_and_compiler_options_do():
    def key(**environ):
        return request_of(KEY, "k.json", environ, ASSEMBLY).key

    plain = key()
    assert plain.device_type == "gpu"
    assert key(TRITON_CACHE_DIR="/a", TRITON_PTXAS_PATH="/b", TRITON_HOME="/c", HOME="/d") == plain
    others = [
        key(TRITON_HIP_USE_BLOCK_PINGPONG="1"),
        key(TRITON_ENABLE_ASAN="1"),
        key(AMDGCN_USE_BUFFER_OPS="1"),
        key(TRITON_STORE_BINARY_ONLY="1"),
        request_of(KEY, "other.json", {}, ASSEMBLY).key,
        request_of(KEY[::-1], "k.json", {}, ASSEMBLY).key,
    ]
    assert len({plain, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRITON_KERNEL_OVERRIDE", "1"),
        ("TRITON_SWAP_MIR", "/home/me"),
        ("TRITON_PLUGIN_PATHS", "/home/me/plugin.so"),
        ("LLVM_PASS_PLUGIN_PATH", "/home/me/plugin.so"),
    ],
)
def test_kernel_with_code_of_the_user_in_it_is_not_shared(name, value):
    with pytest.raises(CacheError, match=name) as caught:
        request_of(KEY, "k.json", {name: value}, ASSEMBLY)
    assert caught.value.reason is Reason.UNSHAREABLE
    adds_no_code = {"TRITON_KERNEL_OVERRIDE": "0", "TRITON_KERNEL_DUMP": "1"}
    assert request_of(KEY, "k.json", adds_no_code, ASSEMBLY).key


def test_a_forked_child_without_a_session_does_not_use_its_parents(monkeypatch):
    monkeypatch.setattr(Kernels, "of_this_process", Kernels(None))
    monkeypatch.setattr(Kernels, "may_start", False)
    assert Kernels.kernel(KEY) is not None
    monkeypatch.setattr("os.getpid", lambda: 0)
    assert Kernels.kernel(KEY) is None


@pytest.mark.parametrize("version", ["2.3.1", "3.10.0", "4.0.0"])
def test_hook_logs_once_and_is_not_installed_on_other_versions(monkeypatch, caplog, version):
    monkeypatch.setattr("triton.__version__", version)
    assert install(None) is None
    assert len(caplog.messages) == 1
    assert f"supports triton 3.0 to 3.9, not {version}" in caplog.messages[0]


def test_key_of_kernel_holds_contents_of_libraries(tmp_path):
    library = tmp_path / "ocml.bc"
    options = SimpleNamespace(extern_libs=(("ocml", str(library)),))
    found = set()
    for content in (b"one", b"other"):
        library.write_bytes(content)
        os.utime(library, (1, 1))  # as `cp --preserve` does
        found.add(libraries_of(options))
    library.unlink()
    found.add(libraries_of(options))
    assert len(found) == 3
    assert libraries_of(None) == ""
