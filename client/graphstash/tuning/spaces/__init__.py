"""Search spaces that JSON can describe: tilings of a GEMM, parameters with constraints, tables."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from graphstash.tuning.space import SearchSpace, SpaceError
from graphstash.tuning.spaces.gemm import GemmSpace
from graphstash.tuning.spaces.parameters import ParameterSpace
from graphstash.tuning.spaces.table import TableSpace

__all__ = ["GemmSpace", "ParameterSpace", "TableSpace", "from_description"]

_KINDS: Final[dict[str, tuple[set[str], Callable[[Mapping[str, Any]], SearchSpace]]]] = {
    "gemm": (
        {"m", "k", "n", "factors"},
        lambda data: GemmSpace(data["m"], data["k"], data["n"], factors=tuple(data["factors"])),
    ),
    "parameters": (
        {"parameters", "constraints"},
        lambda data: ParameterSpace(
            {each["name"]: each["values"] for each in data["parameters"]}, data["constraints"]
        ),
    ),
    "table": (
        {"names", "rows"},
        lambda data: TableSpace(data["names"], map(tuple, data["rows"])),
    ),
}


def from_description(description: Any) -> SearchSpace:
    """Return a space from its `describe()`, which may have passed through JSON.

    Raises:
        SpaceError: the description is invalid.
    """
    known = isinstance(description, Mapping) and str(description.get("space")) in _KINDS
    if not known:
        raise SpaceError(
            f"{str(description)[:200]} describes no space: `space` must be one of {sorted(_KINDS)}"
        )
    kind = description["space"]
    fields, build = _KINDS[kind]
    if (found := set(description) - {"space"}) != fields:
        raise SpaceError(
            f"the description of a space of kind {kind!r} has the fields {sorted(found)}; "
            f"it needs {sorted(fields)}"
        )
    try:
        return build(description)
    except (TypeError, KeyError) as error:
        raise SpaceError(
            f"the description of a space of kind {kind!r} is malformed: {error!r}"
        ) from error
