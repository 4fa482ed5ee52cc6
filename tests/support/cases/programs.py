"""The text of a program, run in a process that has imported the program's compiler."""

from contextlib import redirect_stdout
from io import StringIO


def printed(*, text: str) -> list[str]:
    with redirect_stdout(StringIO()) as output:
        exec(compile(text, "program", "exec"), {"__name__": "__main__"})
    return output.getvalue().splitlines()
