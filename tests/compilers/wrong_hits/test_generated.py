"""Two programs drawn at random share a key exactly if they must.

Two processes compute the keys of the same programs. They differ in folders, in the user, in the
seed of hashes, in the order of the programs, and in the layout of each program's text.
"""

import json
import subprocess
from collections import Counter
from contextlib import ExitStack

import pytest

from compilers.wrong_hits.hosts import environment_of_host
from support.environments import python_of

VERSIONS = (
    ("triton", "3.3.0", ""),
    ("triton", "3.9.0", "torch-newest"),
    ("inductor", "2.7.0", ""),
    ("inductor", "2.15.0", "torch-newest"),
    ("jax", "0.10.2", ""),
    ("torch_xla", "2.7.0", ""),
    ("pjrt", "xla-cpu-pjrt", ""),
)


def cases():
    """Return the cases. The cases whose compilers start slowly are extended."""
    return [
        pytest.param(
            name,
            environment,
            id=f"{name}-{version}",
            marks=[pytest.mark.extended]
            if environment or name in {"inductor", "torch_xla", "pjrt"}
            else [],
        )
        for name, version, environment in VERSIONS
    ]


def started(name, environment, directory, *, pairs, seed, hashes):
    """Start a process that computes keys and writes its answers to a file."""
    directory.mkdir(parents=True)
    with (directory / "answers").open("w") as answers, (directory / "errors").open("w") as errors:
        return subprocess.Popen(
            [
                *(python_of(environment), "-m", "compilers.wrong_hits.generated.worker"),
                *(name, str(pairs), str(seed)),
            ],
            cwd=directory,
            env=environment_of_host(directory, hashes),
            stdout=answers,
            stderr=errors,
        )


def answers_of(process, directory):
    assert process.wait() == 0, (directory / "errors").read_text()
    return [json.loads(line) for line in (directory / "answers").read_text().splitlines()]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("name", "environment"), cases())
def test_generated_programs_share_key_exactly_if_they_are_equal(
    name, environment, tmp_path, pytestconfig
):
    seed, extended = pytestconfig.getoption("seed_of_pairs"), pytestconfig.getoption("extended")
    pairs = pytestconfig.getoption("pairs") or (300 if extended else 30)
    directories = tmp_path / "one", tmp_path / "elsewhere" / "other"
    with ExitStack() as stack:
        running = []
        for hashes, directory in enumerate(directories, 1):
            settings = {"pairs": pairs, "seed": seed, "hashes": hashes}
            process = started(name, environment, directory, **settings)
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append((process, directory))
        answers = [answer for each in running for answer in answers_of(*each)]
    failed = [unshared for _, _, unshared, _ in answers if unshared.startswith("failed")]
    assert not failed, failed[0]
    compiled_by, keys = {}, {}
    for meaning, key, unshared, compiled in answers:
        if unshared:
            continue
        expected = compiled_by.setdefault(key, (compiled or meaning, meaning))
        assert expected[0] == (compiled or meaning), f"a wrong hit: {meaning} and {expected[1]}"
        assert keys.setdefault(meaning, key) == key, f"two keys of {meaning}"
    reasons = Counter(unshared for _, _, unshared, _ in answers if unshared)
    assert len(keys) > len(answers) / 6, reasons  # at least a third of the programs have keys
    print(f"{pairs} pairs, {len(keys)} keys of {len(answers)} programs, not shared: {reasons}")
