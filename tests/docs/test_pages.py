"""Every page of the documentation is a session that works from its first block to its last."""

import shlex

import pytest
from snippets import SnippetError, pages, read

from support.command_checker import check
from support.snippets import run_page

_EXTENDED = [pytest.mark.extended, pytest.mark.timeout(900)]


def _parameters():
    for name in pages():
        try:
            page = read(name, is_checked=False)
        except SnippetError:
            yield pytest.param(name)  # the test says what is wrong
            continue
        if page.snippets:
            yield pytest.param(name, marks=_EXTENDED if page.extended else [])


@pytest.mark.parametrize("name", list(_parameters()))
def test_every_snippet_of_a_page_runs_in_order(name, tmp_path):
    result = run_page(read(name), tmp_path)
    assert result.status == 0, result.output[-6000:]


def _page(text):
    return read("docs/page.md", text)


def test_the_blocks_of_a_page_share_one_shell_and_one_directory(tmp_path):
    """A server and the commands that reach it: README.md."""
    page = _page(
        '```python title="hello.py"\nprint("hello from a file")\n```\n\n'
        "```sh\nexport GRAPHSTASH_URL=http://cache.internal:8077\n```\n\n"
        "<!-- snippet: prints hello from a file -->\n"
        "```sh\npython hello.py\n```\n\n"
        "<!-- snippet: before\nimport os\n-->\n"
        "```python\nprint(os.environ['GRAPHSTASH_URL'])\n```\n\n"
        "<!-- snippet: replace <status> 1 -->\n"
        "<!-- snippet: exit 1 -->\n"
        "```sh\n(exit <status>)\n```\n"
    )
    result = run_page(page, tmp_path)
    assert result.status == 0, result.output
    assert "http://127.0.0.1:" in result.output


@pytest.mark.parametrize(
    "block",
    [
        "```sh\nfalse | cat\n```",
        "```sh\npip install 'graphstash[no-such-extra] @ git+<this repository>'\n```",
        "```python\nraise SystemExit(3)\n```",
        "<!-- snippet: exit 1 -->\n```sh\ntrue\n```",
        "<!-- snippet: prints 1 hit -->\n```sh\necho 2 hits\n```\n\n```sh\necho 1 hit\n```",
        "<!-- snippet: parse: needs containers -->\n```sh\nno-such-program\n```",
    ],
)
def test_a_snippet_that_fails_fails_its_page(block, tmp_path):
    assert run_page(_page(f"{block}\n"), tmp_path).status != 0


@pytest.mark.parametrize(
    "command",
    [
        "graphstash serve --no-such-option",
        "graphstash no-such-command",
        "graphstash run -- python no_such_file.py",
        "docker compose --file docker/no-such-file.yaml up --detach",
        "docker compose --file docker/compose.yaml restart no-such-service",
        "docker compose --file docker/compose.yaml exec server-1 graphstash fsck --no-such-option",
        "make no-such-target",
        "no-such-program",
    ],
)
def test_impossible_command_in_parsed_snippet_is_refused(command):
    with pytest.raises(SystemExit, match=r"[a-z]"):
        check(*shlex.split(command))


def test_parsed_snippet_is_not_run(tmp_path):
    page = _page(
        "<!-- snippet: parse: needs containers -->\n"
        "```sh\n"
        "TOKEN=$(sudo graphstash token create --grant 'admin:*' --description admin)\n"
        "```\n"
    )
    result = run_page(page, tmp_path)
    assert result.status == 0, result.output
    assert not (tmp_path / "home" / ".local").exists()


@pytest.mark.parametrize(
    "text",
    [
        "```\nno language\n```",
        "    indented code",
        "<!-- snippet: parse: -->\n```sh\ntrue\n```",
        "<!-- snippet: no-such-directive -->\n```sh\ntrue\n```",
        "<!-- snippet: setup\ntrue\n-->\n\nText between.\n\n```sh\ntrue\n```",
        "```sh\nif\n```",
        "```sh\necho danger > /etc/passwd\n```",
        "```python\ndef\n```",
        "```json\n{\n```",
        "<!-- snippets: environment no-such-environment -->\n\nText.",
    ],
)
def test_a_page_that_breaks_the_convention_is_refused(text):
    with pytest.raises(SnippetError):
        _page(f"{text}\n")
