"""Adds the pages of the repository's root to the site, and maps links between pages.

Authors write links as GitHub resolves them, relative to the file in the repository. This hook maps
them to the site, which also holds some pages from outside `docs/`. A link to a file that is not a
page of the site keeps its text only. mkdocs then checks every link that is left.
"""

import itertools
import posixpath
import re
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_markdown"]

_ROOT: Final = Path(__file__).resolve().parents[2]

_OUTSIDE: Final = {
    "index.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "client/examples/README.md": "client/examples/README.md",
    "docker/README.md": "docker/README.md",
}
"""Pages of the site whose source is not in `docs/`, with the place of that source."""

_PAGE_OF: Final = {source: page for page, source in _OUTSIDE.items()}

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})")
_DIRECTIVE = re.compile(r"^[ ]*<!-- snippets?:.*?-->\n", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages from outside `docs/`."""
    for page, source in _OUTSIDE.items():
        text = (_ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Maps links of the repository to links of the site, and drops the directives of snippets."""
    del config
    here = page.file.src_uri
    source = _OUTSIDE.get(here, f"docs/{here}")

    def replaced(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        parts = urlsplit(target)
        if parts.scheme or parts.netloc or not parts.path:
            return link[0]
        in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(source), parts.path))
        in_site = _PAGE_OF.get(in_repository, in_repository.removeprefix("docs/"))
        is_page = in_repository in _PAGE_OF or in_repository.startswith("docs/")
        if not is_page and (_ROOT / in_repository).exists():
            return text  # a file of the repository that the site does not hold
        if not is_page or files.get_file_from_path(in_site) is None:
            return link[0]  # mkdocs says that it is dead
        path = posixpath.relpath(in_site, posixpath.dirname(here) or ".")
        return f"{image}[{text}]({path}{'#' if parts.fragment else ''}{parts.fragment})"

    lines = _DIRECTIVE.sub("", markdown).splitlines(keepends=True)
    parts = itertools.groupby(zip(lines, _in_fence(lines), strict=True), key=itemgetter(1))
    texts = ((is_code, "".join(line for line, _ in part)) for is_code, part in parts)
    return "".join(text if is_code else _LINK.sub(replaced, text) for is_code, text in texts)


def _in_fence(lines: list[str]) -> Iterator[bool]:
    """Of each line, whether it belongs to a block of code."""
    fence = ""
    for line in lines:
        mark = _FENCE.match(line)
        yield bool(fence or mark)
        if mark and not fence:
            fence = mark[2]
        elif mark and mark[2].startswith(fence):
            fence = ""
