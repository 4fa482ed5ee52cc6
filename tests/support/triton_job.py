"""A job that compiles Triton kernels for a GPU that this host does not have.

Knows nothing of graphstash unless told to take it out. Its host is the folder of its report: there
lie Triton's cache and the count of ptxas runs. Writes what happened as JSON.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import stat
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--kernels", type=int, default=1, help="how many to compile")
parser.add_argument("--shift", action="store_true", help="the source begins one line later")
parser.add_argument("--kill", action="store_true", help="die while ptxas runs for the first one")
parser.add_argument("--fail", type=Path, help="fail to compile, then wait until this file is there")
parser.add_argument("--raise", dest="raising", action="store_true", help="the cache's calls raise")
parser.add_argument("--by-hand", action="store_true", help="call the cache manager as Triton does")
parser.add_argument("--uninstall", action="store_true", help="take graphstash out")
parser.add_argument("--fork", action="store_true", help="compile in a forked child")
options = parser.parse_args()

host = options.report.parent
runs = host / "ptxas-runs"
sys.path.insert(0, str(Path(__file__).parent))  # where a user's own cache manager may lie

KERNEL = """
import os

import triton
import triton.language as tl

TYPE = getattr(tl, os.environ.get("KERNEL_TYPE", "float32"))


@triton.jit
def scaled_add(x, y, out, n, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    scaled = (tl.load(x + at, mask=mask) * SCALE).to(TYPE)
    tl.store(out + at, scaled + tl.load(y + at, mask=mask), mask=mask)
"""


def wrap_ptxas():
    """Puts a script before every ptxas of Triton's wheel which counts what it compiles."""
    package = Path(str(importlib.util.find_spec("triton").origin)).parent
    # The same text on every host: the assembler's bytes are in the key.
    count = 'echo run >> "$COUNT_OF_RUNS"; if [ "$DIES" ]; then kill -9 $PPID; exit 1; fi'
    os.environ |= {"COUNT_OF_RUNS": str(runs), "DIES": "1" if options.kill else ""}
    for name in ("ptxas", "ptxas-blackwell"):
        real = package / "backends" / "nvidia" / "bin" / name
        wrapper = host / name
        wrapper.write_text(
            f'#!/bin/sh\ncase "$*" in *--version*) ;; *) {count};; esac\nexec {real} "$@"\n'
        )
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
        if real.exists():
            os.environ[f"TRITON_{name.upper().replace('-', '_')}_PATH"] = str(wrapper)


def load_kernel():
    # The same file for hosts in one folder: its name is in the cubin, though not in Triton's key.
    path = host.parent / ("shifted.py" if options.shift else "kernels.py")
    if not path.exists():
        path.write_text(("# a comment\n" if options.shift else "") + KERNEL)
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.scaled_add


wrap_ptxas()
os.environ["TRITON_CACHE_DIR"] = str(host / "triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import cache

TARGET = GPUTarget("cuda", 90, 32)
scaled_add = load_kernel()


class Failing(ASTSource):
    """Fails where errors in a kernel's source show."""

    def make_ir(self, *_):
        options.fail.with_suffix(".compiling").write_text(str(leases_held()))
        raise ValueError("this kernel cannot be compiled")


def leases_held():
    import httpx

    return httpx.get(f"{os.environ['GRAPHSTASH_URL']}/v1/stats", timeout=10).json()["leases_held"]


def source(number, kind=ASTSource):
    signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
    signature |= {"SCALE": "constexpr", "BLOCK": "constexpr"}
    return kind(fn=scaled_add, signature=signature, constexprs={"SCALE": number, "BLOCK": 256})


def compile_kernels():
    made = []
    for number in range(options.kernels):
        kernel = triton.compile(source(number + 2), target=TARGET)
        made.append(
            {
                "hash": kernel.hash,
                "cubin": hashlib.sha256(kernel.asm["cubin"]).hexdigest(),
                "ptx": hashlib.sha256(kernel.asm.get("ptx", "").encode()).hexdigest(),
                "stages": sorted(kernel.asm),
            }
        )
    return made


def call_manager():
    """What a manager does with files that are no whole kernel that may be shared."""
    description = {
        "name": "k",
        "target": {"backend": "cuda", "arch": 90, "warp_size": 32},
    }
    whole = {"k.ttir": "module {}", "k.cubin": b"\x7fELF", "k.json": json.dumps(description)}
    cases = {
        "whole": (whole, list(whole)),
        "missing": ({"k.cubin": b"\x7fELF", "k.json": whole["k.json"]}, list(whole)),
        "library": ({**whole, "k.so": b"\x7fELF"}, [*whole, "k.so"]),
        "no list": (whole, None),
        "cpu": ({**whole, "k.json": whole["k.json"].replace("cuda", "cpu")}, list(whole)),
        "overridden": (
            {**whole, "k.json": json.dumps({**description, "ir_override": "/tmp/k.ttir"})},
            list(whole),
        ),
    }
    found = {}
    for number, (case, (files, listed)) in enumerate(cases.items()):
        manager = cache.get_cache_manager(f"{number:064x}")
        found[case] = manager.get_group("k.json")
        paths = {name: manager.put(content, name) for name, content in files.items()}
        if listed is not None:
            manager.put_group("k.json", {name: paths.get(name, "/nowhere") for name in listed})
    alone = {}
    for name in ("launcher.so", "k.autotune.json"):
        found[name] = cache.get_cache_manager("ab" * 32).get_file(name)
        path = cache.get_cache_manager("ab" * 32).put(b"content", name)
        again = cache.get_cache_manager("ab" * 32).get_file(name)
        alone[name] = path == again and Path(path).read_bytes() == b"content"
    return {"found": found, "alone": alone}


def call_manager_while_compiling():
    """Calls the manager from within `triton.compile`, where the hook knows the kernel's source."""

    class Called(Exception):
        pass

    def look_up(_):
        raise Called(call_manager())

    original = triton.compiler.compiler.get_cache_manager
    triton.compiler.compiler.get_cache_manager = look_up
    try:
        triton.compile(source(2), target=TARGET)
    except Called as called:
        return called.args[0]
    finally:
        triton.compiler.compiler.get_cache_manager = original


def seams():
    """What Triton uses now."""
    names = (triton.compile, triton.compiler.compile, triton.compiler.compiler.compile)
    return {
        "manager": type(cache.get_cache_manager("cd" * 32)).__name__,
        "compile": sorted({Path(name.__code__.co_filename).parts[-2] for name in names}),
    }


def main():
    report = {"version": triton.__version__}
    if options.raising:
        from graphstash._compile.two_call import TwoCallCache

        def fail(*_, **__):
            raise RuntimeError("a fault of the cache")

        TwoCallCache.get = TwoCallCache.put = fail
    if options.fail:
        try:
            triton.compile(source(99, Failing), target=TARGET)
        except ValueError as error:
            report["error"] = error  # kept, with all its frames, as test runners do
        options.fail.with_suffix(".failed").touch()
        while not options.fail.exists():
            time.sleep(0.02)
        report["error"] = str(report["error"])
    started = time.perf_counter()
    if options.by_hand:
        report["by_hand"] = call_manager_while_compiling()
    else:
        report["kernels"] = compile_kernels()
    report["seconds"] = time.perf_counter() - started
    report |= seams()
    report["environment"] = os.environ.get("TRITON_CACHE_MANAGER")
    if options.uninstall:
        import graphstash

        graphstash.uninstall()
        report["uninstalled"] = seams()
        options.kernels += 1
        report["kernels"] = compile_kernels()
    report["ptxas"] = len(runs.read_text().splitlines()) if runs.exists() else 0
    options.report.write_text(json.dumps(report))


if options.fork:
    import multiprocessing

    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    child.join()
    sys.exit(abs(child.exitcode or 0))
main()
