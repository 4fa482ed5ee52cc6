"""Run the snippets of one page of the documentation as one bash session, in a new directory.

CONTRIBUTING.md describes the authors' convention, and docs/tools/snippets.py reads the pages.
"""

import getpass
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from snippets import ROOT, Page, Snippet

from support.command_checker import PROGRAMS
from support.environments import python_of
from support.ports import reserved_port

_SUPPORT = Path(__file__).parent
_SERVER_ADDRESS = re.compile(r"(https?://)[\w.-]+:8077")
_MARK = "--- snippet "
_SHORT_REPOSITORY = "git+<this repository>"


class Result:
    """Status and output of a session; a line precedes the output of each block."""

    def __init__(self, status: int, output: str) -> None:
        self.status = status
        self.output = output


def run_page(page: Page, directory: Path) -> Result:
    """Run a page from its first block to its last, or to the first that fails."""
    port = reserved_port()
    home = directory / "home"
    work = directory / "work"
    for each in (home, work, directory / "tmp"):
        each.mkdir(parents=True)
    _share_headers(directory / "tmp")
    (work / "client").mkdir()
    (work / "client" / "examples").symlink_to(ROOT / "client" / "examples")
    script = directory / "session.sh"
    script.write_text(_script(page, port=port, directory=directory))
    with (directory / "output").open("w+b") as output:
        session = subprocess.Popen(
            ["bash", str(script)],
            cwd=work,
            env=_environment(page, port=port, directory=directory),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            session.wait()
        finally:  # end every process of the page
            with suppress(ProcessLookupError):
                os.killpg(session.pid, signal.SIGKILL)
        output.seek(0)
        result = Result(session.returncode, output.read().decode(errors="replace"))
    return result if result.status else _compared(page, result)


def _share_headers(directory: Path) -> None:
    """Let pages share the header that torch precompiles once for each user of a machine."""
    folder = Path(f"torchinductor_{getpass.getuser()}", "precompiled_headers")
    shared = tempfile.gettempdir() / folder
    shared.mkdir(parents=True, exist_ok=True)
    (directory / folder).parent.mkdir()
    (directory / folder).symlink_to(shared)


def _compared(page: Page, result: Result) -> Result:
    """Return the result, with another status if a block did not print the text of the page."""
    for snippet in page.snippets:
        _, _, printed = result.output.partition(f"{_mark(page, snippet)}\n")
        printed = printed.partition(f"\n{_MARK}")[0]
        for text in snippet.said("prints"):
            if text not in printed:
                message = f"{result.output}\n{page.name}:{snippet.line} did not print: {text}"
                return Result(1, message)
    return result


def _mark(page: Page, snippet: Snippet) -> str:
    return f"{_MARK}{page.name}:{snippet.line}"


def _environment(page: Page, *, port: int, directory: Path) -> dict[str, str]:
    venv = Path(sys.executable).parent
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GRAPHSTASH_", "XDG_")) and name != "PYTHONPATH"
    }
    return inherited | {
        "HOME": str(directory / "home"),
        "TMPDIR": str(directory / "tmp"),
        "PATH": f"{python_of(page.environment).parent}:{venv}:{os.environ['PATH']}",
        "SNIPPET_PORT": str(port),
        # A page is for an accelerator; its programs run on the CPU here.
        "PJRT_DEVICE": "CPU",
        "JAX_PLATFORMS": "cpu",
        # Otherwise torch tests each instruction set in a process that imports torch.
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "COLUMNS": "120",
        "SNIPPET_ROOT": str(ROOT),
        "SNIPPET_VENV": str(venv),
        "SNIPPET_HOME": os.environ.get("HOME", "/"),
        "SNIPPET_CHECKERS": str(_checkers(directory / "checkers")),
    }


def _script(page: Page, *, port: int, directory: Path) -> str:
    parts = [f". {shlex.quote(str(_SUPPORT / 'snippets.sh'))}"]
    earlier = ""
    for snippet in page.snippets:
        code = _here(snippet.complete, port)
        parts.append(f"echo; echo '{_mark(page, snippet)}'")
        parts += [_here(setup, port) for setup in snippet.said("setup")]
        if snippet.title:
            parts.append(_write(snippet.title, code))
        elif snippet.language == "sh":
            parts.append(_shell(snippet, code, directory))
        elif snippet.language == "python":
            if "continue" in [each.name for each in snippet.directives]:
                code = f"{earlier}\n{code}"
            earlier = code
            parts.append(_python(snippet, code))
    return "\n".join(parts) + "\n"


def _shell(snippet: Snippet, code: str, directory: Path) -> str:
    if snippet.reason is not None:
        block = directory / f"block-{snippet.line}.sh"
        block.write_text(code)
        return f"_only_parse {shlex.quote(str(block))}"
    for status in snippet.said("exit"):
        return f"set +e\n{code}\n_status=$?; set -e; _fail_unless {status} $_status"
    return code


def _python(snippet: Snippet, code: str) -> str:
    name = f".snippet-{snippet.line}.py"
    if snippet.reason is not None:
        return f"{_write(name, code)}\npython -m py_compile {name}"
    run = f"python {name}"
    for status in snippet.said("exit"):
        run = f"_status=0; {run} || _status=$?; _fail_unless {status} $_status"
    return f"{_write(name, code)}\n{run}"


def _write(name: str, code: str) -> str:
    quoted = shlex.quote(name)
    return f'mkdir -p "$(dirname {quoted})"\ncat >{quoted} <<"_END_OF_BLOCK"\n{code}_END_OF_BLOCK'


def _here(code: str, port: int) -> str:
    """Return the code with the address of the session's server and the path of this checkout."""
    code = _SERVER_ADDRESS.sub(rf"\g<1>127.0.0.1:{port}", code)
    return code.replace(_SHORT_REPOSITORY, ROOT.as_uri())


def _checkers(directory: Path) -> Path:
    """Return a directory with a program for each name that a parse-only block may call."""
    directory.mkdir()
    checker = _SUPPORT / "command_checker.py"
    for name in PROGRAMS:
        program = directory / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {checker} {name} "$@"\n')
        program.chmod(0o755)
    return directory
