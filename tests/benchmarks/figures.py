"""Figures: what a benchmark measured, as tables for people and JSON for programs.

A figure is a cell of a table and holds one sample per round; it is shown as `median (min to max)`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["Figures", "columns_of", "console", "options", "progress", "show", "workspace"]

# A report in a file or a log has room for the widest table.
console = Console() if sys.stdout.isatty() else Console(width=130)


@dataclass
class Figures:
    """The results of one part."""

    part: str
    settings: dict
    tables: dict[str, dict[str, dict[str, list[float] | str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    load_before: tuple[float, ...] = field(default_factory=os.getloadavg)

    def add(self, table, row, column, sample):
        """Adds one round's sample."""
        self._row(table, row).setdefault(column, []).append(sample)

    def say(self, table, row, column, text):
        """Puts words where a figure would be."""
        self._row(table, row)[column] = text

    def note(self, text):
        if text not in self.notes:
            self.notes.append(text)

    def write(self, output):
        """Prints the tables and writes them as JSON."""
        for title, rows in self.tables.items():
            shown = Table(title=title, title_justify="left")
            shown.add_column("", no_wrap=True)
            columns = columns_of(rows)
            for column in columns:
                shown.add_column(column, justify="right")
            for row, cells in rows.items():
                texts = (show(cells.get(column, "")) for column in columns)
                shown.add_row(row, *(text.replace(" (", "\n(") for text in texts))
            console.print(shown)
        for note in self.notes:
            console.print(f"- {note}", highlight=False)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(self.as_json(), indent=2) + "\n")
        console.print(f"written: {output}")

    def as_json(self):
        return {
            "part": self.part,
            "settings": self.settings,
            "load_before": self.load_before,
            "load_after": os.getloadavg(),
            "notes": self.notes,
            "tables": {
                title: {
                    row: {column: summary(cell) for column, cell in cells.items()}
                    for row, cells in rows.items()
                }
                for title, rows in self.tables.items()
            },
        }

    def _row(self, table, row):
        return self.tables.setdefault(table, {}).setdefault(row, {})


def columns_of(rows):
    """The columns of a table, in the order of their first use."""
    return list(dict.fromkeys(column for cells in rows.values() for column in cells))


def summary(cell):
    if isinstance(cell, str):
        return cell
    return {
        "median": statistics.median(cell),
        "min": min(cell),
        "max": max(cell),
        "samples": cell,
    }


def show(cell):
    """`median (min to max)`, or just the value when all rounds agree."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, list):
        cell = summary(cell)
    low, high = number(cell["min"]), number(cell["max"])
    return low if low == high else f"{number(cell['median'])} ({low} to {high})"


def number(value):
    """Three digits, more only when they stand before the point."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def options(part, description, *, rounds, extra=()):
    """The options that every part has; `extra` are (name, default, help) of whole numbers."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{part}", description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}")
    parser.add_argument("--output", type=Path, default=Path(f"build/bench-{part}.json"))
    for name, default, text in extra:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; {default}")
    return parser.parse_args()


def progress():
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


@contextmanager
def workspace():
    """A directory on the disk of this repository, which is removed; memory is no disk."""
    build = Path("build").absolute()
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=build) as name:
        yield Path(name)
