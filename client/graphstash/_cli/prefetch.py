"""`graphstash prefetch`: download the artifacts that a job's next run may need."""

from collections.abc import Mapping
from contextlib import closing
from typing import Annotated

import typer

from graphstash._artifacts.prefetch import Outcome, Prefetch
from graphstash._artifacts.stash import Fetched, Stash
from graphstash._cli.output import (
    Json,
    NamespaceOption,
    Url,
    count_progress,
    err,
    fail,
    format_bytes,
    load_config,
    print_json,
    say,
)
from graphstash.config import ClientConfig
from graphstash.errors import CacheError, LocalTierError, Reason, VerificationError
from graphstash_schema import ArtifactKey, ManifestName

__all__ = ["prefetch"]


def prefetch(
    job: Annotated[str, typer.Argument(help="The job's name, as given to `graphstash run --job`.")],
    *,
    url: Url = None,
    namespace: NamespaceOption = None,
    as_json: Json = False,
) -> None:
    """Download the artifacts that earlier runs of a job used.

    The next run of the job on this host then finds them in the local tier.
    """
    name = ManifestName(job)
    config = load_config(url=url, namespace=namespace, job=job)
    outcomes = _fetched(config, name)
    fetched = [
        each for each in outcomes.values() if isinstance(each, Fetched) and each.source == "remote"
    ]
    missing = [key for key, each in outcomes.items() if each is None]
    rejected = {key: each for key, each in outcomes.items() if isinstance(each, VerificationError)}
    size_bytes = sum(each.size_bytes for each in fetched)
    content = {
        "job": job,
        "namespace": config.namespace,
        "fetched": len(fetched),
        "fetched_bytes": size_bytes,
        "present": len(outcomes) - len(fetched) - len(missing) - len(rejected),
        "missing": list(map(str, missing)),
        "rejected": [{"key": str(key), "error": str(error)} for key, error in rejected.items()],
    }
    if as_json:
        print_json(content)
        return
    say(
        f"{len(fetched)} fetched ({format_bytes(size_bytes)}), {content['present']} already here, "
        f"{len(missing)} no longer on the server"
        + (f", {len(rejected)} rejected" if rejected else "")
    )


def _fetched(config: ClientConfig, job: ManifestName) -> Mapping[ArtifactKey, Outcome]:
    """Return the outcome of each artifact, in the order of the manifest.

    Raises:
        CacheError: a download failed, so that the outcomes are incomplete.
    """
    outcomes: dict[ArtifactKey, Outcome] = {}
    failures: list[CacheError] = []
    with Stash(config) as stash, count_progress() as progress:
        task = progress.add_task("artifacts", total=None)

        def done(key: ArtifactKey, outcome: Outcome) -> None:
            outcomes[key] = outcome
            progress.advance(task)
            if isinstance(outcome, VerificationError):  # other artifacts may be valid
                err.print(f"rejected: {outcome}", markup=False, soft_wrap=True)
            elif isinstance(outcome, CacheError):
                failures.append(outcome)
            elif outcome is not None and not stash.is_on_this_host(key):
                error = LocalTierError(f"{config.cache_dir} did not keep {key}: is it full?")
                failures.append(error)

        prefetch = Prefetch(
            stash,
            is_stopped=lambda: bool(failures),
            done=done,
            at_first_wait=lambda busy: err.print(
                f"{busy}; waiting for up to {config.wait_seconds:g} s", markup=False, soft_wrap=True
            ),
        )
        with closing(prefetch):
            manifest = prefetch.retry_while_busy(lambda: prefetch.server.manifest(job))
            if manifest is None:
                fail(
                    f"no run recorded artifacts of the job {job!r} in the namespace "
                    f"{config.namespace}"
                )
            keys = [entry.key for entry in manifest.entries]
            progress.update(task, total=len(keys))
            prefetch.fetch(keys)
    if failures:
        raise failures[0]
    if left := len(keys) - len(outcomes):
        raise CacheError(Reason.INTERNAL, f"{left} of {len(keys)} artifacts were not downloaded")
    return {key: outcomes[key] for key in keys}
