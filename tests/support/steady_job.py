"""A job of any release that stores artifacts and reads them back until its input ends.

After each artifact, the job prints the number of stored artifacts. At the end, it prints the
artifacts that the server lost or changed, as JSON. An unanswered call only costs an attempt.
"""

import itertools
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from graphstash import CacheError, ClientConfig, Stash
from graphstash_schema import ArtifactKey, ArtifactMetadata


def key_of(name: int, number: int) -> ArtifactKey:
    return ArtifactKey.parse("jax", "cpu-x86_64-0123456789abcdef", f"{name:032x}{number:032x}")


def payload_of(name: int, number: int) -> bytes:
    return random.Random(f"{name} {number}").randbytes(2000)


def main(name: int) -> None:
    ended = threading.Event()
    stored: list[int] = []
    wrong: list[int] = []

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    for number in itertools.count():
        if ended.is_set():
            break
        # A new local tier is empty, so the server must answer.
        with tempfile.TemporaryDirectory() as cache_dir:
            with Stash(ClientConfig.load(cache_dir=Path(cache_dir) / "writer")) as stash:
                payload = payload_of(name, number)
                metadata = ArtifactMetadata(compile_seconds=3.0, raw_size_bytes=len(payload))
                try:
                    stash.put(key_of(name, number), payload, metadata)
                    stored.append(number)
                    print(len(stored), flush=True)
                except CacheError as error:
                    print(error, file=sys.stderr)
            with Stash(ClientConfig.load(cache_dir=Path(cache_dir) / "reader")) as stash:
                for known in random.sample(stored, min(3, len(stored))):
                    try:
                        if stash.get(key_of(name, known)) != payload_of(name, known):
                            wrong.append(known)
                    except CacheError as error:
                        print(error, file=sys.stderr)
        time.sleep(0.1)  # let servers start and other jobs continue
    print(json.dumps(wrong), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
