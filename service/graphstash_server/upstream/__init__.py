"""A region: a server that answers from its own store, and asks its upstream on a miss.

    region      builds the parts below, and runs them
    access      callers: the upstream says who a token belongs to
    leases      a lease is granted here, and then by the upstream
    publishes   the durable queue of artifacts for the upstream
    following   policies and withdrawals of the upstream, and whether it may be one
    fetches     downloads a missing artifact once
    setting_aside   copies that the upstream may have withdrawn
    claims      claims of a process on a download or a publish
    client      HTTP calls, and whether the upstream answers
    ownership   the other side: what a server tells its regions

The upstream owns every namespace (docs/decisions/0066). A server without an upstream has no
`Region`, and only `ownership` of this package.
"""

__all__: list[str] = []
