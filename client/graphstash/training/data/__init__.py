"""Batches, a run's position in its data, and loading ahead."""

__all__: list[str] = []
