"""What jobs use beside artifacts: leases, manifests, pins."""

__all__: list[str] = []
