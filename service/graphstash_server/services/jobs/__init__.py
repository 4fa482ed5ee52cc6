"""Services for jobs: leases, manifests, pins and reports of runs."""

__all__: list[str] = []
