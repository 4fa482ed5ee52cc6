"""`graphstash export` and `import`: bundles for hosts without a network to the server."""

import dataclasses
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Annotated, Any, Final, TypeAlias

import typer
from rich.progress import Progress, TaskID

from graphstash._artifacts.bundle import (
    Bundle,
    BundledArtifact,
    BundleEntry,
    check_blob,
    line_of,
    write_bundle,
)
from graphstash._artifacts.catch_up import describe
from graphstash._artifacts.local_tier import LocalTier
from graphstash._artifacts.standing import Verdict
from graphstash._artifacts.stash import Stash
from graphstash._bounded_reader import BoundedReader, digest_of
from graphstash._cli.artifacts import DeviceTypeOption, KindOption, option_error
from graphstash._cli.output import (
    Json,
    NamespaceOption,
    Url,
    byte_progress,
    err,
    fail,
    format_bytes,
    load_config,
    plural,
    print_json,
    say,
)
from graphstash._cli.patience import PatientClient, fail_midway, retry_while_busy
from graphstash._http.client import ServerClient
from graphstash._replacing import check_replaceable
from graphstash._trust.policy import Signatures, SignedSubject
from graphstash._trust.provenance import read_provenance
from graphstash.config import ClientConfig, SignaturePolicy
from graphstash.errors import (
    BundleError,
    CacheError,
    ConfigError,
    ConflictError,
    LocalTierError,
)
from graphstash_schema import (
    ArtifactKey,
    ArtifactKind,
    ArtifactMetadata,
    DeviceType,
    ManifestName,
)
from graphstash_schema.envelope import read_envelope_head
from graphstash_schema.exit_status import ExitStatus
from graphstash_schema.explanation import Description
from graphstash_schema.listing import ArtifactQuery, ListedArtifact
from graphstash_schema.own_files import make_own_directory
from graphstash_schema.protocol import MAX_DESCRIPTIONS

__all__ = ["export", "import_"]

_SPOOLED: Final = re.compile(r"\.?[0-9a-f]{64}")
"""File names of an export's downloads. A leading dot marks an incomplete download."""

_COPY_BYTES: Final = 1024**2
_BATCH: Final = 500

BundleFile = Annotated[Path, typer.Argument(help="The bundle's file.", show_default=False)]


def export(
    file: BundleFile,
    *,
    job: Annotated[
        str | None,
        typer.Option(help="Only what earlier runs of this job used (`graphstash run --job`)."),
    ] = None,
    kind: KindOption = None,
    device_type: DeviceTypeOption = None,
    fingerprint: Annotated[
        list[str] | None,
        typer.Option(help="Only fingerprints with this prefix; may be repeated."),
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local",
            help="Export this host's copies, except artifacts that the server withdrew.",
        ),
    ] = False,
    url: Url = None,
    namespace: NamespaceOption = None,
    as_json: Json = False,
) -> None:
    """Write artifacts of a namespace to one file, for hosts without a network to the server.

    Every artifact is verified as in a job: digest, key, payload, and the signature if this host
    checks signatures. If an artifact fails, the command leaves it out, names it, and exits with
    status 1. The same artifacts always make the same file.

    Downloads stay in `FILE.partial` until the bundle is complete. If an export is interrupted, run
    it again to continue. Example:

        graphstash export nightly.bundle --job nightly
    """
    config = load_config(url=url, namespace=namespace)
    selection = _Selection.of(kind, device_type, fingerprint)
    if local and job is not None:
        fail(
            "--job needs a server, which records what jobs used: leave out --local",
            status=ExitStatus.USAGE,
        )
    source: _Source
    if local:
        source = _TierSource(config, selection)
    else:
        source = _ServerSource(config, None if job is None else ManifestName(job), selection)
    with closing(source):
        try:
            result = _Export(config, source, file).run()
        except BundleError as error:
            fail(str(error))
        except CacheError as error:
            fail_midway(error)
        except OSError as error:
            fail(f"{file}: {error.strerror or error}; run it again to continue")
    if as_json:
        print_json(result)
    else:
        say(
            f"{plural(result['artifacts'], 'artifact')} ({format_bytes(result['size_bytes'])}) "
            f"of the namespace {config.namespace} in {file}"
        )
    if result["rejected"]:
        raise typer.Exit(ExitStatus.FAILED)


def import_(
    file: BundleFile,
    *,
    local: Annotated[
        bool, typer.Option("--local", help="Import into this host's local tier, without a server.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only verify the bundle; import nothing.")
    ] = False,
    url: Url = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Namespace that gets the artifacts. [default: the bundle's]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Publish the artifacts of a bundle to a server, or to this host.

    The whole bundle is verified before anything is published: its form, each artifact's digest, key
    and payload, and its signature if this host checks signatures. If a check fails, the command
    names the entry, imports nothing, and exits with status 3.

    Artifacts that exist already are skipped, even if the stored bytes differ from the bundle's. If
    an import is interrupted, run it again to continue.
    """
    config = load_config(url=url, namespace=namespace)
    try:
        with _opened(file) as bundle:
            target = config.namespace if namespace is not None else bundle.namespace
            result = _Import(dataclasses.replace(config, namespace=target), bundle).run(
                None if check else "local" if local else "server"
            )
    except BundleError as error:
        fail(f"{file}: {error}; nothing was imported", status=ExitStatus.REFUSED)
    except CacheError as error:
        fail_midway(error)
    if as_json:
        print_json({"file": str(file), **result})
        return
    size = format_bytes(result["size_bytes"])
    if check:
        say(f"sound: {plural(result['artifacts'], 'artifact')} ({size}) of {bundle.namespace}")
        return
    differing = result["differing"]
    say(
        f"{result['imported']} imported into {result['namespace']}, "
        f"{result['present']} already there"
        + (f", {len(differing)} with other bytes there, which stay" if differing else "")
    )


def _opened(file: Path) -> Bundle:
    try:
        return Bundle(file)
    except OSError as error:
        fail(f"{file}: {error.strerror}; nothing was imported")


@dataclasses.dataclass(frozen=True)
class _Selection:
    kind: ArtifactKind | None
    device_type: str
    prefixes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        kind: ArtifactKind | None,
        device_type: str | None,
        prefixes: Iterable[str] | None,
    ) -> "_Selection":
        """Validate the options. End the command if one is malformed."""
        try:
            if device_type is not None:
                DeviceType(device_type)
            for each in prefixes or ():
                ArtifactQuery(fingerprint=each)
        except ValueError as error:
            fail(option_error(error), status=ExitStatus.USAGE)
        found: list[str] = []
        for each in sorted(set(prefixes or ())):  # skip a prefix that a shorter prefix covers
            if not found or not each.startswith(found[-1]):
                found.append(each)
        return cls(kind, device_type or "", tuple(found))

    def __contains__(self, key: ArtifactKey) -> bool:
        return (
            self.kind in (None, key.kind)
            and self.device_type in ("", key.device_type)
            and (not self.prefixes or key.fingerprint.startswith(self.prefixes))
        )


class _ServerSource:
    """Source of artifacts for an export.

    `entries` yields the selected artifacts in the order of a bundle. `fetch` writes a blob into a
    file, and returns False if the blob no longer exists or has changed.
    """

    def __init__(
        self, config: ClientConfig, job: ManifestName | None, selection: _Selection
    ) -> None:
        self._server = PatientClient(config)
        self._server.copy_only()
        self._job, self._selection = job, selection

    def entries(self) -> Iterator[BundleEntry]:
        for listed in self._by_prefix() if self._job is None else self._by_job(self._job):
            yield BundleEntry(
                key=listed.key,
                sha256=listed.digest.removeprefix("sha256:"),
                size_bytes=listed.size_bytes,
                metadata=listed.metadata,
                description=listed.description,
            )

    def fetch(self, entry: BundleEntry, into: IO[bytes]) -> bool:
        downloaded = retry_while_busy(lambda: self._server.download(entry.key, into))
        return downloaded is not None and downloaded.digest == entry.digest

    def close(self) -> None:
        self._server.close()

    def _by_prefix(self) -> Iterator[ListedArtifact]:
        for prefix in self._selection.prefixes or ("",):
            yield from self._server.every_artifact(
                ArtifactQuery(
                    fingerprint=prefix,
                    kind=self._selection.kind,
                    device_type=self._selection.device_type or None,
                    details=True,
                )
            )

    def _by_job(self, job: ManifestName) -> Iterator[ListedArtifact]:
        manifest = retry_while_busy(lambda: self._server.manifest(job))
        if manifest is None:
            fail(
                f"no run recorded artifacts of the job {job!r} in the namespace "
                f"{self._server.config.namespace}"
            )
        keys = {entry.key for entry in manifest.entries if entry.key in self._selection}
        for fingerprint in sorted({key.fingerprint for key in keys}):
            query = ArtifactQuery(fingerprint=fingerprint, details=True)
            yield from (each for each in self._server.every_artifact(query) if each.key in keys)


class _TierSource:
    """Source like `_ServerSource`: this host's copies."""

    def __init__(self, config: ClientConfig, selection: _Selection) -> None:
        self._stash = Stash(config)
        self._namespace, self._selection = config.namespace, selection
        self._origins: dict[ArtifactKey, str] = {}

    def entries(self) -> Iterator[BundleEntry]:
        tier, standing = self._stash.local, self._stash.standing
        for origin in reversed(standing.origins):  # the server's copies replace own ones
            keys = tier.keys(self._namespace, origin=origin)
            self._origins |= dict.fromkeys((key for key in keys if key in self._selection), origin)
        for key in sorted(
            self._origins, key=lambda key: (key.fingerprint, key.kind.value, key.device_type)
        ):
            origin = self._origins[key]
            envelope = tier.open(self._namespace, key, origin=origin)
            if envelope is None:
                continue
            with envelope:
                proof, size = read_provenance(envelope)
                verdict = standing.verdict(self._namespace, key, proof, origin=origin)
                if verdict is not Verdict.USE:
                    continue
                digest = digest_of(envelope, size)
                try:
                    raw_size = int(read_envelope_head(envelope.read)["raw_size"])
                except (KeyError, TypeError, ValueError):
                    raw_size = 0  # not an envelope: `_Export` rejects it
            yield BundleEntry(
                key=key,
                sha256=digest.sha256,
                size_bytes=size,
                metadata=ArtifactMetadata(
                    compile_seconds=proof.compile_seconds,
                    raw_size_bytes=max(0, raw_size),
                    signature=proof.signature,
                ),
            )

    def fetch(self, entry: BundleEntry, into: IO[bytes]) -> bool:
        origin = self._origins[entry.key]
        envelope = self._stash.local.open(self._namespace, entry.key, origin=origin)
        if envelope is None:
            return False
        with envelope:
            shutil.copyfileobj(BoundedReader(envelope, entry.size_bytes), into, _COPY_BYTES)
        return True

    def close(self) -> None:
        self._stash.close()


_Source: TypeAlias = _ServerSource | _TierSource


class _Export:
    """One export. It collects blobs in a directory next to the bundle, which a retry reuses."""

    def __init__(self, config: ClientConfig, source: _Source, file: Path) -> None:
        self._config, self._source, self._file = config, source, file
        self._directory = file.with_name(f"{file.name}.partial")
        self._spool = self._directory
        self._signatures = Signatures(config, secret=lambda: None)
        self._fetched = self._reused = self._size = 0
        self._gone: list[str] = []
        self._rejected: list[dict[str, str]] = []

    def run(self) -> dict[str, Any]:
        if not self._file.parent.is_dir():
            fail(f"{self._file}: there is no directory {self._file.parent}")
        try:
            check_replaceable(self._file)
        except OSError as error:
            fail(f"{self._file}: {error.strerror}; name a file to create or replace")
        try:
            descriptor = make_own_directory(self._directory)
        except OSError as error:
            fail(f"{self._directory}: {error.strerror or error}")
        try:
            # Use the descriptor: a user who can write to the parent could replace the directory.
            self._spool = Path(f"/proc/self/fd/{descriptor}")
            return self._run()
        finally:
            os.close(descriptor)

    def _run(self) -> dict[str, Any]:
        with TemporaryFile(dir=self._spool) as lines, byte_progress() as progress:
            count = self._collect(lines, progress)
            if not count:
                self._remove_spool()
                fail(
                    f"there is nothing to export in the namespace {self._config.namespace}: "
                    "`graphstash ls` lists its artifacts"
                )
            task = progress.add_task("writing", total=self._size)
            size = write_bundle(
                self._file,
                namespace=self._config.namespace,
                lines=lines,
                artifacts=count,
                blob_of=self._path_of,
                written=lambda more: progress.advance(task, more),
            )
        self._remove_spool()
        return {
            "file": str(self._file),
            "namespace": self._config.namespace,
            "artifacts": count,
            "size_bytes": size,
            "fetched": self._fetched,
            "reused": self._reused,
            "gone": self._gone,
            "rejected": self._rejected,
        }

    def _collect(self, lines: IO[bytes], progress: Progress) -> int:
        count, task = 0, progress.add_task("fetching", total=None)
        for entry in self._source.entries():
            try:
                is_fetched = self._fetch(entry)
            except BundleError as error:
                self._path_of(entry).unlink(missing_ok=True)
                self._rejected.append({"key": str(entry.key), "error": str(error)})
                err.print(f"rejected: {entry.key}: {error}", markup=False, soft_wrap=True)
                continue
            if not is_fetched:
                self._gone.append(str(entry.key))
                err.print(f"gone meanwhile: {entry.key}", markup=False, soft_wrap=True)
                continue
            lines.write(line_of(entry))
            count += 1
            self._size += entry.size_bytes
            progress.update(task, completed=self._size)
        progress.update(task, visible=False)
        return count

    def _fetch(self, entry: BundleEntry) -> bool:
        """Fetch a verified blob into the directory. Return False if it no longer exists."""
        place = self._path_of(entry)
        if place.exists():
            with suppress(BundleError):
                self._check(entry, place)
                self._reused += 1
                return True
        partial = place.with_name(f".{place.name}")
        with partial.open("w+b") as file:
            if not self._source.fetch(entry, file):
                partial.unlink()
                return False
        partial.replace(place)
        self._check(entry, place)
        self._fetched += 1
        return True

    def _check(self, entry: BundleEntry, place: Path) -> None:
        with place.open("rb") as blob:
            check_blob(
                entry,
                blob,
                namespace=self._config.namespace,
                signatures=self._signatures,
                max_bytes=self._config.max_artifact,
            )

    def _path_of(self, entry: BundleEntry) -> Path:
        return self._spool / entry.sha256

    def _remove_spool(self) -> None:
        """Remove only files of an export, and the directory if it is then empty."""
        for path in self._spool.iterdir():
            if _SPOOLED.fullmatch(path.name):
                path.unlink()
        with suppress(OSError):
            self._directory.rmdir()


class _Import:
    def __init__(self, config: ClientConfig, bundle: Bundle) -> None:
        self._config, self._bundle = config, bundle
        self._signatures = Signatures(config, secret=lambda: None)
        self._changes_namespace = config.namespace != bundle.namespace
        if (
            self._changes_namespace
            and self._signatures.policy is SignaturePolicy.REQUIRE
            and config.signing_key is None
        ):
            raise ConfigError(
                f"the bundle is of the namespace {bundle.namespace}, which its signatures name: "
                "leave out --namespace, or set GRAPHSTASH_SIGNING_KEY to sign its artifacts for "
                f"{config.namespace}"
            )
        self._imported = self._present = 0
        self._differing: list[str] = []

    def run(self, into: str | None) -> dict[str, Any]:
        with byte_progress() as progress:
            task = progress.add_task("verifying", total=self._bundle.size_bytes)
            for found in self._bundle.entries():
                self._check(found)
                progress.advance(task, found.entry.size_bytes)
            progress.update(task, visible=False)
            task = progress.add_task("importing", total=self._bundle.size_bytes)
            if into == "server":
                self._publish(progress, task)
            elif into == "local":
                self._store(progress, task)
        return {
            "namespace": self._config.namespace,
            "into": into,
            "artifacts": self._bundle.artifacts,
            "size_bytes": self._bundle.size_bytes,
            "imported": self._imported,
            "present": self._present,
            "differing": self._differing,
        }

    def _check(self, found: BundledArtifact) -> None:
        number, entry, blob = found
        try:
            check_blob(
                entry,
                blob,
                namespace=self._bundle.namespace,
                signatures=self._signatures,
                max_bytes=self._config.max_artifact,
            )
        except BundleError as error:
            raise BundleError(f"entry {number} ({entry.name}, {entry.key}): {error}") from error
        except OSError as error:
            raise BundleError(f"entry {number} ({entry.name}): {error}") from error

    def _publish(self, progress: Progress, task: TaskID) -> None:
        with closing(PatientClient(self._config)) as server:
            if server.is_configured and server.is_read_only:
                raise ConfigError("GRAPHSTASH_READ_ONLY is set: nothing can be published")
            entries = self._bundle.entries()
            while batch := list(islice(entries, _BATCH)):
                reply = server.lookup(found.entry.key for found in batch)
                there = {each.key: each.digest for each in reply.found}
                described: list[Description] = []
                for found in batch:
                    self._publish_one(server, found, there.get(found.entry.key))
                    progress.advance(task, found.entry.size_bytes)
                    if found.entry.description is not None:
                        described.append(found.entry.description)
                    if len(described) == MAX_DESCRIPTIONS // 4:
                        describe(server, described)
                describe(server, described)

    def _publish_one(self, server: ServerClient, found: BundledArtifact, there: str | None) -> None:
        entry = found.entry
        if there is None:
            metadata = self._metadata_of(found)
            try:
                server.upload(entry.key, found.blob, entry.digest, metadata)
            except ConflictError:
                there = ""
            else:
                self._imported += 1
                return
        if there == str(entry.digest):
            self._present += 1
        else:
            self._differing.append(str(entry.key))

    def _store(self, progress: Progress, task: TaskID) -> None:
        limit = self._config.local_limit
        if self._bundle.size_bytes > limit:
            raise ConfigError(
                f"the bundle has {format_bytes(self._bundle.size_bytes)}, more than "
                f"GRAPHSTASH_LOCAL_LIMIT ({format_bytes(limit)}): raise it"
            )
        tier = LocalTier(self._config.cache_dir, limit_bytes=limit)
        with closing(tier):
            if tier.is_private:
                raise ConfigError(tier.troubles[0].detail)
            for found in self._bundle.entries():
                self._store_one(tier, found)
                progress.advance(task, found.entry.size_bytes)

    def _store_one(self, tier: LocalTier, found: BundledArtifact) -> None:
        entry = found.entry
        if tier.has(self._config.namespace, entry.key):
            self._present += 1
            return
        metadata = self._metadata_of(found)
        proof = entry.proof.model_copy(
            update={
                "signature": metadata.signature,
                "sha256": entry.digest.sha256,
                "stored_at": time.time(),
                "is_imported": True,
            }
        )
        with tier.temporary() as envelope:
            found.blob.seek(0)
            shutil.copyfileobj(found.blob, envelope, _COPY_BYTES)
            envelope.seek(0)
            if digest_of(envelope, entry.size_bytes) != entry.digest:
                raise LocalTierError(f"{entry.name} in the bundle was changed meanwhile")
            if not tier.adopt(self._config.namespace, entry.key, envelope, proof=proof):
                raise tier.troubles[-1]
        self._imported += 1

    def _metadata_of(self, found: BundledArtifact) -> ArtifactMetadata:
        """Return the metadata, signed with this host's key if the namespace changes."""
        entry = found.entry
        found.blob.seek(0)
        raw_size = int(read_envelope_head(found.blob.read)["raw_size"])
        metadata = entry.metadata or ArtifactMetadata(compile_seconds=0, raw_size_bytes=raw_size)
        if self._changes_namespace:
            subject = SignedSubject(self._config.namespace, entry.key, entry.digest, raw_size)
            signature = self._signatures.prove(subject).signature
            metadata = metadata.model_copy(update={"signature": signature})
        return metadata
