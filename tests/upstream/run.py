"""Run the compilers' own cache tests under the hooks. The hooks must not change any result.

    python tests/upstream/run.py [NAME ...] [--source FOLDER]

For each suite, download the file at its compiler's tag, apply the listed changes (devices), and run
it under `graphstash run` with its own server. Without internet access, `--source` names a folder
with the files as `<name>.py`. Print one line for each run, and exit with 1 if any run failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(_ROOT / "tests"))

from graphstash_server.testing import ServerProcess  # noqa: E402 - the line above puts tests on the path
from support.environments import python_of  # noqa: E402 - as above


@dataclass(frozen=True)
class Suite:
    """One file of tests.

    Attributes:
        url: address of the file.
        environment: environment of the compiler; see `tests/environments`.
        changes: pairs of a text and its replacement.
        runs: arguments of each run of the file; a test that counts misses needs an empty cache.
        variables: environment variables of its process.
        packages: packages that it needs beside the compiler.
    """

    url: str
    environment: str
    changes: tuple[tuple[str, str], ...] = ()
    runs: tuple[tuple[str, ...], ...] = ((),)
    variables: dict[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()


_JAX = "https://raw.githubusercontent.com/jax-ml/jax/jax-v{}/tests/compilation_cache_test.py"

SUITES = {
    "torch_xla-2.7": Suite(
        url="https://raw.githubusercontent.com/pytorch/xla/v2.7.0/test/test_persistent_cache.py",
        environment="",
        changes=(
            ("'NEURON'}", "'NEURON', 'CPU'}"),
            ("xr.device_type() == 'TPU'", "xr.device_type() in {'TPU', 'CPU'}"),
        ),
        runs=tuple(
            (f"PersistentCacheTest.test_{name}",)
            for name in (
                "persistent_cache_single_device",
                "persistent_cache_spmd_replicated",
                "persistent_cache_spmd_sharded",
                "replicated_spmd_hash",
            )
        ),
        variables={"PJRT_DEVICE": "CPU"},
        packages=("absl-py",),
    ),
    "jax-0.4.31": Suite(url=_JAX.format("0.4.31"), environment="jax-oldest", packages=("absl-py",)),
    "jax-0.10.2": Suite(url=_JAX.format("0.10.2"), environment="jax-newest", packages=("absl-py",)),
    "torch-2.7": Suite(
        url="https://raw.githubusercontent.com/pytorch/pytorch/v2.7.0/test/inductor/test_codecache.py",
        environment="",
        runs=(("-k", "remote"),),
        packages=("expecttest", "pytest"),
    ),
}


def main() -> None:
    """Run the named suites, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", choices=[[], *SUITES], metavar="NAME")
    parser.add_argument("--source", type=Path, help="folder with <name>.py of each")
    options = parser.parse_args()
    results = [run(name, options.source) for name in options.names or SUITES]
    sys.exit(not all(results))


def run(name: str, source: Path | None) -> bool:
    """Run one file. Return whether all of its runs passed."""
    suite = SUITES[name]
    with tempfile.TemporaryDirectory(prefix="upstream-") as made:
        directory = Path(made)
        text = _text(name, suite, source)
        for old, new in suite.changes:
            if old not in text:
                raise SystemExit(f"{name}: {old!r} is not in {suite.url}")
            text = text.replace(old, new)
        file, packages = directory / "suite.py", directory / "packages"
        file.write_text(text)
        python = python_of(suite.environment)
        subprocess.run(
            [
                *(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"),
                *("--python", str(python), "--target", str(packages), *suite.packages),
            ],
            check=True,
        )
        passed = True
        for number, words in enumerate(suite.runs):
            with ServerProcess(directory / f"data-{number}") as server:
                done = subprocess.run(
                    [
                        *(str(python), "-m", "graphstash", "run", "--url", server.url),
                        *("--cache-dir", str(directory / f"tier-{number}"), "--"),
                        *(str(python), str(file), *words),
                    ],
                    env=os.environ | suite.variables | {"PYTHONPATH": str(packages)},
                    cwd=directory,
                    check=False,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            verdict = "failed" if done.returncode else "passed"
            print(f"{name} {' '.join(words)}: {verdict}")
            print(done.stdout if done.returncode else _end_of(done.stdout))
            passed = passed and not done.returncode
    return passed


def _text(name: str, suite: Suite, source: Path | None) -> str:
    if source is not None:
        return (source / f"{name}.py").read_text()
    with urllib.request.urlopen(suite.url, timeout=60) as answer:
        return str(answer.read().decode())


def _end_of(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-4:])


if __name__ == "__main__":
    main()
