"""A get makes few system calls and few calls of Python functions.

Counts do not depend on the machine's load. The limits are a little above the present counts. If a
change needs more calls, justify it and raise the limit.
"""

import json
import os
import re
import sys
import textwrap
from collections import Counter

import pytest

from support.host import METADATA, key
from support.processes import captured, python
from support.waiting import PATIENT_VARIABLES

PAYLOAD = os.urandom(4096)
WARM = 3
"""Gets before the measured ones. They import modules and create folders of this run."""

START = """
    import json, os, sys
    from graphstash import ClientConfig, Stash
    from graphstash_schema import ArtifactKey

    keys = [ArtifactKey.parse(*text.split("/")) for text in json.loads(sys.argv[1])]
    stash = Stash(ClientConfig.load(os.environ), run="run-costs")
    for each in keys[1:]:
        stash.get(each)
        stash.get(each)
    wanted = keys[0]
"""
TRACED = """
    for name in ("remote", "local", "end"):
        try:
            os.stat(f"/mark-{name}")
        except OSError:
            pass
        assert len(stash.get(wanted)) == 4096
"""
PROFILED = """
    import cProfile, pstats
    counts = {}
    for name in ("remote", "local"):
        profile = cProfile.Profile()
        profile.enable()
        stash.get(wanted)
        profile.disable()
        counts[name] = pstats.Stats(profile).total_calls
    print(json.dumps(counts))
"""


@pytest.fixture
def run(hosts, server, namespace, tmp_path):
    """Return the arguments and environment of a program whose host has no artifact yet."""
    keys = [key(0xABC << 244), *(key(number) for number in range(WARM))]
    for each in keys:
        hosts("publisher").put(each, PAYLOAD, METADATA)
    variables = PATIENT_VARIABLES | {
        "GRAPHSTASH_URL": server.url,
        "GRAPHSTASH_NAMESPACE": namespace,
        "GRAPHSTASH_CACHE_DIR": str(tmp_path / "reader"),
    }
    return json.dumps([str(each) for each in keys]), variables


def test_get_makes_few_system_calls(run, tmp_path):
    arguments, variables = run
    log = tmp_path / "calls"
    program = textwrap.dedent(START) + textwrap.dedent(TRACED)
    command = ("strace", "-o", log, sys.executable, "-c", program, arguments)
    captured(command, check=True, env=os.environ | variables)
    (_, remote, local, _) = re.split(
        r'^\w+\([^"\n]*"/mark-\w+".*\n', log.read_text(), flags=re.MULTILINE
    )
    counts = {
        name: Counter(re.findall(r"^(\w+)\(", part, re.MULTILINE))
        for name, part in (("remote", remote), ("local", local))
    }
    kinds = {"opens": ("openat",), "stats": ("newfstatat", "fstat", "stat"), "syncs": ("fsync",)}
    found = {
        name: {kind: sum(map(calls.__getitem__, each)) for kind, each in kinds.items()}
        | {"all": calls.total()}
        for name, calls in counts.items()
    }
    most = {
        # Six opens find no copy, and four no withdrawal.
        "remote": {"opens": 16, "stats": 5, "syncs": 0, "all": 44},
        # The copy, and a gap in the list of withdrawals that is not there.
        "local": {"opens": 3, "stats": 6, "syncs": 0, "all": 17},
    }
    for name, limits in most.items():
        for kind, limit in limits.items():
            assert found[name][kind] <= limit, (name, kind, counts[name])


def test_get_calls_few_functions(run):
    arguments, variables = run
    program = textwrap.dedent(START) + textwrap.dedent(PROFILED)
    counts = json.loads(python(program, arguments, check=True, **variables).stdout)
    assert counts["remote"] <= 1400  # half of them are h11's, for the headers of both sides
    assert counts["local"] <= 220
