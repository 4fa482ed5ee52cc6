"""A real browser without a window, driven through a pipe (Chrome DevTools Protocol).

https://chromedevtools.github.io/devtools-protocol/: messages are JSON and end with a NUL; the
browser reads them from descriptor 3 and writes its own to descriptor 4.
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Self

__all__ = ["Browser"]

_SECONDS = 60.0


class Browser:
    """A context manager with one tab."""

    def __init__(self) -> None:
        self._profile = tempfile.mkdtemp(prefix="graphstash-browser-")
        reads, self._writes = os.pipe()
        self._reads, writes = os.pipe()
        command = [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-dev-shm-usage", "--disable-background-networking", "--mute-audio"),
            *("--disable-component-update", "--disable-extensions", "--remote-debugging-pipe"),
            f"--user-data-dir={self._profile}",
            "about:blank",
        ]
        # bash puts the pipes where the browser looks for them; dash knows descriptors up to 9 only.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", *command],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._profile},
        )
        os.close(reads)
        os.close(writes)
        self._received = b""
        self._number = 0
        self._events: list[str | None] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")
        self._call("Browser.setDownloadBehavior", behavior="deny", at_browser=True)

    def open(self, url: str) -> tuple[str, ...] | None:
        """Opens a page and waits until it is loaded; its title and text.

        What the browser takes for a file to be saved is not a page: None.
        """
        self._events.clear()
        answer = self._call("Page.navigate", url=url)
        if answer.get("errorText"):
            return None
        self._until(lambda: "Page.loadEventFired" in self._events)
        return tuple(self._evaluate("[document.title, document.documentElement.innerText]"))

    def wait_for_title(self, titles: Collection[str]) -> str:
        """The title of the page once it is one of these."""
        deadline = time.monotonic() + _SECONDS
        while (title := self._evaluate("document.title")) not in titles:
            assert time.monotonic() < deadline, title
            time.sleep(0.02)
        return title

    def _evaluate(self, script: str) -> Any:
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"]["value"]

    def _call(self, method: str, *, at_browser: bool = False, **params: object) -> Any:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if hasattr(self, "_session") and not at_browser:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        answers: list[Any] = []
        self._until(lambda: answers, answers=answers, number=number)
        assert "error" not in answers[0], answers[0]
        return answers[0]["result"]

    def _until(
        self,
        holds: Callable[[], object],
        *,
        answers: list[Any] | None = None,
        number: int | None = None,
    ) -> None:
        deadline = time.monotonic() + _SECONDS
        while not holds():
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._reads], [], [], max(0.0, left))
            assert ready, "the browser does not answer"
            data = os.read(self._reads, 1 << 20)
            assert data, "the browser has ended"
            self._received += data
            *messages, self._received = self._received.split(b"\0")
            for message in map(json.loads, messages):
                if answers is not None and message.get("id") == number:
                    answers.append(message)
                self._events.append(message.get("method"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._reads)
        os.close(self._writes)
        with suppress(OSError):
            shutil.rmtree(self._profile)
