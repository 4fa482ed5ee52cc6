"""A process that computes the keys of drawn programs in turn.

    python -m compilers.wrong_hits.generated.worker COMPILER PAIRS SEED

Prints a line for each program: its meaning, its key, the reason for no key, and the compiled text
if the program reports one. PYTHONHASHSEED also decides the layout and the order of the programs.
Another process therefore computes the same keys only if neither matters.
"""

import importlib
import json
import linecache
import os
import random
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from compilers.wrong_hits.generated.programs import draw

__all__: list[str] = []


def main() -> None:
    name, pairs, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    output = os.dup(1)
    os.dup2(2, 1)  # compilers may print to standard output
    compiler: Any = importlib.import_module(f"compilers.wrong_hits.generated.{name}")
    layout = random.Random(os.environ["PYTHONHASHSEED"])
    programs = list(draw(compiler.AXES, compiler.meaning, pairs=pairs, seed=seed))
    layout.shuffle(programs)
    ask = compiler.prepare()
    path = str(Path("program.py").absolute())
    with os.fdopen(output, "w") as answers:
        for program in programs:
            text = compiler.text(program.parts, layout)
            linecache.cache[path] = (len(text), None, text.splitlines(True), path)
            module = sys.modules["program"] = types.ModuleType("program")
            module.__file__ = path
            try:
                key, *rest = ask(compile(text, path, "exec"), vars(module))
            except Exception:
                key, *rest = "", f"failed:\n{traceback.format_exc()}\n{text}", ""
            answers.write(json.dumps([program.meaning, key, *rest]) + "\n")


if __name__ == "__main__":
    main()
