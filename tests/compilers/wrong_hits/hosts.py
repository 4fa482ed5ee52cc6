"""Hosts that run programs of pairs: processes that have imported a compiler once."""

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from compilers.wrong_hits.pairs import Pair, Relation
from support.environments import python_of
from support.starts import Popen, Zygote

__all__ = ["Asked", "Host", "PairOfHosts", "Ran", "environment_of_host"]

_TESTS = Path(__file__).parents[2]
_RUNNER = Path(__file__).with_name("runner.py")


@dataclass(frozen=True)
class Asked:
    """The first look-up of a program.

    Attributes:
        key: key of the look-up, with all its parts; empty if there was none.
        unshared: reason why the program is not shared; empty if it is shared.
    """

    key: str
    unshared: str = ""


@dataclass(frozen=True)
class Ran:
    """The result of a program.

    Attributes:
        result: digest of the value of its last line, or of the kind of error that it raised.
        hits: number of artifacts that the program used.
    """

    result: str
    hits: int


class Host:
    """A warm process; a context manager.

    Args:
        compiler: name of the module with its pairs.
        directory: directory of the programs and their files.
        seed: seed of Python's hashes.
        environment: environment of the compiler's version; empty for the tests' own.
        zygote: process that has imported the compiler, with a random seed of hashes, and forks the
            host. Default: the host starts a Python.
    """

    def __init__(
        self,
        compiler: str,
        directory: Path,
        *,
        seed: int = 1,
        environment: str = "",
        zygote: Zygote | None = None,
    ) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._count = 0
        self._asked: dict[str, dict[str, str]] = {}
        self._process = Popen(
            [str(python_of(environment)), str(_RUNNER), compiler],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=directory,
            env=environment_of_host(directory, seed),
            zygote=zygote,
        )

    def ask(self, program: str) -> Asked:
        """Run a program until it would compile, and return its look-up.

        A host runs each program only once, because pairs share programs.

        Raises:
            AssertionError: the program failed, or made no look-up.
        """
        if program not in self._asked:
            self._asked[program] = self._answer({"directory": self._place(program)})
        answer = self._asked[program]
        assert "key" in answer, f"{answer.get('failed')}\n{program}"
        return Asked(**answer)

    def ask_in_one_process(self, programs: Iterable[str]) -> None:
        """Run programs in turn in one process; `ask` returns their answers."""
        places = {program: self._place(program) for program in programs}
        answer = self._answer({"directories": list(places.values())})
        assert "answers" in answer, answer
        self._asked |= dict(zip(places, answer["answers"], strict=True))

    def run(self, program: str, tier: Path | None) -> Ran:
        """Run a program to its end, with the artifacts in a directory or without a cache."""
        answer = self._answer({"directory": self._place(program), "tier": str(tier or "")})
        assert "result" in answer, f"{answer.get('failed')}\n{program}"
        return Ran(answer["result"], int(answer["hits"]))

    def _place(self, program: str) -> str:
        """Write a program into a directory of its own, and return the directory."""
        self._count += 1
        place = self._directory / f"{self._count}"
        place.mkdir()
        (place / "program.py").write_text(program)
        return str(place)

    def _answer(self, request: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


class PairOfHosts:
    """Two hosts that differ in paths, in the user's directories and in the seed of hashes.

    With `zygote`, it forks the first host.
    """

    def __init__(
        self,
        compiler: str,
        directory: Path,
        *,
        environment: str = "",
        zygote: Zygote | None = None,
    ) -> None:
        self.one = Host(compiler, directory / "one", environment=environment, zygote=zygote)
        self.other = Host(
            compiler, directory / "elsewhere" / "other", seed=2, environment=environment
        )

    def ask_in_one_process(self, pairs: Iterable[Pair]) -> None:
        """Run the programs of pairs in one process of each host, in opposite orders."""
        here, there = [], []
        for each in pairs:
            there.append(each.b)
            if each.relation is not Relation.UNSHARED:
                here.append(each.a)
            if each.relation is Relation.DIFFER:
                there.append(each.a)
        self.one.ask_in_one_process(reversed(here))
        self.other.ask_in_one_process(there)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.one.__exit__()
        self.other.__exit__()


def environment_of_host(directory: Path, seed: int) -> dict[str, str]:
    """Return the variables of a host that differs from others in its paths, user and hashes."""
    own = {
        "HOME": str(directory),
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": str(_TESTS),
        "TMPDIR": str(directory),
        "USER": f"user{seed}",
    }
    return os.environ | own
