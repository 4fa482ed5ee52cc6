"""`graphstash run` without the rest of the command line, so that it delays a job by only 0.05 s.

This module imports only light modules. It checks the options of `run` before the job starts. The
job validates its other settings when it imports its first compiler.
"""

import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from graphstash._process.run_name import COMMAND_VARIABLE, RUN_VARIABLE, joined, new_run
from graphstash.hooks import AUTOLOAD

__all__ = ["CannotRunError", "Launch", "read"]

_AUTOLOAD: Final = Path(__file__).parents[1] / "_process" / "autoload"

_NAME: Final = r"[a-z0-9][a-z0-9._-]{0,63}"

_VALUES: Final[Mapping[str, tuple[str, str]]] = {
    "--url": ("url", r"https?://[a-z0-9][a-z0-9.-]*(:[1-9][0-9]{0,3})?|none"),
    "--namespace": ("namespace", _NAME),
    "--job": ("job", _NAME),
    "--max-compile-seconds": ("max_compile_seconds", r"[1-9][0-9]{0,6}"),
    "--cache-dir": ("cache_dir", r"/[\w./-]+"),
    "--stats-file": ("stats_file", r"/[\w./-]+"),
}
"""Options with a value: the setting, and a pattern of values that are certainly valid."""

_FLAGS: Final[Mapping[str, tuple[str, str]]] = {
    "--read-only": ("read_only", "true"),
    "--read-write": ("read_only", "false"),
    "--quiet": ("summary", "false"),
    "-q": ("summary", "false"),
    "--explain": ("explain", "true"),
    "--fail-on-miss": ("fail_on_miss", "true"),
}

_ENDING: Final = ("GRAPHSTASH_FAIL_ON_MISS", "GRAPHSTASH_MAX_COMPILE_SECONDS")
"""Settings that may end a job. `graphstash run` then stays as the parent and ends all processes."""


class CannotRunError(Exception):
    """The command cannot start.

    Attributes:
        status: exit status, as a shell would return it.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class Launch(NamedTuple):
    """A command and its settings."""

    command: Sequence[str]
    settings: Mapping[str, str]

    def start(self) -> NoReturn:
        """Replace this process with the command (exec), so that signals need no forwarding.

        If a setting may end the job early, run the command as a child instead and wait for it.

        Raises:
            CannotRunError: the program does not exist, or cannot be run.
        """
        program = shutil.which(self.command[0])
        if program is None:
            raise CannotRunError(f"{self.command[0]}: not found on PATH", status=127)
        environment = os.environ | {
            f"GRAPHSTASH_{name.upper()}": value for name, value in self.settings.items()
        }
        environment |= {"PYTHONPATH": _python_path(), AUTOLOAD: "1", RUN_VARIABLE: new_run()}
        environment[COMMAND_VARIABLE] = joined(self.command)
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # the job would ignore them, as Python does
            signal.signal(number, signal.SIG_DFL)
        try:
            if any(environment.get(name) for name in _ENDING):
                from graphstash._process.run_end import may_end, supervise  # few jobs need it

                if may_end(environment):
                    supervise(program, self.command, environment)
            os.execve(program, list(self.command), environment)  # noqa: S606 - this is the job
        except OSError as error:
            raise CannotRunError(f"{program}: {error.strerror}", status=126) from None


def read(arguments: Sequence[str]) -> Launch | None:
    """Parse the arguments of `graphstash run`.

    Returns None if only the full command line can handle them: help, an unknown option, or a value
    that may be invalid.
    """
    settings = {}
    rest = iter(range(len(arguments)))
    for at in rest:
        option, equals, value = arguments[at].partition("=")
        if arguments[at] in _FLAGS:
            name, value = _FLAGS[arguments[at]]
            settings[name] = value
        elif option in _VALUES:
            name, right = _VALUES[option]
            if not equals:
                value = arguments[at + 1] if next(rest, None) is not None else ""
            if re.fullmatch(right, value) is None:
                return None
            settings[name] = value
        else:
            command = arguments[at + (arguments[at] == "--") :]
            is_one = bool(command) and not command[0].startswith("-")
            return Launch(command, settings) if is_one else None
    return None


def _python_path() -> str:
    rest = os.environ.get("PYTHONPATH")
    # Keep empty entries, which mean the working directory: `PYTHONPATH=$PYTHONPATH:/lib` often has
    # one.
    entries = [entry for entry in rest.split(os.pathsep) if entry != str(_AUTOLOAD)] if rest else []
    return os.pathsep.join([str(_AUTOLOAD), *entries])
