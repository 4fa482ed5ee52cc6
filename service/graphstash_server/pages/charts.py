"""Charts: SVG inside the page, drawn by pygal and colored by the page's style sheet.

pygal's scripts and styles are removed. Each page also shows the numbers in a table. Drawing takes
milliseconds, so templates call these functions, in a thread.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from xml.etree import ElementTree as ET

import pygal
from markupsafe import Markup
from pygal.style import Style

__all__ = ["bars", "lines"]

# pygal finds plug-ins, unused here, with an import hook of a kind that Python 3.12 dropped. Before,
# each failing import warns about it.
_FINDER: Final = getattr(pygal, "PluginImportFixer", ())
sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _FINDER)]

_SCRIPTED: Final = ("style", "script", "desc", "title")
_MAX_X_LABELS: Final = 6
_STYLE: Final = Style(label_font_size=13, major_label_font_size=13)
"""Determines the space for labels. The style sheet determines their look."""


def bars(
    name: str,
    labels: Sequence[str],
    values: Sequence[float],
    *,
    written: Callable[[float], str],
    marks: Sequence[float] | None = None,
) -> Markup:
    """Draw one bar per label. At most six labels are printed. `name` describes the chart to
    screen readers. `written` formats the values of the axis: `marks`, or by default round ones.
    """
    chart = pygal.Bar(**_options(labels, written), y_labels=marks)
    chart.add("", list(values))
    return _drawn(chart, name)


def lines(
    name: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
) -> Markup:
    """Draw one line per series, in percent. A value of None interrupts its line."""
    chart = pygal.Line(
        **_options(labels, "{:g} %".format),
        range=(0, 100),
        y_labels=[0, 50, 100],
        dots_size=2,
        allow_interruptions=True,
    )
    for title, values in series.items():
        chart.add(title, list(values))
    return _drawn(chart, name)


def _options(labels: Sequence[str], written: Callable[[float], str]) -> dict[str, Any]:
    step = max(1, -(-len(labels) // _MAX_X_LABELS))
    return {
        "width": 640,
        "height": 200,
        "margin": 4,
        "x_labels": ["" if place % step else label for place, label in enumerate(labels)],
        "show_legend": False,
        "value_formatter": written,
        "y_labels_major_count": 3,
        "show_minor_y_labels": False,
        "min_scale": 2,
        "max_scale": 4,
        "js": [],
        "style": _STYLE,
        "no_prefix": True,
        "truncate_label": -1,
        "spacing": 6,
        "include_x_axis": True,
    }


def _drawn(chart: Any, name: str) -> Markup:
    root = chart.render_tree()
    for parent in root.iter():
        for child in list(parent):
            if not isinstance(child.tag, str) or child.tag.rpartition("}")[2] in _SCRIPTED:
                parent.remove(child)
    for element in root.iter():
        element.attrib.pop("style", None)
    root.attrib.pop("id", None)
    root.attrib |= {"class": "chart", "role": "img", "aria-label": name}
    text = ET.tostring(root, encoding="unicode")
    return Markup(text)  # noqa: S704 - ElementTree has escaped the text
