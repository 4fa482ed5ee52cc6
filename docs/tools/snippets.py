"""Reads the snippets of the documentation's pages; as a program it checks that all of them parse.

Authors write ordinary fenced blocks. HTML comments right above a block say what readers need not
see: see "Documentation" in CONTRIBUTING.md. tests/docs runs what this module reads.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

__all__ = ["ROOT", "Directive", "Page", "Snippet", "SnippetError", "pages", "read"]

ROOT: Final = Path(__file__).resolve().parents[2]

_OUTSIDE: Final = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docker/README.md")
_EXAMPLES: Final = "client/examples/README.md"

_DIRECTIVE = re.compile(r"<!-- snippet: (\w+)[ :]*(.*?)\s*-->", re.DOTALL)
_PAGE_DIRECTIVE = re.compile(r"^<!-- snippets: (\w+)[ :]*(.*?) -->$", re.MULTILINE)
_INFO = re.compile(r'(?P<language>[\w-]+)(?: title="(?P<title>[\w./-]+)")?')

_LANGUAGES: Final = ("sh", "python", "json", "yaml", "toml", "ini", "nginx", "text")
_NAMES: Final = ("setup", "before", "after", "continue", "replace", "exit", "prints", "parse")

_OUTSIDE_PATH = re.compile(r">\s*/(?!dev/)")


class SnippetError(Exception):
    """A page does not keep to the convention, or a snippet does not parse."""


@dataclass(frozen=True)
class Directive:
    """What a comment says about the block below it."""

    name: str
    text: str


@dataclass(frozen=True)
class Snippet:
    """One fenced block.

    Attributes:
        line: number of its first line in the page, from 1.
        title: path of the file that it is, or an empty string.
        code: as readers see it.
        directives: of the comments above it, in order.
    """

    line: int
    language: str
    title: str
    code: str
    directives: tuple[Directive, ...]

    def said(self, name: str) -> list[str]:
        """The texts of all directives of a name."""
        return [each.text for each in self.directives if each.name == name]

    @property
    def complete(self) -> str:
        """The code with what readers fill in, and in Python with its hidden lines."""
        code = self.code
        for text in self.said("replace"):
            old, _, new = text.partition(" ")
            code = code.replace(old, new)
        if self.language != "python":
            return code
        return "\n".join([*self.said("before"), code, *self.said("after")])

    @property
    def reason(self) -> str | None:
        """Why it is only parsed; None when it runs."""
        return next(iter(self.said("parse")), None)


@dataclass(frozen=True)
class Page:
    """One page: a session from its first block to its last.

    Attributes:
        name: its path in the repository.
        environment: of tests/environments, whose Python runs it; empty for the tests' own.
        extended: whether it takes too long for `make test`.
    """

    name: str
    environment: str
    extended: bool
    snippets: tuple[Snippet, ...]


def pages() -> list[str]:
    """Paths in the repository of all pages with snippets."""
    docs = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    written = [name for name in docs if not name.startswith("docs/reference/")]
    return [*_OUTSIDE, _EXAMPLES, *written]


def read(name: str, text: str | None = None, *, is_checked: bool = True) -> Page:
    """Reads a page.

    Args:
        name: its path in the repository.
        text: instead of that file's.
        is_checked: whether each snippet is parsed, shell by a process of bash.

    Raises:
        SnippetError: the page does not keep to the convention, or a snippet does not parse.
    """
    text = (ROOT / name).read_text(encoding="utf-8") if text is None else text
    settings = dict(_PAGE_DIRECTIVE.findall(text))
    if unknown := settings.keys() - {"environment", "extended", "parse"}:
        raise SnippetError(f"{name}: unknown setting of a page: {', '.join(sorted(unknown))}")
    environment = settings.get("environment", "")
    if environment and not (ROOT / "tests" / "environments" / f"{environment}.txt").exists():
        raise SnippetError(f"{name}: there is no tests/environments/{environment}.txt")
    return Page(
        name=name,
        environment=environment,
        extended=bool(environment) or "extended" in settings,
        snippets=tuple(_snippets(name, text, reason=settings.get("parse"), is_checked=is_checked)),
    )


def _snippets(name: str, text: str, *, reason: str | None, is_checked: bool) -> Iterator[Snippet]:
    of_page = [] if reason is None else [Directive("parse", reason)]
    said = [*of_page]
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "html_block":
            if token.content.count("<!-- snippet:") != len(_DIRECTIVE.findall(token.content)):
                raise _at(name, token, "this directive does not end with `-->`")
            said += [Directive(*found) for found in _DIRECTIVE.findall(token.content)]
        elif token.type in ("fence", "code_block"):
            snippet = _snippet(name, token, tuple(said))
            if is_checked:
                _check(name, snippet)
            yield snippet
            said = [*of_page]
        elif said != of_page and token.type not in ("bullet_list_open", "list_item_open"):
            raise _at(name, token, "a directive stands right above a fenced block")
    if said != of_page:
        raise SnippetError(f"{name}: the last directive has no block below it")


def _snippet(name: str, token: Token, said: tuple[Directive, ...]) -> Snippet:
    info = _INFO.fullmatch(token.info.strip())
    if info is None or info["language"] not in _LANGUAGES:
        languages = ", ".join(_LANGUAGES)
        raise _at(name, token, f"a block begins with ``` and its language, one of {languages}")
    line = token.map[0] + 1 if token.map else 0
    return Snippet(
        line=line,
        language=info["language"],
        title=info["title"] or "",
        code=token.content,
        directives=said,
    )


def _at(name: str, token: Token, problem: str) -> SnippetError:
    return SnippetError(f"{name}:{token.map[0] + 1 if token.map else 0}: {problem}")


def _check(name: str, snippet: Snippet) -> None:
    where = f"{name}:{snippet.line}"
    for directive in snippet.directives:
        if directive.name not in _NAMES:
            raise SnippetError(f"{where}: unknown directive {directive.name!r}")
    if snippet.reason == "":
        raise SnippetError(f"{where}: `parse` needs a reason")
    try:
        _parse(snippet)
        for setup in snippet.said("setup"):
            _bash(setup)
    except (ValueError, SyntaxError, yaml.YAMLError) as error:
        raise SnippetError(f"{where}: {error}") from None


def _parse(snippet: Snippet) -> None:
    """Raises a ValueError or a SyntaxError for code that cannot be what it says it is."""
    if snippet.language == "sh":
        _bash(snippet.complete)
    elif snippet.language == "python":
        compile(snippet.complete, "snippet", "exec")
    elif snippet.language == "json":
        json.loads(snippet.complete)
    elif snippet.language == "toml":
        tomllib.loads(snippet.complete)
    elif snippet.language == "yaml":
        list(yaml.safe_load_all(snippet.complete))


def _bash(code: str) -> None:
    if _OUTSIDE_PATH.search(code):
        raise ValueError("no snippet writes outside of its directory: give the file as a block")
    parsed = subprocess.run(
        ["bash", "-n"],  # noqa: S607 - the shell of the session
        input=code,
        capture_output=True,
        text=True,
        check=False,
    )
    if parsed.returncode:
        raise ValueError(parsed.stderr.strip())


def main() -> None:
    """Reads every page."""
    problems = []
    for name in pages():
        try:
            read(name)
        except SnippetError as error:
            problems.append(str(error))
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
