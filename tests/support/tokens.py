"""A server that requires tokens, and callers with and without tokens."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import httpx

from graphstash_schema import Grant, TokenIssued, TokenRequest
from graphstash_server.actor import Actor
from graphstash_server.clock import Clock, system_clock
from graphstash_server.db.engine import Database
from graphstash_server.services.identity.tokens import TokenService
from graphstash_server.testing import LiveServer
from support.api import Api


def issue(
    database_url: str,
    *grants: str,
    description: str = "a test",
    clock: Clock = system_clock,
    expires_at: datetime | None = None,
) -> TokenIssued:
    """Create a token as the command does."""
    request = TokenRequest(
        description=description, grants=tuple(map(Grant.parse, grants)), expires_at=expires_at
    )

    async def work() -> TokenIssued:
        database = Database(database_url)
        try:
            service = TokenService(database=database, clock=clock)
            return await service.create(request, actor=Actor("local:tests"))
        finally:
            await database.close()

    # Playwright runs an event loop in the tests' thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work()).result()


class Callers:
    """The callers of a server with `auth=tokens`.

    Attributes:
        url: address of the server.
        database_url: database of its tokens.
        admin: the administrator's token.
    """

    url: str
    database_url: str
    admin: str

    def __init__(self) -> None:
        self._clients: dict[str | None, httpx.Client] = {}
        self._making = threading.Lock()

    def token(self, *grants: str, **terms: Any) -> str:
        """Return the text of a new token with these grants."""
        return issue(self.database_url, *grants, **terms).token

    def http(self, token: str | None = None) -> httpx.Client:
        """Return the client with this token, or without one."""
        with self._making:  # threads of a test share the clients
            if token not in self._clients:
                self._clients[token] = Api(self.url, token=token).http
            return self._clients[token]

    def set_policy(self, namespace: str, **policy: object) -> None:
        answer = self.http(self.admin).put(f"/v1/-/namespaces/{namespace}", json=policy)
        assert answer.status_code == 200, answer.text

    def hang_up(self) -> None:
        """Close the connections of all clients."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()


class Guarded(Callers):
    """A live server that requires tokens; a context manager."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        super().__init__()
        defaults = {"auth": "tokens", "flush_seconds": 0.05, "log_level": "error"}
        self.server = LiveServer(data_dir, **defaults | settings)
        self._apis: list[Api] = []
        self._public: set[str] = set()

    def api(self, namespace: str, *grants: str) -> Api:
        """Return a namespace with a new token for these grants, or with the administrator's."""
        token = self.token(*grants) if grants else self.admin
        self._apis.append(Api(self.url, namespace, token))
        return self._apis[-1]

    def set_policy(self, namespace: str, **policy: object) -> None:
        super().set_policy(namespace, **policy)
        if policy.get("anonymous_read"):
            self._public.add(namespace)

    def end_public(self) -> None:
        """Close the namespaces that a test has opened, because other tests share the server."""
        while self._public:
            self.set_policy(self._public.pop())

    def __enter__(self) -> Self:
        self.server.start()
        self.url, self.database_url = self.server.url, self.server._settings.database_url
        self.admin = self.token("admin:*", description="admin")
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        for api in self._apis:
            api.close()
        self.server.stop()
