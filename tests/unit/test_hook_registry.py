"""Packages register hooks; a hook that cannot be used is named, and harms nothing else."""

import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import graphstash
import graphstash_schema
from graphstash import ClientConfig
from graphstash.hooks.registry import hook_specs
from graphstash_schema import ArtifactKind
from support.distributions import add_distribution

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

SPEC = """
from graphstash.hooks import HookSpec
SPEC = HookSpec(
    name={name!r}, compiler="", tested_with="", modules=("compiler",), install="toy:install",
    kinds=("plugin",), distributions=("compiler",),
)
def install(cache):
    print("installed", {name!r})
"""
PRINT = "from graphstash.hooks.registry import hook_specs\nprint({}(hook_specs()))"
LOAD = "from graphstash._entry_points import load\nload()\n"


def run(program, folder, *options, **variables):
    here = Path(folder)
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(program)],
        cwd=folder,
        env={
            "PYTHONPATH": str(here),
            "GRAPHSTASH_AUTOLOAD": "1",
            "GRAPHSTASH_URL": "none",
            "GRAPHSTASH_CACHE_DIR": str(here / "tier"),
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_every_hook_of_this_package_is_described_in_full():
    assert hook_specs().keys() == PROJECT["entry-points"]["graphstash.hooks"].keys()
    for spec in hook_specs().values():
        assert set(spec.kinds) <= set(ArtifactKind)
        assert (
            spec.requirement.removeprefix("graphstash[").removesuffix("]")
            in (PROJECT["optional-dependencies"])
        )
        assert set(spec.settings) <= ClientConfig.rules().keys()
        assert spec.modules
        assert spec.distributions
        if spec.tested is not None:
            assert spec.tested.distribution in spec.distributions


def test_reading_the_registry_imports_no_compiler_and_nothing_heavy(tmp_path):
    heavy = {"torch", "torch_xla", "jax", "triton", "pydantic", "httpx", "importlib.metadata"}
    told = run(
        f"""
        import sys
        from graphstash.hooks.registry import broken_hooks, hook_specs
        print(len(hook_specs()), dict(broken_hooks()), sorted({heavy!r} & set(sys.modules)))
        """,
        tmp_path,
    )
    assert told.stdout == f"{len(hook_specs())} {{}} []\n", told.stderr


def test_a_process_reads_the_registry_only_when_it_imports_a_package(tmp_path):
    (tmp_path / "package.py").write_text(
        "import sys; print('graphstash.hooks.registry' in sys.modules)"
    )
    told = run(
        LOAD
        + "import sys, json, email.message, sqlite3, graphstash\n"
        + "print('graphstash.hooks.registry' in sys.modules)\nimport package",
        tmp_path,
    )
    assert told.stdout == "False\nTrue\n", told.stderr


def test_the_first_package_may_be_the_compiler(tmp_path):
    add_distribution(tmp_path, "toy", "toy = toy:SPEC", toy=SPEC.format(name="toy"), compiler="")
    told = run(LOAD + "import compiler\nprint('goes on')", tmp_path)
    assert told.stdout == "installed toy\ngoes on\n", told.stderr
    assert not told.stderr


def test_threads_that_import_at_once_all_get_their_hooks(tmp_path):
    """While one thread reads the registry, the compiler's import in another thread waits."""
    spec = textwrap.dedent(SPEC.format(name="toy"))
    add_distribution(
        tmp_path,
        "toy",
        "toy = toy:SPEC",
        toy="import sys; sys.modules['__main__'].meet()\n" + spec,
        compiler="print('executing')",
        first="",
    )
    told = run(
        LOAD
        + """
import sys, threading
is_read = threading.Event()
def meet():
    is_read.set()
    while not any(
        "importlib" in frame.f_code.co_filename
        for number, frame in sys._current_frames().items() if number == thread.ident
    ):
        threading.Event().wait(0.001)
def other():
    is_read.wait()
    import compiler
thread = threading.Thread(target=other)
thread.start()
import first
thread.join()
""",
        tmp_path,
    )
    assert told.stdout == "executing\ninstalled toy\n", told.stderr


BROKEN = {
    "module that raises": ("bad = bad:SPEC", "raise RuntimeError('of a toy')", "of a toy"),
    "absent module": ("bad = absent:SPEC", "", "No module named 'absent'"),
    "absent name": ("bad = bad", "", "bad: "),
    "another object": ("bad = bad:SPEC", "SPEC = 3", "not a HookSpec"),
    "spec of another name": ("bad = bad:SPEC", SPEC.format(name="good"), "is named good"),
    "name of another package": (
        "bad = bad:A\n[graphstash.hooks]\njax = bad:SPEC",
        "raise RuntimeError('of a toy')",
        "jax of bad:SPEC",
    ),
}


@pytest.mark.parametrize(("hooks", "text", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_hook_is_named_and_the_others_are_registered(tmp_path, hooks, text, reason):
    add_distribution(tmp_path, "bad", hooks, bad=text)
    add_distribution(tmp_path, "toy", "toy = toy:SPEC", toy=SPEC.format(name="toy"), package="")
    program = (
        "import package\nfrom graphstash.hooks.registry import hook_specs\nprint(len(hook_specs()))"
    )
    told = run(LOAD + program, tmp_path)
    assert told.stdout == f"{len(hook_specs()) + 1}\n", told.stderr
    lines = [line for line in told.stderr.splitlines() if "cannot be used" in line]
    assert len(lines) == told.stderr.count("graphstash:") == hooks.count("=")
    assert reason in told.stderr


def test_a_job_with_several_processes_is_warned_of_a_broken_hook_once(tmp_path):
    add_distribution(tmp_path, "bad", "bad = absent:SPEC")
    add_distribution(tmp_path, "toy", "toy = toy:SPEC", toy=SPEC.format(name="toy"), compiler="")
    program = "import compiler, subprocess, sys\n"
    again = f"subprocess.run([sys.executable, '-c', {LOAD + program!r}])"
    told = run(LOAD + program + again, tmp_path)
    assert told.stdout == "installed toy\n" * 2, told.stderr
    assert told.stderr.count("graphstash:") == 1


def test_a_broken_hook_that_the_job_does_not_want_is_not_named(tmp_path):
    add_distribution(tmp_path, "bad", "bad = absent:SPEC")
    (tmp_path / "package.py").touch()
    assert not run(LOAD + "import package", tmp_path, GRAPHSTASH_HOOKS="jax").stderr
    assert "the hook bad cannot be used" in run(LOAD + "import package", tmp_path).stderr


def test_sources_without_metadata_have_no_hooks_and_say_so(tmp_path):
    for package in (graphstash, graphstash_schema):
        folder = Path(package.__file__).parent
        (tmp_path / folder.name).symlink_to(folder)
    (tmp_path / "jax.py").touch()
    program = (
        LOAD
        + "import jax\nfrom graphstash.hooks.registry import hook_specs\nprint(dict(hook_specs()))"
    )
    told = run(program, tmp_path, "-S")  # without the installed packages
    assert told.stdout == "{}\n", told.stderr
    (line,) = told.stderr.splitlines()
    assert "install it with pip" in line


def test_hooks_have_an_order_that_does_not_depend_on_the_path(tmp_path):
    """A hook of graphstash is never replaced by another package's of the same name."""
    add_distribution(tmp_path, "aaa", "jax = toy:SPEC", toy=SPEC.format(name="jax"))
    program = PRINT.format("(lambda specs: specs['jax'].install)")
    told = run(program, tmp_path)
    assert told.stdout == "graphstash.hooks.jax.hook:install\n"
    assert os.fspath(tmp_path) not in told.stderr
