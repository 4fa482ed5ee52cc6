"""Compile Triton kernels for an absent GPU.

`support.compiler_jobs.TritonJobs` puts a script before ptxas that counts its compilations.
"""

import hashlib
import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import httpx
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import cache

TARGET = GPUTarget("cuda", 90, 32)
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def scaled_add(x, y, out, n, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    scaled = tl.load(x + at, mask=mask) * SCALE
    tl.store(out + at, scaled + tl.load(y + at, mask=mask), mask=mask)
"""


class OwnManager(cache.FileCacheManager):  # type: ignore[misc] # Triton ships no types
    """A user's own cache manager."""


def assembled() -> int:
    """Return the number of compilations of ptxas on this host."""
    runs = Path(os.environ["ASSEMBLER_LOG"])
    return len(runs.read_text().splitlines()) if runs.exists() else 0


def _source(number: int, *, shift: bool = False) -> Any:
    # Hosts in one folder load the same file, because the cubin contains its name and Triton's key
    # does not.
    folder = Path(os.environ["TRITON_CACHE_DIR"]).parents[1]
    path = folder / ("shifted.py" if shift else "kernels.py")
    if not path.exists():
        path.write_text(("# a comment\n" if shift else "") + KERNEL)
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
    signature |= {"SCALE": "constexpr", "BLOCK": "constexpr"}
    constants = {"SCALE": number, "BLOCK": 256}
    return ASTSource(fn=module.scaled_add, signature=signature, constexprs=constants)


def _compiled(number: int, *, shift: bool = False) -> dict[str, Any]:
    made = triton.compile(_source(number, shift=shift), target=TARGET)
    return {
        "hash": made.hash,
        "cubin": hashlib.sha256(made.asm["cubin"]).hexdigest(),
        "ptx": hashlib.sha256(made.asm.get("ptx", "").encode()).hexdigest(),
        "stages": sorted(made.asm),
    }


def _seams() -> dict[str, Any]:
    """Return the functions and classes that Triton uses now."""
    names = (triton.compile, triton.compiler.compile, triton.compiler.compiler.compile)
    return {
        "manager": type(cache.get_cache_manager("cd" * 32)).__name__,
        "compile": sorted({Path(name.__code__.co_filename).parts[-2] for name in names}),
    }


def kernels(*, count: int = 1, shift: bool = False) -> dict[str, Any]:
    """Compile kernels that differ in a constant.

    Args:
        count: number of kernels. Default: 1.
        shift: whether the source begins one line later. Default: no.
    """
    return {
        "version": triton.__version__,
        "kernels": [_compiled(number + 2, shift=shift) for number in range(count)],
        "environment": os.environ.get("TRITON_CACHE_MANAGER"),
        "ptxas": assembled(),
        **_seams(),
    }


def with_a_fault_of_the_cache(*, count: int) -> dict[str, Any]:
    """Compile while every call of the cache raises."""
    from graphstash._compile.two_call import TwoCallCache

    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("a fault of the cache")

    for name in ("get", "put"):
        setattr(TwoCallCache, name, fail)
    return kernels(count=count)


def failing(*, go: str) -> dict[str, Any]:
    """Fail to compile a kernel, and compile another when the file `go` exists."""

    def fail(*_: object, **__: object) -> NoReturn:
        server, namespace = (os.environ[f"GRAPHSTASH_{name}"] for name in ("URL", "NAMESPACE"))
        held = httpx.get(f"{server}/v1/{namespace}/leases", timeout=60).json()["leases"]
        Path(f"{go}.compiling").write_text(str(len(held)))
        raise ValueError("this kernel cannot be compiled")

    try:
        with patch("tempfile.NamedTemporaryFile", fail):  # the input of the assembler
            triton.compile(_source(99), target=TARGET)
    except ValueError as error:
        kept = error  # with all its frames, as test runners keep it
    Path(f"{go}.failed").touch()
    while not Path(go).exists():
        time.sleep(0.02)
    return kernels() | {"error": str(kept)}


def uninstalled() -> dict[str, Any]:
    """Compile a kernel, uninstall graphstash, and compile another."""
    import graphstash

    before = kernels()
    graphstash.uninstall()
    seams = _seams()
    return before | {"uninstalled": seams, "ptxas": kernels(count=2)["ptxas"]}


class _CalledError(Exception):
    pass


def manager_calls() -> dict[str, Any]:
    """Call the cache manager directly, inside `triton.compile`.

    Outside it, the hook cannot tell which kernel Triton compiles, and shares nothing.
    """
    compiler = triton.compiler.compiler

    def call(_: object) -> NoReturn:
        compiler.get_cache_manager = original  # a program that replaces it shares nothing
        raise _CalledError(_found_and_alone())

    original, compiler.get_cache_manager = compiler.get_cache_manager, call
    try:
        triton.compile(_source(2), target=TARGET)
    except _CalledError as called:
        found, alone = called.args[0]
        return {"found": found, "alone": alone}
    finally:
        compiler.get_cache_manager = original
    raise AssertionError("triton.compile has asked for no cache manager")


def _found_and_alone() -> tuple[dict[str, Any], dict[str, bool]]:
    """Return the files that a manager finds, and whether it keeps files that are no kernel here."""
    description: dict[str, Any] = {
        "name": "k",
        "target": {"backend": "cuda", "arch": 90, "warp_size": 32},
    }
    whole: dict[str, Any] = {
        "k.ttir": "module {}",
        "k.cubin": b"\x7fELF",
        "k.json": json.dumps(description),
    }
    cpu = whole["k.json"].replace("cuda", "cpu")
    overridden = json.dumps({**description, "ir_override": "/tmp/k.ttir"})
    cases: dict[str, tuple[dict[str, Any], list[str] | None]] = {
        "whole": (whole, list(whole)),
        "missing": ({"k.cubin": b"\x7fELF", "k.json": whole["k.json"]}, list(whole)),
        "library": ({**whole, "k.so": b"\x7fELF"}, [*whole, "k.so"]),
        "no list": (whole, None),
        "cpu": ({**whole, "k.json": cpu}, list(whole)),
        "overridden": ({**whole, "k.json": overridden}, list(whole)),
    }
    found: dict[str, Any] = {}
    for number, (case, (files, listed)) in enumerate(cases.items()):
        manager = cache.get_cache_manager(f"{number:064x}")
        found[case] = manager.get_group("k.json")
        paths = {name: manager.put(content, name) for name, content in files.items()}
        if listed is not None:
            manager.put_group("k.json", {name: paths.get(name, "/nowhere") for name in listed})
    alone: dict[str, bool] = {}
    for name in ("launcher.so", "k.autotune.json"):
        manager = cache.get_cache_manager("ab" * 32)
        found[name] = manager.get_file(name)
        path = manager.put(b"content", name)
        again = cache.get_cache_manager("ab" * 32).get_file(name)
        alone[name] = path == again and Path(path).read_bytes() == b"content"
    return found, alone
