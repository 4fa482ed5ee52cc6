"""Runs under `graphstash run` for `graphstash doctor --probe`: imports compilers, reports hooks.

    python -m graphstash._doctor.witness <report> <module>...

The report is rewritten before every import, so that it tells where a Python that dies was.
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
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def main(report: Path, modules: list[str]) -> None:
    """Imports `modules` in their order and says what came of it in `report`."""
    heard = _Warnings()
    logging.getLogger("graphstash").addHandler(heard)
    told: dict[str, Any] = {"errors": [], "warnings": heard.told}
    for module in modules:
        told["importing"] = module
        report.write_text(json.dumps(told))
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - what compilers raise is what is asked here
            told["errors"].append(f"import {module}: {type(error).__name__}: {error}"[:500])
    # Whether the import alone has started the cache, as in a job that knows nothing of it.
    session = sys.modules.get("graphstash._session")
    current = session.install() if session is not None else None
    told["is_started"] = current is not None
    told["hooks"] = current.hooks_in_place if current is not None else {}
    report.write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
