"""What a newcomer installs: the wheel, the light client, the names that are public."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from graphstash_server.settings import Settings

ROOT = Path(__file__).parents[1]
# What the issue tracker calls the default install, and nothing of the server or of a compiler.
HEAVY = ("torch", "torch_xla", "jax", "triton", "fastapi", "starlette", "sqlalchemy", "uvicorn")


def run(*command, **options):
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True, **options
    ).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "uv", "build", "--wheel", "--quiet", "--out-dir", directory, ROOT)
    return next(directory.glob("*.whl"))


@pytest.fixture(scope="module")
def light(wheel, tmp_path_factory):
    """A new environment with nothing but the default install, from the wheel."""
    directory = tmp_path_factory.mktemp("light") / "venv"
    uv = (sys.executable, "-m", "uv")
    run(*uv, "venv", "--quiet", "--python", sys.executable, directory)
    python = directory / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(*uv, "pip", "install", "--quiet", "--python", python, "--constraint", constraints, wheel)
    return directory / "bin"


def test_the_wheel_holds_three_packages_and_the_migrations(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"graphstash", "graphstash_server", "graphstash_schema"}
    for needed in (
        "graphstash/_autoload/sitecustomize.py",
        "graphstash/py.typed",
        "graphstash_server/py.typed",
        "graphstash_schema/py.typed",
        "graphstash_server/_migrations/env.py",
    ):
        assert needed in names
    assert any(name.startswith("graphstash_server/_migrations/versions/2") for name in names)


def test_the_default_install_is_the_light_client(light):
    program = (
        "import sys, graphstash, graphstash.hooks, graphstash._cli\n"
        "graphstash.Stash, graphstash.install, graphstash.stats()\n"
        f"print(sorted(set({HEAVY}) & set(sys.modules)))\n"
        "from importlib.util import find_spec\n"
        f"print(sorted(name for name in {HEAVY} if find_spec(name)))\n"
    )
    assert run(light / "python", "-I", "-c", program).split() == ["[]", "[]"]


def test_importing_graphstash_imports_nothing_else():
    program = (
        "import sys, graphstash; print([n for n in sys.modules if n.startswith('graphstash')])"
    )
    assert run(sys.executable, "-I", "-c", program).strip() == "['graphstash']"


def test_every_public_name_exists_and_nothing_else_is_listed():
    program = (
        "import graphstash; print([n for n in graphstash.__all__ if not hasattr(graphstash, n)])"
    )
    assert run(sys.executable, "-I", "-c", program).strip() == "[]"


def test_the_light_client_runs_commands_and_says_what_serve_needs(light):
    assert run(light / "graphstash", "--version").startswith("graphstash ")
    assert run(light / "graphstash", "run", "--", "echo", "hello") == "hello\n"
    refused = subprocess.run(
        [light / "graphstash", "serve", "--port", "1"], check=False, capture_output=True, text=True
    )
    assert refused.returncode != 0
    assert "graphstash[server]" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_folders_are_no_packages():
    for folder in ("client", "service", "schema", "migrations", "docker", "tests"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_nothing_but_the_agreed_names_is_in_the_root():
    listed = run("git", "ls-files", cwd=ROOT).splitlines()
    assert {name.split("/")[0] for name in listed} <= {
        *("service", "client", "schema", "migrations", "docker", "tests", "pyproject.toml"),
        *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", ".gitignore"),
        *("SECURITY.md", "constraints.txt", ".ci", ".dockerignore"),
    }


def test_the_lock_names_no_index():
    locks = [ROOT / "constraints.txt", *(ROOT / "tests" / "environments").glob("*.txt")]
    assert len(locks) > 5
    for lock in locks:
        assert "://" not in lock.read_text()
        assert "--index" not in lock.read_text()
    assert "torch==2.7.0" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("group", ["jax_plugins", "torch.backends"])
@pytest.mark.parametrize("autoload", ["0", "1"])
def test_what_compilers_load_by_themselves_does_nothing_unless_it_is_told_to(group, autoload):
    program = (
        "import sys; from importlib.metadata import entry_points\n"
        f"(point,) = entry_points(group={group!r}, name='graphstash')\n"
        "loaded = point.load()\n"
        "getattr(loaded, 'initialize', loaded)()\n"
        "print(len(sys.meta_path))"
    )
    plain = int(run(sys.executable, "-I", "-c", "import sys; print(len(sys.meta_path))"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GRAPHSTASH_AUTOLOAD", autoload)
        finders = int(run(sys.executable, "-I", "-c", program))
    assert (finders > plain) == (autoload == "1")


def test_no_shell_variable_is_needed_to_import_what_is_installed():
    environment = {"PATH": os.environ["PATH"]}
    program = "import graphstash_server, graphstash, graphstash_schema"
    run(sys.executable, "-I", "-c", program, env=environment)


def test_the_readme_names_every_setting_of_the_server():
    text = (ROOT / "README.md").read_text()
    table = text[text.index("All settings of the server") : text.index("## The training loop")]

    for name in Settings.model_fields:
        variable = f"GRAPHSTASH_{name.upper()}"
        assert f"`{variable}`" in table or f"`_{name.upper()}`" in table, variable
