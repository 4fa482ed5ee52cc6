"""The graphstash server: keeps compiled artifacts and hands them out over HTTP."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("graphstash")
"""Version of the distribution; client and server are released together."""
