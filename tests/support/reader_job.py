"""A training job whose cache is under attack. It compiles on every miss."""

from typing import Any

from graphstash import ClientConfig
from support.host import Host
from support.waiting import PATIENT

OWN = b"compiled by the job itself " * 100
"""The job's own result. Any other bytes came from the cache."""


class ReaderJob(Host):
    """A job; a context manager."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(ClientConfig.load({}, **PATIENT | settings))
        self.result = OWN
