"""End a command by SIGPIPE when the reader of its output has gone, as in `| head`.

Python ignores SIGPIPE, which would also end a process that writes to a closed connection.
"""

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["piped"]


class _ReaderGoneError(BaseException):
    """Nothing reads standard output. No OSError, because commands report an OSError."""


class _UnwritableError(BaseException):
    """Standard output cannot be written, for example to a full disk."""


class _Output(io.FileIO):
    _is_unwritable = False

    def write(self, data: Any) -> int:
        if self._is_unwritable:  # drop what is still in the buffer, or its flush fails again
            return len(data)
        try:
            return super().write(data)
        except BrokenPipeError:
            raise _ReaderGoneError from None
        except OSError as error:
            self._is_unwritable = True
            raise _UnwritableError(error.strerror) from None


@contextmanager
def piped() -> Iterator[None]:
    """Leave the block and end this process by SIGPIPE when nothing reads standard output.

    If standard output cannot be written for another reason, exit with an error that names it.
    """
    given = sys.stdout
    if not isinstance(given, io.TextIOWrapper) or given is not sys.__stdout__:
        yield  # the program that called the command has replaced it
        return
    sys.stdout = output = io.TextIOWrapper(
        io.BufferedWriter(_Output(given.fileno(), "w", closefd=False)),
        given.encoding,
        errors="replace",  # a terminal may lack a character, such as µ
        line_buffering=given.line_buffering,
        write_through=given.write_through,
    )
    try:
        try:
            yield
        finally:
            output.flush()
            sys.stdout = given
    except _ReaderGoneError:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    except _UnwritableError as error:
        from graphstash_schema.exit_status import error_line  # needed only here

        sys.exit(error_line(f"standard output: {error}"))
