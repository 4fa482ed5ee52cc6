"""A host inside this process: the inductor hook, and empty directories of torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch._inductor.compile_fx
import torch._inductor.config
from torch._inductor import cpu_vec_isa
from torch._inductor.utils import fresh_inductor_cache

from graphstash import ClientConfig
from graphstash.hooks.inductor.hook import install
from support.host import Host
from support.waiting import PATIENT


class InductorHost(Host):
    """A host of torch.compile.

    Attributes:
        hook: the installed hook.
    """

    def __init__(self, config: ClientConfig) -> None:
        super().__init__(config, capacity=64)
        hook = install(self.cache)
        assert hook is not None
        self.hook = hook

    def close(self) -> None:
        self.hook.close()
        super().close()


@contextmanager
def inductor_host(directory: Path, **settings: Any) -> Iterator[InductorHost]:
    """Install the hook for the block.

    Args:
        directory: directory of the local tier.
        settings: fields of ClientConfig.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with (
        fresh_inductor_cache(),
        torch._inductor.config.patch(
            {
                "cpp.vec_isa_ok": True,
                "compile_threads": 1,
                "post_grad_custom_post_pass": None,  # importing torchao sets one in this process
            }
        ),
    ):
        if pretended := os.environ.get("PRETEND_ISA"):
            cpu_vec_isa.x86_isa_checker = pretended.split
        # On a processor with AMX, torch builds a probe object once per process. Build it now,
        # because tests count the objects that they build.
        cpu_vec_isa.valid_vec_isa_list()
        with InductorHost(ClientConfig.load({}, cache_dir=directory, **PATIENT | settings)) as host:
            yield host
