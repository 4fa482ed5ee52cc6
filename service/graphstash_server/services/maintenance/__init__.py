"""Periodic maintenance of a server, and the checks that an administrator starts."""

__all__: list[str] = []
