"""What the server does, apart from HTTP. Every transaction is opened and closed here."""

__all__: list[str] = []
