"""Import compilers under `graphstash run` for `graphstash doctor --probe`, and report the hooks.

    python -m graphstash._cli.doctor.witness <report> <module>...

The report is rewritten before every import, so that it names the import that killed Python.
"""

import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

__all__ = ["main"]


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main(report: Path, modules: list[str]) -> None:
    """Import `modules` in order, and write the result to `report`."""
    heard = _Warnings()
    logging.getLogger("graphstash").addHandler(heard)
    content: dict[str, Any] = {"errors": [], "warnings": heard.messages}
    for module in modules:
        content["importing"] = module
        report.write_text(json.dumps(content))
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - any exception of a compiler is a result
            content["errors"].append(f"import {module}: {type(error).__name__}: {error}"[:500])
    # If an import has started the cache, the module is there, and `install` returns that session.
    session = sys.modules.get("graphstash._process.session")
    current = session.install() if session is not None else None
    content["is_started"] = current is not None
    content["hooks"] = current.hooks_in_place if current is not None else {}
    report.write_text(json.dumps(content))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
