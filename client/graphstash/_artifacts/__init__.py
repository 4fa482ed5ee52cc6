"""Verified artifact payloads, from this host's disk or from the server."""

__all__: list[str] = []
