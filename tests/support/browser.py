"""Debian's Chromium without a window, driven by Playwright."""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Error, sync_playwright


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Start a browser for tests that leave this thread's event loop to Playwright."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


class Browser:
    """A browser with one tab; a context manager. Its own thread leaves event loops to the tests."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._stack = ExitStack()
        self._page: Any = None

    def open(self, url: str) -> tuple[str, ...] | None:
        """Open a page, wait until it is loaded, and return its title and text.

        Return None for a file, which a browser would save.
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
        """Wait until the title of the page is one of these, and return the title."""

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
