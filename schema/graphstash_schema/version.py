"""Version of the distribution, which contains client, server and schema. Light: imports nothing."""

__all__ = ["__version__"]

__version__ = "0.1.0"
