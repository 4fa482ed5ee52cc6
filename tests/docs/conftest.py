"""Promise: every command and program in the documentation works, and its maps are complete."""

from snippets import SnippetError, pages, read


def pytest_terminal_summary(terminalreporter):
    """Lists what the documentation shows and the tests could only parse."""
    ran = {report.nodeid for report in terminalreporter.getreports("passed")}
    lines = []
    for name in pages():
        if not any(name in node for node in ran):
            continue
        try:
            page = read(name, is_checked=False)
        except SnippetError:
            continue
        lines += [
            f"{name}:{snippet.line}: {snippet.reason}"
            for snippet in page.snippets
            if snippet.reason is not None
        ]
    if lines:
        terminalreporter.section("snippets that were parsed and not run")
        for line in lines:
            terminalreporter.write_line(line)
