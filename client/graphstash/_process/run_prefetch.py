"""prefetch_once: download what earlier runs of a job used, in one process of each run on a host."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from graphstash._artifacts.stash import Stash
from graphstash.errors import CacheError
from graphstash_schema import ManifestName

__all__ = ["prefetch_once"]

_log = logging.getLogger("graphstash")


def prefetch_once(
    stash: Stash,
    manifests: Sequence[ManifestName],
    *,
    is_stopped: Callable[[], bool],
    fetched: Callable[[int], None],
) -> None:
    """Prefetch the first manifest that exists, unless another process of the run does or has.

    Args:
        stash: cache that takes the downloads. The caller closes it.
        manifests: names of the manifests.
        is_stopped: whether to stop early. Then a later process of the run repeats the prefetch.
        fetched: called with the size of each downloaded artifact in bytes.
    """
    if stash.local.is_private:  # processes could not share the downloads
        return
    claim = stash.downloads.claim(f"prefetch-{manifests[0]}")
    if claim is None:
        return
    if claim.text:  # another process has finished the prefetch
        claim.close()
        return
    from graphstash._artifacts.prefetch import Prefetch

    is_cut_short = False

    def stops() -> bool:
        nonlocal is_cut_short
        is_cut_short = is_stopped()
        return is_cut_short

    prefetch = Prefetch(
        stash,
        # Use half of the tier: a larger prefetch would evict its own downloads.
        limit_bytes=min(stash.config.prefetch_limit, stash.config.local_limit // 2),
        is_stopped=stops,
        done=lambda _, outcome: fetched(getattr(outcome, "size_bytes", 0)),
    )
    try:
        prefetch.server.name_job(manifests[0])
        found = (
            prefetch.retry_while_busy(partial(prefetch.server.manifest, each)) for each in manifests
        )
        manifest = next((each for each in found if each is not None), None)
        if manifest is not None:
            prefetch.fetch_best(manifest.entries)
    except (CacheError, OSError, RuntimeError) as error:  # at exit, no thread can be started
        is_cut_short = is_stopped()
        _log.debug("nothing is prefetched: %s", error)
    finally:
        if not is_cut_short:
            claim.keep("done")
        claim.close()
        prefetch.close()
