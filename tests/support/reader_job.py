"""A training job whose cache is under attack: it compiles what it does not get."""

from typing import Any

from graphstash import ClientConfig
from support.host import Host
from support.waiting import PATIENT

__all__ = ["OWN", "ReaderJob"]

OWN = b"compiled by the job itself " * 100
"""What it compiles; whatever else it is given came from the cache."""


class ReaderJob(Host):
    """A context manager."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(ClientConfig.load({}, **PATIENT | settings))
        self.result = OWN
