"""Whose artifacts this job uses, and how it signs its own."""

__all__: list[str] = []
