"""Run one case in a process of its own, and write the value that it returns as JSON.

    python run_case.py REPORT MODULE:FUNCTION [KEYWORD ARGUMENTS AS JSON]

A case is a typed function of a module in `support.cases`. Its keyword arguments and its return
value must be JSON. The process imports the case's module after the hooks are installed, so a case
module imports its compiler at the top, as training scripts do. `case_arguments` builds the command
line for `Jobs.start(..., script=RUN_CASE)`.
"""

import importlib
import json
import sys
from pathlib import Path

RUN_CASE = Path(__file__)


def case_arguments(case: str, **keywords: object) -> tuple[str, str]:
    """Return the command line after the report's path.

    Args:
        case: `module:function`, with the module relative to `support.cases`.
        keywords: arguments of the function; paths become strings.
    """
    return case, json.dumps(keywords, default=str)


def main(report: str, case: str, keywords: str = "{}") -> None:
    module, _, function = case.partition(":")
    run = getattr(importlib.import_module(f"support.cases.{module}"), function)
    reported = run(**json.loads(keywords))
    Path(report).write_text(json.dumps(reported))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # even with PYTHONSAFEPATH
    main(*sys.argv[1:])
