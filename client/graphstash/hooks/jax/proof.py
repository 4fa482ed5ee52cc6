"""Prove that a key made without a device is the key that a job on the device will look up.

A job on a TPU publishes a description with each artifact. A host without a TPU compares the
versions, libtpu, flags, settings, topology and order of devices in it with its own. If all are
equal, both hosts make the same key from the same computation. The proof does not cover the
computation: the job must trace the same function.
"""

from itertools import islice
from typing import TYPE_CHECKING, Final

from graphstash._compile.request import CompileRequest
from graphstash._http.client import ServerClient
from graphstash.hooks.jax.fingerprint import device_key
from graphstash.hooks.jax.program_text import settings
from graphstash_schema.listing import MAX_DETAILED_ARTIFACTS, ArtifactQuery, ListOrder
from graphstash_schema.names import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphstash.hooks.jax.compiling import Program

__all__ = ["why_unproved"]

_MAX_COMPARED: Final = 30
"""Newest artifacts that are compared, in each namespace that the job reads."""

_SHOWN_CHARACTERS: Final = 60

_PARTS: Final = frozenset(
    {
        *("jax", "jaxlib", "device_kind", "environment_before"),
        *("libtpu", "libtpu_library", "megacore", "partitioned_by_rows"),
        *("flag_files", "option_files", "client_options"),
    }
)
"""Parts of a TPU program's fingerprint, without JAX's key."""


def why_unproved(server: ServerClient, request: CompileRequest, program: "Program") -> str:
    """Return why no artifact proves the key of a program, or "" if one does.

    Raises:
        CacheError: The server does not answer.
    """
    here = device_key(program)
    if not here:
        return "this version of JAX hashes its devices in an unknown way"
    ours = _ingredients({**settings(), **request.parts, "device_key": here})
    query = ArtifactQuery(
        order=ListOrder.NEWEST,
        limit=MAX_DETAILED_ARTIFACTS,
        kind=request.key.kind,
        device_type=request.key.device_type,
        label=request.label,
        details=True,
    )
    nearest: list[str] | None = None
    for namespace in server.config.readable:
        for each in islice(server.every_artifact(query, namespace=namespace), _MAX_COMPARED):
            parts = each.description.parts if each.description is not None else {}
            if not parts.get("device_key"):  # compiled without a device, or by an earlier release
                continue
            theirs = _ingredients(parts)
            differing = [
                f"{name} ({_format_part(ours, name)} here, {_format_part(theirs, name)} there)"
                for name in sorted(ours.keys() | theirs.keys())
                if ours.get(name) != theirs.get(name)
            ]
            if not differing:
                return ""
            if nearest is None or len(differing) < len(nearest):
                nearest = differing
    if nearest is None:
        return (
            f"no job with a {request.key.device_type} has published {request.label}: "
            "run the job there once"
        )
    return f"the nearest job with a {request.key.device_type} differs in {', '.join(nearest)}"


def _ingredients(parts: "Mapping[str, str]") -> dict[str, str]:
    """Return what the key is made of, except the computation and its own options."""
    chosen = {
        name: value
        for name, value in parts.items()
        if name in _PARTS or name.startswith("setting.")
    }
    words = (word.partition("=") for word in parts.get("device_key", "").split())
    return chosen | {name: digest for name, _, digest in words}


def _format_part(parts: "Mapping[str, str]", name: str) -> str:
    return printable(parts.get(name, "nothing"), most=_SHOWN_CHARACTERS)
