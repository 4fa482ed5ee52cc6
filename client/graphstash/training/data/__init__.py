"""Batches, the position of a run in them, and loading them ahead."""

__all__: list[str] = []
