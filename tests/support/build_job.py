"""The beginning of a job's script, which compiles on a clock that it turns."""

from typing import Final

__all__ = ["BUILD"]

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
