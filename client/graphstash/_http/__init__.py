"""The server, call by call: every wait bounded, every answer checked, one error tree."""

__all__: list[str] = []
