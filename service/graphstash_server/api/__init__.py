"""The HTTP calls: they parse, call a service and answer; nothing else."""

__all__: list[str] = []
