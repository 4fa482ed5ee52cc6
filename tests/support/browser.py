"""Debian's Chromium without a window, driven by Playwright."""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Error, sync_playwright

__all__ = ["Browser", "chromium"]


@contextmanager
def chromium() -> Iterator[Chromium]:
    """For tests that leave this thread's event loop to Playwright."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


class Browser:
    """A context manager with one tab, in a thread of its own: tests may run event loops."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._stack = ExitStack()
        self._page: Any = None

    def open(self, url: str) -> tuple[str, ...] | None:
        """Opens a page and waits until it is loaded; its title and text.

        A file that the browser would save is not a page: None.
        """

        def visit() -> tuple[str, ...] | None:
            try:
                self._page.goto(url)
            except Error:
                return None
            found = self._page.evaluate("[document.title, document.documentElement.innerText]")
            return tuple(found)

        return self._thread.submit(visit).result()

    def wait_for_title(self, titles: Collection[str]) -> str:
        """The title of the page once it is one of these."""

        def wait() -> str:
            holds = "titles => titles.includes(document.title)"
            self._page.wait_for_function(holds, arg=list(titles))
            return str(self._page.title())

        return self._thread.submit(wait).result()

    def __enter__(self) -> Self:
        def start() -> None:
            browser = self._stack.enter_context(chromium())
            self._page = browser.new_page(accept_downloads=False)

        self._thread.submit(start).result()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._stack.close).result()
        self._thread.shutdown()
