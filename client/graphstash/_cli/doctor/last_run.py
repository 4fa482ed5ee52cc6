"""Check of the last run on this host: programs that it could not share."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from graphstash._cli.doctor.findings import Finding, warn
from graphstash._cli.output import plural
from graphstash._process.run_record import read_last_run
from graphstash.config import ClientConfig
from graphstash.errors import Reason

__all__ = ["check_last_run"]

_MAX_CAUSES: Final = 4


def check_last_run(config: ClientConfig) -> Iterator[Finding]:
    """Report the most frequent causes for which the last run shared no program."""
    try:
        records = read_last_run(config.cache_dir)
    except OSError:  # the local tier's check reports it
        return
    causes = Counter(
        trouble.partition(": ")[2] or trouble
        for record in records or ()
        for _, trouble, _ in record.misses
        if trouble is not None and trouble.partition(":")[0] == Reason.UNSHAREABLE
    )
    for cause, count in causes.most_common(_MAX_CAUSES):
        yield warn(
            "last run",
            f"{plural(count, 'program')} {Reason.UNSHAREABLE}: {cause}",
            "every host compiles them: remove the cause, or accept it; "
            "`graphstash explain` names the programs",
        )
