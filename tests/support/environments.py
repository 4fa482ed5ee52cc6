"""Environments beside `.venv` for other versions of compilers: `.venv-<name>`, made on first use.

`tests/environments/<name>.in` states the purpose of an environment, and `<name>.txt` pins all its
versions (`make constraints` writes it). Each environment contains the client, as a user's own does.
"""

import hashlib
import subprocess
import sys
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path

from filelock import FileLock

_ROOT = Path(__file__).parents[2]


def python_of(name: str) -> Path:
    """Return the Python of an environment, after installing the environment if it is out of date.

    Without a name, return the Python that runs the tests.
    """
    if not name:
        return Path(sys.executable)
    requirements = _ROOT / "tests" / "environments" / f"{name}.txt"
    directory = _ROOT / f".venv-{name}"
    python = directory / "bin" / "python"
    done = directory / ".installed"
    digests = [
        hashlib.sha256(each.read_bytes()).hexdigest()
        for each in (requirements, _ROOT / "pyproject.toml")  # which declares the entry points
    ]
    with FileLock(Path(sys.prefix) / f"{name}.lock"):
        installed = done.read_text().split() if done.exists() else [""]
        if installed != digests:
            uv = [sys.executable, "-m", "uv", "--quiet"]
            install = [*uv, "pip", "install", "--python", str(python)]
            if installed[0] != digests[0]:
                subprocess.run([*uv, "venv", "--clear", str(directory)], check=True)
                subprocess.run([*install, "--requirement", str(requirements)], check=True)
                link_bytecode(directory)
            subprocess.run([*install, "--no-deps", "--editable", str(_ROOT)], check=True)
            done.write_text("\n".join(digests))
    return python


def packages_of(name: str) -> Path:
    return _packages_in(python_of(name).parents[1])


def link_bytecode(new: Path) -> None:
    """Link the bytecode of other environments into a new one, so that Python need not compile it.

    Compiling the modules of torch takes twenty seconds. uv links the files of a package into every
    environment, and bytecode is valid for a module that is the same file.
    """
    packages = _packages_in(new)
    known = []
    for environment in (Path(sys.prefix), *_ROOT.glob(".venv-*")):
        with suppress(ValueError):  # another process may be installing that environment
            known.append(_packages_in(environment))
    for module in packages.rglob("*.py"):
        name = module.relative_to(packages)
        for each in known:
            with suppress(OSError):  # the module or its bytecode is missing
                if each.joinpath(name).samefile(module):
                    linked = Path(cache_from_source(module))
                    linked.parent.mkdir(exist_ok=True)
                    linked.hardlink_to(cache_from_source(each / name))
                    break


def _packages_in(environment: Path) -> Path:
    (found,) = environment.glob("lib/python3*/site-packages")
    return found
