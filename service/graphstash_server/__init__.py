"""The graphstash server: stores compiled artifacts and serves them over HTTP."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("graphstash")
"""Version of the distribution, which contains client and server."""
