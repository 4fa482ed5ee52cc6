"""Artifacts as a program sees them: verified payloads, from this host's disk or the server."""

__all__: list[str] = []
