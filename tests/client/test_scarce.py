"""A process that has no descriptor or no thread left: it trains all the same."""

import pytest

from support.processes import python

PROGRAM = """
import os, resource, tempfile
import graphstash
import graphstash._compile.cache
from graphstash import ClientConfig
from graphstash._http.transport import Transport
from graphstash.errors import TransportError
from graphstash_schema import ArtifactKey

KEY = ArtifactKey.parse("schedule", "cpu-x86_64-0123456789abcdef", "0" * 64)

def leave(count):
    # Leaves this process so many descriptors.
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(count + 20)]
    limit = spare[count]  # the lowest that are free are taken first
    for each in spare:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

def free():
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return len(taken)
    finally:
        for each in taken:
            os.close(each)
"""


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_call_that_lacks_descriptors_keeps_none(tmp_path, count):
    program = f"""
transport = Transport(ClientConfig.load({{}}, url="unix:{tmp_path}/socket"))
def call():
    try:
        transport.call("GET", "/v1/stats")
    except TransportError as error:
        return error.reason.value
call()  # what it imports
leave({count})
print([call(), call()], free())
"""
    outcome = python(PROGRAM + program, check=True)

    assert outcome.stdout == f"['connect', 'connect'] {count}\n"


def test_a_cache_that_cannot_be_made_is_counted_and_the_job_compiles(tmp_path):
    program = """
tempfile.gettempdir()
leave(1)
print(graphstash.get_or_compile(KEY, lambda: b"compiled"), graphstash.stats().fallbacks)
"""
    variables = {"GRAPHSTASH_URL": "none", "GRAPHSTASH_CACHE_DIR": tmp_path / "tier"}
    outcome = python(PROGRAM + program, check=True, TMPDIR=tmp_path, **variables)

    assert outcome.stdout == "b'compiled' {'local_io': 1}\n"
    assert outcome.stderr.count("the job goes on without the cache") == 1
    assert "Traceback" not in outcome.stderr
