"""Promise: a region serves what its upstream serves. Each artifact crosses the link once, a graph
is compiled once in all regions, and no publish that a region has acknowledged is lost. What the
upstream withdraws or revokes ends in each region.

Servers are processes. The link is a real connection, or a proxy that records and changes answers.
"""

import itertools
from contextlib import ExitStack, closing

import pytest

from support.api import Api
from support.hostile import Middlebox
from support.regions import Site


class World:
    """An upstream with any number of regions.

    Attributes:
        center: the upstream.
        admin: token of the upstream's administrator.
    """

    def __init__(self, directory, stack):
        self._directory, self._stack = directory, stack
        self._numbers = itertools.count()
        self.center = stack.enter_context(Site(directory / "center"))
        self.admin = self.center.token("admin:*")

    def link(self, change=None):
        """Return a proxy in front of the upstream."""
        return self._stack.enter_context(Middlebox(self.center.url, change))

    def region(self, *options, upstream=None, is_started=True, **environment):
        directory = self._directory / f"region-{next(self._numbers)}"
        url = self.center.url if upstream is None else upstream
        site = Site.region(directory, url, self.admin, *options, **environment)
        if is_started:
            self._stack.enter_context(site)
            # The upstream confirms the administrator's token.
            assert self.api(site).http.get("/v1/stats").status_code in {200, 401}
        return site

    def api(self, site, token=None, namespace="team"):
        return self._stack.enter_context(closing(Api(site.url, namespace, token or self.admin)))


@pytest.fixture
def world(tmp_path):
    with ExitStack() as stack:
        yield World(tmp_path, stack)
