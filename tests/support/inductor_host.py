"""A host of its own inside this process: the hook, and empty directories of torch."""

from contextlib import contextmanager

import torch._inductor.compile_fx
import torch._inductor.config
from torch._inductor.utils import fresh_inductor_cache

from graphstash import ClientConfig, CompileCache, Stash
from graphstash._executor import BoundedExecutor
from graphstash._stats import Counters
from graphstash.hooks import inductor

__all__ = ["InductorHost", "inductor_host"]


class InductorHost:
    """What a host has.

    Attributes:
        cache: finds and publishes.
        hook: is installed.
    """

    def __init__(self, config):
        self._publisher = BoundedExecutor("test-publish", workers=1, capacity=64)
        self._counters = Counters()
        self._stash = Stash(config)
        self.cache = CompileCache(self._stash, counters=self._counters, publisher=self._publisher)
        self.hook = inductor.install(self.cache)

    @property
    def stats(self):
        """Counts, when everything has been published."""
        assert self._publisher.drain(20)
        return self._counters.snapshot()

    def close(self):
        self.hook.close()
        self._publisher.drain(20)
        self._publisher.close()
        self.cache.abandon_all()
        self._stash.close()


@contextmanager
def inductor_host(directory, **settings):
    """Installs the hook and takes it out again.

    Args:
        directory: of the local tier.
        settings: fields of ClientConfig.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with (
        fresh_inductor_cache(),
        torch._inductor.config.patch({"cpp.vec_isa_ok": True, "compile_threads": 1}),
    ):
        host = InductorHost(ClientConfig.load({}, cache_dir=directory, **settings))
        try:
            yield host
        finally:
            host.close()
