"""The team's memory: measurements and schedules that all hosts share."""

__all__: list[str] = []
