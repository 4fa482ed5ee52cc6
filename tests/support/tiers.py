"""Parameters of tests. `make test` runs a few of them, and `make test-all` runs all."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def most_extended(values: Sequence[Any], *, quick: Sequence[Any]) -> list[Any]:
    """Return all of `values`, and mark those outside `quick` as extended."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.extended)
        for value in values
    ]


def each_of(versions: Mapping[str, str]) -> list[Any]:
    """Return versions of a compiler, and mark those outside `.venv` as extended.

    Args:
        versions: environment by version; empty for `.venv`.
    """
    return [
        pytest.param(version, marks=pytest.mark.extended) if name else version
        for version, name in versions.items()
    ]
