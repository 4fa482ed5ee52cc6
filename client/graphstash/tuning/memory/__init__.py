"""The team's memory of measurements: one search serves all hosts with the same problem."""

__all__: list[str] = []
