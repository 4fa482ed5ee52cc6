"""Contents of sdist and wheel, the light client, the installed server, the public names."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest

from graphstash_server.testing import ServerProcess
from support.environments import link_bytecode

ROOT = Path(__file__).parents[2]
# Packages that the default install must not include.
HEAVY = ("torch", "torch_xla", "jax", "triton", "fastapi", "starlette", "sqlalchemy", "uvicorn")


def run(*command, **options):
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True, **options
    ).stdout


def install(requirement, directory):
    """Create an environment with one package and its dependencies. Return its `bin` folder."""
    uv = (sys.executable, "-m", "uv")
    run(*uv, "venv", "--quiet", "--python", sys.executable, directory)
    commands = directory / "bin"
    run(
        *(*uv, "pip", "install", "--quiet", "--python", commands / "python"),
        *("--constraint", ROOT / "constraints.txt", requirement),
    )
    link_bytecode(directory)
    return commands


@pytest.fixture(scope="module")
def light(wheel, tmp_path_factory):
    """The default install."""
    return install(wheel, tmp_path_factory.mktemp("light") / "venv")


def test_sdist_holds_only_tracked_files_and_all_files_of_the_tests(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    assert names <= set(listed.splitlines())
    needed = {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", ".ci/packages"}
    assert needed | {"migrations/env.py", "tests/conftest.py", "docker/Dockerfile"} <= names
    if (ROOT / "docs").exists():
        assert "mkdocs.yml" in names
        assert any(name.startswith("docs/") for name in names)


@pytest.mark.extended
def test_installed_server_creates_its_database_and_answers(wheel, tmp_path):
    commands = install(f"graphstash[server] @ {wheel.as_uri()}", tmp_path / "venv")
    assert "serve" in run(commands / "graphstash", "--help")

    with ServerProcess(
        tmp_path / "data", command=(str(commands / "graphstash"), "serve")
    ) as server:
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        assert httpx.get(f"{server.url}/v1/stats").json()["namespaces"] == []


def test_wheel_holds_three_packages_and_the_migrations(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"graphstash", "graphstash_server", "graphstash_schema"}
    for needed in (
        "graphstash/_process/autoload/sitecustomize.py",
        "graphstash/py.typed",
        "graphstash_server/py.typed",
        "graphstash_schema/py.typed",
        "graphstash_server/_migrations/env.py",
    ):
        assert needed in names
    assert any(name.startswith("graphstash_server/_migrations/versions/2") for name in names)


@pytest.mark.extended
def test_default_install_is_the_light_client(light):
    program = (
        "import sys, graphstash, graphstash.hooks, graphstash.testing, graphstash._cli.main\n"
        "graphstash._cli.main.complete_app()\n"
        "graphstash.Stash, graphstash.install, graphstash.stats()\n"
        f"print(sorted(set({HEAVY}) & set(sys.modules)))\n"
        "from importlib.util import find_spec\n"
        f"print(sorted(name for name in {HEAVY} if find_spec(name)))\n"
    )
    assert run(light / "python", "-I", "-c", program).split() == ["[]", "[]"]


NOT_AT_START = {"httpx", "httpcore", "pydantic", "cryptography", "zstandard", "typer", "rich"}
LOADED = f"import sys; print(sorted({NOT_AT_START} & set(sys.modules)), file=sys.stderr)"


@pytest.mark.parametrize(
    "command",
    [
        ("-c", f"import graphstash; assert graphstash.install(url='none'); {LOADED}"),
        ("-c", f"import graphstash; assert graphstash.install(url='http://a:1'); {LOADED}"),
        ("-m", "graphstash", "run", "--", sys.executable, "-c", LOADED),
    ],
    ids=["install without a server", "install", "run"],
)
def test_job_that_compiles_nothing_imports_no_dependency(command, tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"
    assert list(tmp_path.iterdir()) == []  # nor does it create a local tier


def test_packages_import_lazily():
    """Names of the wire format need no pydantic. `import graphstash` imports no other module."""
    program = (
        "import sys, graphstash\n"
        "print([n for n in sys.modules if n.startswith('graphstash')])\n"
        "import graphstash_schema as schema\n"
        "from graphstash_schema import own_files, protocol\n"
        "schema.Namespace('team'); schema.ErrorCode.NOT_FOUND; schema.Digest.of(b'')\n"
        "schema.ArtifactKey.parse('jax', 'cpu', 'a' * 64); print('pydantic' in sys.modules)\n"
        "schema.ArtifactMetadata; print('pydantic' in sys.modules)\n"
    )
    printed = run(sys.executable, "-I", "-c", program).split()
    assert printed == ["['graphstash']", "False", "True"]


@pytest.mark.extended
def test_light_client_runs_commands_and_names_extra_for_serve(light):
    assert run(light / "graphstash", "--version").startswith("graphstash ")
    assert run(light / "graphstash", "run", "--", "echo", "hello") == "hello\n"
    refused = subprocess.run(
        [light / "graphstash", "serve", "--port", "1"], check=False, capture_output=True, text=True
    )
    assert refused.returncode != 0
    assert "graphstash[server] @ git+" in refused.stderr  # an index may have another
    assert "Traceback" not in refused.stderr


def test_root_holds_only_the_agreed_names():
    listed = run("git", "ls-files", cwd=ROOT).splitlines()
    assert {name.split("/")[0] for name in listed} <= {
        *("service", "client", "schema", "migrations", "docker", "tests", "pyproject.toml"),
        *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "changelog.d", "LICENSE", "Makefile"),
        *(".gitignore", "SECURITY.md", "constraints.txt", ".ci", ".dockerignore", "docs"),
        *("mkdocs.yml", ".github", ".pre-commit-config.yaml"),
    }


def test_lock_files_name_no_index():
    locks = [ROOT / "constraints.txt", *(ROOT / "tests" / "environments").glob("*.txt")]
    assert len(locks) > 5
    for lock in locks:
        assert "://" not in lock.read_text()
        assert "--index" not in lock.read_text()
    assert "torch==2.7.0" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("group", ["jax_plugins", "torch.backends"])
@pytest.mark.parametrize("autoload", ["0", "1"])
def test_entry_points_do_nothing_without_autoload(group, autoload, monkeypatch):
    program = (
        "import sys; from importlib.metadata import entry_points\n"
        f"(point,) = entry_points(group={group!r}, name='graphstash')\n"
        "before = len(sys.meta_path)\n"
        "loaded = point.load()\n"
        "getattr(loaded, 'initialize', loaded)()\n"
        "print(len(sys.meta_path) > before)"
    )
    monkeypatch.setenv("GRAPHSTASH_AUTOLOAD", autoload)
    assert run(sys.executable, "-I", "-c", program).strip() == str(autoload == "1")
