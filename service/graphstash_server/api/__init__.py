"""HTTP calls. A call parses the request, calls services and renders the response."""

__all__: list[str] = []
