"""Run one fuzz target as a program, coverage-guided by atheris (libFuzzer).

    make fuzz FUZZ_SECONDS=600
    python tests/fuzz/headers.py -runs=100000 -seed=1
    python tests/fuzz/headers.py build/fuzz/headers/crash-...      # replays one input
    python tests/fuzz/headers.py <directory> ...                   # stores its inputs there

A target is a function of bytes that raises if an invariant is violated. It states invariants of
every input, and does not only detect crashes. New inputs and failing inputs are stored in
build/fuzz/<target>/, or in the named directory.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import atheris

CORPUS = Path(__file__).parents[2] / "build" / "fuzz"

Data = atheris.FuzzedDataProvider


@contextmanager
def instrumented() -> Iterator[None]:
    """Instrument graphstash modules that are imported in this context, for libFuzzer."""
    with atheris.instrument_imports(
        include=["graphstash_schema", "graphstash_server", "graphstash"]
    ):
        yield


def main(check: Callable[[bytes], None], *, seeds: tuple[bytes, ...]) -> None:
    """Fuzz until the options end the run or an input fails. Print the failing input.

    Args:
        check: the target.
        seeds: initial inputs, one for each form that the target parses.
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
