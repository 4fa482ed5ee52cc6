"""Packages register hooks. A broken hook is named in the log and does not disable other hooks."""

import sys
import textwrap
import tomllib
from pathlib import Path

import graphstash
import graphstash_schema
from graphstash import ClientConfig
from graphstash.hooks.registry import hook_specs
from graphstash_schema import ArtifactKind
from support.distributions import add_distribution
from support.processes import captured

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
LOAD = "from graphstash._entry_points import load\nload()\n"


def run(program, folder, *options, **variables):
    here = Path(folder)
    return captured(
        [sys.executable, *options, "-c", textwrap.dedent(program)],
        cwd=folder,
        env={
            "PYTHONPATH": str(here),
            "GRAPHSTASH_AUTOLOAD": "1",
            "GRAPHSTASH_URL": "none",
            "GRAPHSTASH_CACHE_DIR": str(here / "tier"),
            **variables,
        },
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


def test_registry_is_read_at_the_first_import_of_a_package_and_imports_nothing_heavy(tmp_path):
    """A package cannot replace a hook of graphstash by registering one under the same name."""
    add_distribution(tmp_path, "aaa", "jax = toy:SPEC", toy=SPEC.format(name="jax"), package="")
    heavy = {"torch", "torch_xla", "jax", "triton", "pydantic", "httpx", "importlib.metadata"}
    program = f"""
        import sys, json, email.message, sqlite3, graphstash
        print("graphstash.hooks.registry" in sys.modules)
        import package
        print("graphstash.hooks.registry" in sys.modules)
        from graphstash.hooks.registry import broken_hooks, hook_specs
        print(len(hook_specs()), hook_specs()["jax"].install, list(broken_hooks()))
        print(sorted({heavy!r} & set(sys.modules)))
    """
    ran = run(LOAD + textwrap.dedent(program), tmp_path)
    assert ran.stdout.splitlines() == [
        "False",
        "True",
        f"{len(hook_specs())} graphstash.hooks.jax.hook:install ['jax of toy:SPEC']",
        "[]",
    ], ran.stderr


def test_the_first_package_may_be_the_compiler_and_unwanted_broken_hooks_are_not_named(tmp_path):
    add_distribution(tmp_path, "bad", "bad = absent:SPEC")
    add_distribution(tmp_path, "toy", "toy = toy:SPEC", toy=SPEC.format(name="toy"), compiler="")
    ran = run(LOAD + "import compiler\nprint('goes on')", tmp_path, GRAPHSTASH_HOOKS="toy")
    assert (ran.stdout, ran.stderr) == ("installed toy\ngoes on\n", "")


def test_threads_that_import_at_once_all_get_their_hooks(tmp_path):
    """While one thread reads the registry, another thread's import of the compiler waits."""
    spec = textwrap.dedent(SPEC.format(name="toy"))
    add_distribution(
        tmp_path,
        "toy",
        "toy = toy:SPEC",
        toy="import sys; sys.modules['__main__'].meet()\n" + spec,
        compiler="print('executing')",
        first="",
    )
    ran = run(
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
    assert ran.stdout == "executing\ninstalled toy\n", ran.stderr


BROKEN = {
    "raises": ("raises = raises:SPEC", "raise RuntimeError('of a toy')", "of a toy"),
    "gone": ("gone = absent:SPEC", "", "No module named 'absent'"),
    "nameless": ("nameless = nameless", "", "nameless: "),
    "number": ("number = number:SPEC", "SPEC = 3", "not a HookSpec"),
    "misnamed": ("misnamed = misnamed:SPEC", SPEC.format(name="good"), "is named good"),
    "jax": ("jax = raises:SPEC", "", "jax of raises:SPEC"),
}
"""Entry point, its module, and the log line of the job, by name of the defect."""


def test_each_broken_hook_is_named_once_by_all_processes_and_others_are_installed(tmp_path):
    for name, (hook, text, _) in BROKEN.items():
        module = {} if name == "jax" else {name: text}
        add_distribution(tmp_path, f"of-{name}", hook, **module)
    add_distribution(tmp_path, "toy", "toy = toy:SPEC", toy=SPEC.format(name="toy"), compiler="")
    program = "import compiler, subprocess, sys\n"
    again = f"subprocess.run([sys.executable, '-c', {LOAD + program!r}])"
    ran = run(LOAD + program + again, tmp_path)
    assert ran.stdout == "installed toy\n" * 2, ran.stderr
    lines = ran.stderr.splitlines()
    assert len(lines) == len(BROKEN)
    for name, (_, _, reason) in BROKEN.items():
        (line,) = (each for each in lines if f"the hook {name} " in each)
        assert reason in line


def test_source_tree_without_metadata_reports_that_it_has_no_hooks(tmp_path):
    for package in (graphstash, graphstash_schema):
        folder = Path(package.__file__).parent
        (tmp_path / folder.name).symlink_to(folder)
    (tmp_path / "jax.py").touch()
    program = (
        LOAD
        + "import jax\nfrom graphstash.hooks.registry import hook_specs\nprint(dict(hook_specs()))"
    )
    ran = run(program, tmp_path, "-S")  # without site-packages
    assert ran.stdout == "{}\n", ran.stderr
    (line,) = ran.stderr.splitlines()
    assert "install it with pip" in line
