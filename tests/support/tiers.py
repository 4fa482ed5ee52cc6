"""Parameters of tests, of which `make test` takes a few and `make test-all` all."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

__all__ = ["each_of", "most_extended"]


def most_extended(values: Sequence[Any], *, quick: Sequence[Any]) -> list[Any]:
    """All of `values`; those that are not in `quick` are extended."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.extended)
        for value in values
    ]


def each_of(versions: Mapping[str, str]) -> list[Any]:
    """Versions of a compiler.

    Those that `.venv` does not hold are extended.

    Args:
        versions: environment by version; empty for `.venv`.
    """
    return [
        pytest.param(version, marks=pytest.mark.extended) if name else version
        for version, name in versions.items()
    ]
