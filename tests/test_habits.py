"""What outsiders meet before a reviewer does: git's hooks, changelog fragments, issue forms."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
_SUPPRESSION = re.compile(r"# ?(?:noqa|type: ?ignore|pragma: no)\b.*")
_REASON = re.compile(
    r"# (?:noqa: [A-Z]+\d+(?:, [A-Z]+\d+)* - |pragma: no cover - |type: ignore\[[a-z, -]+\] # )"
    r".*\w.*"
)
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def accepts(message, directory):
    """Whether the hook takes a commit message."""
    file = directory / "COMMIT_EDITMSG"
    file.write_text(message)
    command = [sys.executable, "-m", "pre_commit", "run", "--hook-stage", "commit-msg"]
    done = subprocess.run(
        [*command, "--commit-msg-filename", file],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    return done.returncode == 0


@pytest.fixture(autouse=True)
def _no_hooks_of_the_developer(tmp_path, monkeypatch):
    monkeypatch.setenv("PRE_COMMIT_HOME", str(tmp_path / "pre-commit"))


@pytest.mark.parametrize(
    ("message", "is_accepted"),
    [
        ("x" * 72 + "\n\nA body. With periods.\n", True),
        ("x" * 73, False),
        ("Add a hook.\n\nA body\n", False),
    ],
    ids=["short", "long", "period"],
)
def test_a_subject_is_short_and_has_no_period(message, is_accepted, tmp_path):
    assert accepts(message, tmp_path) is is_accepted


def test_a_hook_downloads_nothing():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert {hook["language"] for hook in hooks} <= {"unsupported", "pygrep"}


def test_suppressed_checks_name_their_code_and_a_reason():
    """The reason follows a hyphen, and after mypy's codes a hash."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout.split("\0")
    files = [ROOT / name for name in listed if name and (ROOT / name).exists()]
    bare = [
        f"{file.relative_to(ROOT)}: {comment}"
        for file in files
        for comment in _SUPPRESSION.findall(file.read_text())
        if not _REASON.fullmatch(comment)
    ]
    assert bare == []


@pytest.mark.parametrize(
    ("name", "is_valid"),
    [("+words.fixed.md", True), ("words.md", False), ("+words.feature.md", False)],
)
def test_changelog_fragments_need_a_known_kind_in_their_name(name, is_valid, tmp_path):
    for file in ("pyproject.toml", "CHANGELOG.md", "changelog.d/README.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "changelog.d" / name).write_text("A sentence for users.\n")
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "next"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode == 0) is is_valid, done.stderr
    assert ("- A sentence for users." in done.stdout) is is_valid


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_the_forms_of_the_issue_tracker_are_whole(form):
    read = yaml.safe_load(form.read_text())
    assert read.keys() >= {"name", "description", "body"}
    for field in read["body"]:
        assert field["type"] in {"markdown", "textarea", "dropdown", "input", "checkboxes"}
        assert field["attributes"].get("value" if field["type"] == "markdown" else "label")
    asked = [field["id"] for field in read["body"] if field["type"] != "markdown"]
    assert len(asked) == len(set(asked))
