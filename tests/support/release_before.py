"""Sources of earlier commits, such as the previous release, and environments that run them."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

from filelock import FileLock

from support.environments import link_bytecode
from support.starts import fork_with

COMMIT = "c27ac18d5862d74c5c481c1e784809fafeb7132c"
"""Commit of the previous release. Each release updates it."""

# Modules of all releases.
_IMPORTED = (
    *("graphstash._cli", "graphstash_server.__main__", "graphstash_server.app", "aiosqlite"),
    *("alembic.command", "alembic.script", "uvicorn.lifespan.on", "uvloop", "pydantic_settings"),
)

_ROOT = Path(__file__).parents[2]


def sources_of_release_before() -> Path:
    return _sources_of(COMMIT)


def python_of_release_before() -> Path:
    """Return the Python of an environment with that release, its server and signatures included."""
    return python_of_commit(COMMIT, environment="release-before")


def _sources_of(commit: str) -> Path:
    """Return the working tree of a commit, without `.git`, unpacked on first use."""
    sources = _ROOT / "build" / f"release-{commit[:12]}"
    sources.parent.mkdir(exist_ok=True)
    with FileLock(f"{sources}.lock"):
        if not (sources / ".complete").exists():
            packed = subprocess.run(
                ["git", "archive", commit], cwd=_ROOT, check=False, capture_output=True
            )
            if packed.returncode:
                raise RuntimeError(
                    f"the earlier commit {commit} is not in the git history of "
                    f"{_ROOT}: {packed.stderr.decode().strip()}. Run `git fetch --unshallow` in a "
                    "shallow clone; a source archive has no history, so use a clone instead"
                )
            with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
                archive.extractall(sources, filter="data")
            (sources / ".complete").touch()
    return sources


def python_of_commit(commit: str, *, environment: str) -> Path:
    """Return the Python of an environment with a commit, its server and signatures included.

    Its commands are forked from now on, as those of this release; see `support.starts`.

    Args:
        environment: name of the environment, which is `.venv-<name>`.
    """
    sources = _sources_of(commit)
    directory = _ROOT / f".venv-{environment}"
    python, done = directory / "bin" / "python", directory / ".installed"
    with FileLock(Path(sys.prefix) / f"{environment}.lock"):
        if not done.exists() or done.read_text() != commit:
            uv = [sys.executable, "-m", "uv", "--quiet"]
            subprocess.run([*uv, "venv", "--clear", str(directory)], check=True)
            install = [*uv, "pip", "install", "--python", str(python)]
            constraints = ["--constraint", str(sources / "constraints.txt")]
            wanted = f"{sources}[server,postgres,signing]"
            subprocess.run([*install, *constraints, wanted], check=True)
            link_bytecode(directory)
            done.write_text(commit)
    fork_with(python, *_IMPORTED)
    return python
