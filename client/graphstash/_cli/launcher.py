"""`graphstash run` without the rest of the command line. Delays a job by less than 0.1 s.

This module imports only light modules, and the settings only if the command line has options of
`run`, which it validates. The job validates its environment when it imports its first compiler.
"""

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from graphstash._process.run_name import COMMAND_VARIABLE, RUN_VARIABLE, encode_command, new_run
from graphstash.hooks.installing import AUTOLOAD

__all__ = ["CannotRunError", "Launch", "as_variables", "read"]

_AUTOLOAD: Final = Path(__file__).parents[1] / "_process" / "autoload"

_ENDING: Final = ("GRAPHSTASH_FAIL_ON_MISS", "GRAPHSTASH_MAX_COMPILE_SECONDS")
"""Settings that may end the job. With one of them, `graphstash run` stays as the parent process and
ends all processes of the job."""

_OFF: Final = ("", "0", "0.0", "false", "no", "off", "f", "n")


class CannotRunError(Exception):
    """The command cannot start.

    Attributes:
        status: exit status that a shell would return.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class Launch(NamedTuple):
    """A command to run, and values of settings as environment text."""

    command: Sequence[str]
    settings: Mapping[str, str]

    def start(self) -> NoReturn:
        """Replace this process with the command (exec), so that signals need no forwarding.

        If a setting may end the job early, run the command as a child and wait for it.

        Raises:
            CannotRunError: the program does not exist, or is not executable.
        """
        name = self.command[0]
        program = shutil.which(name)
        if program is None:
            if os.sep not in name:
                raise CannotRunError(f"{name}: not found on PATH", status=127)
            program = name  # exec says why: there is no such file, or it cannot be run
        environment = os.environ | {
            f"GRAPHSTASH_{name.upper()}": value for name, value in self.settings.items()
        }
        environment |= {"PYTHONPATH": _python_path(), AUTOLOAD: "1", RUN_VARIABLE: new_run()}
        environment[COMMAND_VARIABLE] = encode_command(self.command)
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; the job must not
            signal.signal(number, signal.SIG_DFL)
        try:
            if any(environment.get(name, "").strip().lower() not in _OFF for name in _ENDING):
                from graphstash._process.run_end import supervise  # few jobs need it

                supervise(program, self.command, environment)
            os.execve(program, list(self.command), environment)  # noqa: S606 - this is the job
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError) and not Path(program).exists()
            status = 127 if is_missing else 126  # a script's interpreter may be missing instead
            raise CannotRunError(f"{program}: {error.strerror}", status=status) from None


def read(arguments: Sequence[str]) -> Launch | None:
    """Parse the arguments of `graphstash run`.

    Returns None to leave them to the full command line, which shows help or an error: an option is
    unknown, a value is invalid or missing, or there is no command.
    """
    settings: Mapping[str, str] = {}
    rest = list(arguments)
    if rest and rest[0] != "--" and rest[0].startswith("-"):
        from graphstash.errors import ConfigError

        try:
            settings = as_variables(_pop_options(rest))
        except (ConfigError, LookupError):
            return None
    command = rest[rest[:1] == ["--"] :]
    return Launch(command, settings) if command and not command[0].startswith("-") else None


def as_variables(given: Mapping[str, Any]) -> dict[str, str]:
    """Validate settings, and return their values as text for the job's environment.

    Variables of this environment are not validated: the job reports invalid ones.

    Raises:
        ConfigError: a value is invalid.
    """
    from graphstash.config import NO_SERVER, ClientConfig

    config = ClientConfig.load({}, **given)
    values = {name: getattr(config, name) for name in given}
    if not values.get("url", NO_SERVER):
        values["url"] = NO_SERVER
    return {name: _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _pop_options(words: list[str]) -> dict[str, Any]:
    """Remove the options of `run` from the front of `words`, and return their values by setting.

    Raises:
        LookupError: an option is unknown, or lacks its value.
    """
    from graphstash.config import ClientConfig

    declared = ClientConfig.options()
    flags = {
        flag: (name, value)
        for name, option in declared.items()
        for flag, value in option.flags.items()
    }
    valued = {option.spelled(name): name for name, option in declared.items() if not option.flags}
    given: dict[str, Any] = {}
    while words and words[0].startswith("-") and words[0] != "--":
        word = words.pop(0)
        if word in flags:
            name, flag_value = flags[word]
            given[name] = flag_value
        else:
            option, equals, value = word.partition("=")
            given[valued[option]] = value if equals else words.pop(0)
    return given


def _python_path() -> str:
    rest = os.environ.get("PYTHONPATH")
    # Keep empty entries. They mean the working directory, as in `PYTHONPATH=$PYTHONPATH:/lib`.
    entries = [entry for entry in rest.split(os.pathsep) if entry != str(_AUTOLOAD)] if rest else []
    return os.pathsep.join([str(_AUTOLOAD), *entries])
