"""Runs one fuzz target as a program: coverage-guided, by atheris (libFuzzer).

    make fuzz FUZZ_SECONDS=600
    python tests/fuzz/headers.py -runs=100000 -seed=1
    python tests/fuzz/headers.py build/fuzz/headers/crash-...      # plays one input again
    python tests/fuzz/headers.py <directory> ...                   # keeps its inputs there

A target is a function of bytes that raises when something does not hold. It states what must be
true of every input, not only that nothing crashes. What it found worth keeping, and what failed,
lies in build/fuzz/<target>/, or in the directory that is named.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import atheris

__all__ = ["Data", "instrumented", "main"]

CORPUS = Path(__file__).parents[2] / "build" / "fuzz"

Data = atheris.FuzzedDataProvider


@contextmanager
def instrumented() -> Iterator[None]:
    """Our own modules that are imported inside tell which of their lines an input reaches."""
    with atheris.instrument_imports(
        include=["graphstash_schema", "graphstash_server", "graphstash"]
    ):
        yield


def main(check: Callable[[bytes], None], *, seeds: tuple[bytes, ...]) -> None:
    """Fuzzes until the options say stop, or an input fails; then it is printed.

    Args:
        check: the target.
        seeds: inputs to begin with, of the forms that the target reads.
    """
    name = Path(sys.argv[0]).stem
    options = [option for option in sys.argv[1:] if option.startswith("-")]
    named = [Path(option) for option in sys.argv[1:] if not option.startswith("-")]
    inputs = named[0] if named else CORPUS / name
    if not inputs.is_file():
        inputs.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds):
            (inputs / f"seed-{number}").write_bytes(seed)
        options.append(f"-artifact_prefix={inputs}/")

    def guarded(data: bytes) -> None:
        try:
            check(data)
        except Exception:
            traceback.print_exc()
            print(f"the input that fails {name}: {data!r}", file=sys.stderr, flush=True)
            raise

    atheris.Setup([sys.argv[0], str(inputs), *options], guarded)
    atheris.Fuzz()
