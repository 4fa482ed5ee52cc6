"""Parts of scripts that stand in for a training job and its launcher."""

from typing import Final

RANKS: Final = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, *sys.argv[1:]]) for _ in range(3)]
sys.exit(any(rank.wait() for rank in ranks))
"""
"""Start three processes of a job as a launcher does, and wait for them."""

BUILD_PROGRAM: Final = """
import graphstash
from graphstash_schema import ArtifactKey, ArtifactKind, DeviceType, fingerprint_of

def build(label, **parts):
    parts = {"program": label, **parts}
    fingerprint = fingerprint_of(ArtifactKind.SCHEDULE, parts)
    key = ArtifactKey(ArtifactKind.SCHEDULE, DeviceType("cpu"), fingerprint)
    graphstash.get_or_compile(key, label.encode, parts=parts, label=label)
"""

BUILD: Final = """
import os, sys, time
import graphstash
from graphstash._compile import cache, compile_limit
from graphstash_schema import ArtifactKey

turned = 0.0

def turn(seconds):
    # Turn the clock of the cache: what a test counts must not depend on its machine.
    global turned
    turned += seconds

cache.monotonic = compile_limit.monotonic = lambda: time.monotonic() + turned

def build(number, *, seconds=0.0, sleep=0.0, label="jit(step)"):
    key = ArtifactKey.parse("schedule", "cpu", f"{number:064x}")

    def compile_payload():
        print("compiling", number, flush=True)
        turn(seconds)
        time.sleep(sleep)
        return b"x"

    graphstash.get_or_compile(key, compile_payload, parts={"number": str(number)}, label=label)
"""
