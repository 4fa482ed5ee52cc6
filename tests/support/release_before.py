"""The release before this one, from its commit: its sources, and an environment that runs them."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

from filelock import FileLock

__all__ = ["COMMIT", "python_of_release_before", "sources_of_release_before"]

COMMIT = "c27ac18d5862d74c5c481c1e784809fafeb7132c"
"""Of the release before. At the next release it becomes the commit of this one."""

_ROOT = Path(__file__).parents[2]
_SOURCES = _ROOT / "build" / f"release-{COMMIT[:12]}"
_ENVIRONMENT = _ROOT / ".venv-release-before"


def sources_of_release_before() -> Path:
    """Its working tree, without a `.git`; unpacked on first use."""
    _SOURCES.parent.mkdir(exist_ok=True)
    with FileLock(f"{_SOURCES}.lock"):
        if not (_SOURCES / ".complete").exists():
            packed = subprocess.run(
                ["git", "archive", COMMIT], cwd=_ROOT, check=False, capture_output=True
            )
            if packed.returncode:
                raise RuntimeError(
                    f"the release before this one, commit {COMMIT}, is not in the git history of "
                    f"{_ROOT}: {packed.stderr.decode().strip()}. Run `git fetch --unshallow` in a "
                    "shallow clone; a source archive has no history, so use a clone instead"
                )
            with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
                archive.extractall(_SOURCES, filter="data")
            (_SOURCES / ".complete").touch()
    return _SOURCES


def python_of_release_before() -> Path:
    """The Python of an environment with that release, its server and signatures included."""
    sources = sources_of_release_before()
    python = _ENVIRONMENT / "bin" / "python"
    done = _ENVIRONMENT / ".installed"
    with FileLock(Path(sys.prefix) / "release-before.lock"):
        if not done.exists() or done.read_text() != COMMIT:
            uv = [sys.executable, "-m", "uv", "--quiet"]
            subprocess.run([*uv, "venv", "--clear", str(_ENVIRONMENT)], check=True)
            install = [*uv, "pip", "install", "--python", str(python)]
            constraints = ["--constraint", str(sources / "constraints.txt")]
            wanted = f"{sources}[server,postgres,signing]"
            subprocess.run([*install, *constraints, wanted], check=True)
            done.write_text(COMMIT)
    return python
