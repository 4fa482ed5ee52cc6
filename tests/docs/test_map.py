"""CONTRIBUTING names, for every package, the tests that prove a change in it."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from snippets import ROOT

from support.processes import captured

_HEADING = "### Which tests prove a change\n"
_SOURCES = ("client", "docker", "docs", "migrations", "schema", "service")


def _section():
    return (ROOT / "CONTRIBUTING.md").read_text().partition(_HEADING)[2].partition("\n#")[0]


def _rows():
    """Package -> its tests."""
    cells = re.findall(r"^\| ([\w/]+) \| ([\w/. ]+) \|$", _section(), re.MULTILINE)
    return {package: tests.split() for package, tests in cells if "/" in tests}


def _files(pattern, *folders):
    listed = captured(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT,
        check=True,
    ).stdout.splitlines()
    return [Path(name) for name in listed if re.search(pattern, name) and (ROOT / name).exists()]


def test_every_package_has_tests():
    packages = {str(file.parent) for file in _files(r"/__init__\.py$", *_SOURCES)}
    assert packages - _rows().keys() == set()


@pytest.mark.parametrize("package", _rows())
def test_paths_named_by_the_map_exist(package):
    assert (ROOT / package).is_dir()
    absent = [each for each in _rows()[package] if not (ROOT / each).exists()]
    assert absent == []


def test_the_map_reaches_every_folder_of_tests():
    folders = {file.parent for file in _files(r"/test_\w+\.py$", "tests")} - {Path("tests")}
    named = [Path(each) for each in re.findall(r"\btests/[\w/.]+\w", _section())]
    reached = {path.parent if path.suffix else path for path in named}
    assert folders - reached == set()


def test_every_folder_of_tests_states_its_promise():
    folders = {file.parent for file in _files(r"/test_\w+\.py$", "tests")} - {Path("tests")}
    docstrings = {
        folder: ast.get_docstring(ast.parse((ROOT / folder / "conftest.py").read_text()))
        for folder in folders
    }
    assert {
        folder for folder, text in docstrings.items() if "Promise: " not in (text or "")
    } == set()


def test_contract_on_compilers_covers_all_modules_outside_hooks_training_and_targets():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (covered,) = (
        set(each["source_modules"])
        for each in contracts
        if each["name"] == "only hooks, the training loop and targets of tuning import compilers"
    )
    client = ROOT / "client" / "graphstash"
    importers = {client / name for name in ("hooks", "training", "tuning", "tuning/targets")}
    importers |= {path.parent for path in (client / "hooks").glob("*/__init__.py")}
    modules = {
        path
        for folder in (client, client / "hooks", client / "tuning")
        for path in folder.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    named = {
        ".".join(path.relative_to(client.parent).with_suffix("").parts)
        for path in modules - importers
        if path.name != "__init__.py"
    }
    assert named == covered
