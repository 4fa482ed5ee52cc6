"""Keep the tests of ranks independent of the time at which each rank compiles."""

from graphstash._compile import ranks


def wait_for_late_ranks() -> None:
    """Let a rank of this process that cannot reach the cache wait a minute for the next leader.

    Usually, such a rank waits one second and then compiles. On a busy machine, the ranks request a
    graph more than a second apart.
    """
    setattr(ranks, "_PASS_SECONDS", 60.0)  # noqa: B010 - mypy refuses the assignment
