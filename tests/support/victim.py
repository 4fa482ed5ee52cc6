"""A training job whose cache is under attack: it compiles what it does not get."""

from graphstash import ClientConfig, CompileCache, Stash
from graphstash._executor import BoundedExecutor
from graphstash._stats import Counters

__all__ = ["OWN", "Victim"]

OWN = b"compiled by the job itself " * 100
"""What it compiles; whatever else it is given came from the cache."""


class Victim:
    """A context manager.

    Attributes:
        compiles: how often it had to compile.
    """

    def __init__(self, **settings):
        self.compiles = 0
        self.stash = Stash(ClientConfig.load({}, connect_seconds=5, **settings))
        self._counters = Counters()
        self._publisher = BoundedExecutor("test-publish", workers=1, capacity=8)
        self._cache = CompileCache(self.stash, counters=self._counters, publisher=self._publisher)

    def build(self, key):
        return self._cache.get_or_compile(key, self._compile)

    @property
    def stats(self):
        assert self._publisher.drain(20)
        return self._counters.snapshot()

    @property
    def fallbacks(self):
        return self.stats.fallbacks

    def _compile(self):
        self.compiles += 1
        return OWN

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._publisher.drain(20)
        self._publisher.close()
        self._cache.abandon_all()
        self.stash.close()
