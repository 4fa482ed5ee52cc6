"""The graphstash server: stores compiled artifacts and serves them over HTTP."""

from graphstash_schema.version import __version__

__all__ = ["__version__"]
