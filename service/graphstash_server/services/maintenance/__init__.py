"""What a server does by itself, and the checks that an administrator starts."""

__all__: list[str] = []
