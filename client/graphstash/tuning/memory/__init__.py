"""The team's memory of what was measured: a kernel is tuned once for all who have the problem."""

__all__: list[str] = []
