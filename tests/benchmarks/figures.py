"""Figures: the samples of a benchmark, as tables for people and JSON for programs.

A figure is a cell of a table and holds one sample per round. It is shown as `median (min to max)`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# A report in a file or a log has room for the widest table.
console = Console() if sys.stdout.isatty() else Console(width=130)


@dataclass
class Figures:
    part: str
    settings: dict
    tables: dict[str, dict[str, dict[str, list[float] | str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    load_before: tuple[float, ...] = field(default_factory=os.getloadavg)

    def add(self, table, row, column, sample):
        self._row(table, row).setdefault(column, []).append(sample)

    def say(self, table, row, column, text):
        """Put text into the place of a figure."""
        self._row(table, row)[column] = text

    def note(self, text):
        if text not in self.notes:
            self.notes.append(text)

    def write(self, output):
        """Print the tables, and write them as JSON."""
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
    """Return the columns of a table, in the order of their first use."""
    return list(dict.fromkeys(column for cells in rows.values() for column in cells))


def summary(cell):
    if isinstance(cell, str):
        return cell
    return {"median": statistics.median(cell), "min": min(cell), "max": max(cell), "samples": cell}


def show(cell):
    """Return `median (min to max)`, or the value alone if all rounds agree."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, list):
        cell = summary(cell)
    low, high = number(cell["min"]), number(cell["max"])
    return low if low == high else f"{number(cell['median'])} ({low} to {high})"


def table_of(rows, show=show):
    columns = columns_of(rows)
    lines = [["", *columns], ["---", *["---:"] * len(columns)]]
    for label, cells in rows.items():
        lines.append([label, *(show(cells.get(column, "")) for column in columns)])
    return [f"| {' | '.join(line)} |" for line in lines]


def number(value):
    """Return a number with three digits, or with more if they precede the point."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


@dataclass
class Part:
    """A running part of `make bench`.

    Attributes:
        settings: options of the command line.
        figures: its figures.
        directory: workspace on the disk of this repository, because /tmp may be in memory; removed
            at the end.
        server: `graphstash serve`; None if the part starts its own.
    """

    settings: argparse.Namespace
    figures: Figures
    directory: Path
    server: Any
    bar: Progress

    def rounds(self, first=0):
        rounds = range(first, self.settings.rounds)
        return self.bar.track(rounds, description=self.figures.part)

    def now(self, text):
        """Show the present step."""
        self.bar.update(self.bar.task_ids[-1], description=text)


@contextmanager
def part(name, about, *, rounds, extra=(), has_server=True):
    """Read the options, make a workspace, and write the figures at the end.

    Args:
        about: docstring of the part's module.
        rounds: default number of rounds.
        extra: name, default and help of further options, which are integers.
        has_server: whether to start one server for the whole part.
    """
    from support.server import Server  # other benchmarks lack its requirements

    parser = argparse.ArgumentParser(
        prog=f"benchmarks.{name}", description=about.partition("\n")[0]
    )
    parser.add_argument("--output", type=Path, default=Path(f"build/bench-{name}.json"))
    for option, default, text in (("rounds", rounds, "samples of every figure"), *extra):
        parser.add_argument(f"--{option}", type=int, default=default, help=f"{text}; {default}")
    settings = parser.parse_args()
    figures = Figures(name, {key: each for key, each in vars(settings).items() if key != "output"})
    build = Path("build").absolute()
    build.mkdir(exist_ok=True)
    with ExitStack() as stack:
        place = tempfile.TemporaryDirectory(prefix="bench-", dir=build)
        directory = Path(stack.enter_context(place))
        server = stack.enter_context(Server(directory / "server")) if has_server else None
        yield Part(settings, figures, directory, server, stack.enter_context(progress()))
    figures.write(settings.output)


def progress():
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def rotated(items, number):
    """Return the items in an order that starts with another item each round."""
    items = list(items)
    number %= len(items)
    return items[number:] + items[:number]
