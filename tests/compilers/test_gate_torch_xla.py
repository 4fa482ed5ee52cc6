"""The gate in the real library, in fresh processes: torch_xla has one cache for all its life.

Each script prints one JSON object.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

TIMEOUT_SECONDS = 240

PRELUDE = """
import json, pathlib, shutil, sys, threading, time
import torch, torch_xla, torch_xla.runtime as xr
from graphstash.hooks.torch_xla.gate import StatGate

directory, seen = pathlib.Path(sys.argv[1]), []
extension = torch_xla._XLAC

def start(answer, **options):
    gate = StatGate(pathlib.Path(extension.__file__), f"{directory}/", answer, **options)
    gate.open()
    xr.initialize_cache(str(directory))
    return gate

def counter(name):
    return torch_xla._XLAC._xla_counter_value(name) or 0

def matmuls(device, size=8):
    value = torch.arange(size * size, dtype=torch.float32, device=device).reshape(size, size) / 64
    for _ in range(3):
        value = torch.tanh(value @ value)
    return value
"""

COUNTING = """
gate = start(seen.append)
device = torch_xla.device()
steps = []
for _ in range(6):
    result = matmuls(device)
    torch_xla.sync()
    steps.append(list(seen))
    seen.clear()
(matmuls(device, 4).sum() + 1).item()
gate.close()
last = matmuls(device, 5)
torch_xla.sync()
print(json.dumps({
    "steps": steps, "result": result.cpu().tolist(), "item_paths": seen, "give_ups": gate.give_ups,
    "requests": gate.requests, "files": sorted(map(str, directory.iterdir())),
}))
"""

SERVING = """
store = pathlib.Path(sys.argv[2])

def fetch(path):
    seen.append(path)
    source = store / pathlib.Path(path).name
    if source.exists():
        shutil.copy(source, path + ".part")
        pathlib.Path(path + ".part").rename(path)

gate = start(fetch)
result = matmuls(torch_xla.device())
torch_xla.sync()
print(json.dumps({
    "result": result.cpu().tolist(), "seen": seen, "hits": counter("PersistentCacheHit"),
    "compiles": counter("UncachedCompile"),
}))
"""

TWO_THREADS = """
def slow(path):
    if missing.is_set():
        asked.set()
        time.sleep(2)

asked, missing, finished = threading.Event(), threading.Event(), threading.Event()
gate = start(slow, liveness_seconds=1.0)
device = torch_xla.device()

@torch.compile(backend="openxla")
def cached(value):
    return torch.tanh(value @ value)

operand = torch.ones(8, 8, device=device)
with torch.no_grad():
    for _ in range(3):
        cached(operand)
torch_xla.sync()
mine = matmuls(device, 16)

def miss():
    extension._xla_sync_multi([mine], [], wait=True)
    finished.set()

missing.set()
thread = threading.Thread(target=miss)
thread.start()
assert asked.wait(60)
runs = 0
with torch.no_grad():
    while not finished.is_set():
        cached(operand)
        runs += 1
thread.join()
print(json.dumps({"runs": runs, "give_ups": gate.give_ups}))
"""


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def counted(store):
    return run(COUNTING, store)


def test_a_graph_is_asked_for_before_and_after_its_compilation_only(counted):
    first, *later = counted["steps"]
    assert len(first) == 2
    assert len(set(first)) == 1
    assert later == [[]] * 5
    assert counted["give_ups"] == 0


def test_a_graph_cut_by_item_is_asked_for_too(counted):
    assert len(counted["item_paths"]) == 2
    assert set(counted["item_paths"]).isdisjoint(counted["steps"][0])


def test_nothing_is_asked_for_after_closing(counted):
    assert counted["requests"] == 4
    assert len(counted["files"]) == 3
    assert {*counted["steps"][0], *counted["item_paths"]} < set(counted["files"])


def test_executable_put_there_by_the_answer_is_loaded_instead_of_compiled(counted, store, tmp_path):
    loaded = run(SERVING, tmp_path, store)
    assert (loaded["hits"], loaded["compiles"]) == (1, 0)
    assert [Path(path).name for path in loaded["seen"]] == [Path(counted["steps"][0][0]).name]
    assert loaded["result"] == counted["result"]


def test_thread_that_waits_for_the_cache_with_the_interpreter_lock_stops_nobody(
    tmp_path,
):
    done = run(TWO_THREADS, tmp_path)
    assert done["runs"] > 0
    # Before compiling, and perhaps after it: what `slow` does then is cut short the same way.
    assert done["give_ups"] in (1, 2)
