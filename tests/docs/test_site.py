"""The documentation's site: built strictly, and complete without the internet."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from snippets import ROOT

from support.processes import captured

pytestmark = pytest.mark.extended

# What a browser loads by itself; links that a reader follows may lead elsewhere.
_LOADED = re.compile(r'<(?:script|img|iframe)[^>]+src="?(?:https?:)?//|<link[^>]+href="?https?://')


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the site is built from."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.split(
        b"\0"
    ):
        path = Path(name.decode())
        if name and path.parts[0] != "tests" and (ROOT / path).exists():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def build(checkout):
    return captured(
        [sys.executable, "-m", "mkdocs", "build"],
        cwd=checkout,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )


def test_the_site_builds_and_its_pages_load_nothing_from_elsewhere(checkout):
    built = build(checkout)
    assert built.returncode == 0, built.stderr
    pages = list((checkout / "build" / "site").rglob("*.html"))
    assert len(pages) > 20
    assert [page.name for page in pages if _LOADED.search(page.read_text())] == []


def test_dead_links_fail_the_build_wherever_they_are(checkout):
    for name, link in {
        "README.md": "docs/no-such-page.md",
        "SECURITY.md": "docs/operators.md#no-such-heading",
        "docker/README.md": "../docs/trust.md#no-such-heading",
        "docs/operators.md": "../client/no-such-file.py",
    }.items():
        page = checkout / name
        page.write_text(f"{page.read_text()}\n\n[dead]({link})\n")
    built = build(checkout)
    assert built.returncode != 0
    for found in ("no-such-page.md", "#no-such-heading", "no-such-file.py"):
        assert found in built.stderr
    assert built.stderr.count("WARNING") == 4
