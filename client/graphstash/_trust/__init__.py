"""Sign the artifacts that this job publishes, and check the artifacts that it uses."""

__all__: list[str] = []
