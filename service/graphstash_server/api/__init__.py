"""HTTP calls. Each call only parses the request, calls a service and renders the response."""

__all__: list[str] = []
