"""The training loop `train`, its single step, and the events that it reports."""

__all__: list[str] = []
