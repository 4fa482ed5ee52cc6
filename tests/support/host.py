"""A job of a team inside this process, with a host, a disk and counters of its own."""

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Self

from graphstash import ClientConfig, CompileCache, Stash, Stats
from graphstash._compile.request import CompileRequest
from graphstash._compile.stats import Counters
from graphstash._executor import BoundedExecutor
from graphstash_schema import ArtifactKey, ArtifactMetadata

METADATA: Final = ArtifactMetadata(compile_seconds=3.0, raw_size_bytes=5)
"""Metadata of b"graph", which tests publish if its bytes do not matter."""


def key(number: int = 1, kind: str = "torch_xla") -> ArtifactKey:
    return ArtifactKey.parse(kind, "cpu-x86_64-0123456789abcdef", f"{number:064x}")


def request(number: int = 1, kind: str = "torch_xla") -> CompileRequest:
    return CompileRequest(key(number, kind), toolchain="test")


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Limit the size of this process's files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Host:
    """A host that compiles on a miss; a context manager.

    Attributes:
        compiles: number of compilations.
        result: result of each compilation.
    """

    def __init__(self, stash: Stash | ClientConfig, *, capacity: int = 8) -> None:
        self.compiles = 0
        self.result = b"graph"
        self.stash = stash if isinstance(stash, Stash) else Stash(stash)
        self.counters = Counters()
        self.publisher = BoundedExecutor("test-publish", workers=1, capacity=capacity)
        self.cache = CompileCache(self.stash, counters=self.counters, publisher=self.publisher)

    def build(self, wanted: ArtifactKey, **options: Any) -> bytes:
        return self.cache.get_or_compile(wanted, self.compile, **options)

    def compile(self) -> bytes:
        self.compiles += 1
        return self.result

    @property
    def stats(self) -> Stats:
        """Return the counters after all uploads."""
        assert self.publisher.drain(20)
        return self.counters.snapshot()

    @property
    def fallbacks(self) -> Mapping[str, int]:
        return self.stats.fallbacks

    def close(self) -> None:
        self.publisher.drain(20)
        self.publisher.close()
        self.cache.abandon_all()
        self.stash.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
