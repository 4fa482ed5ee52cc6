"""`PJRT_Client_Compile`: compiles for the devices of a client, or loads what somebody compiled."""

import tempfile
from pathlib import Path

from graphstash._errors import LocalTierError
from graphstash.hooks.pjrt.api import PjrtError
from graphstash.hooks.pjrt.call import Call
from graphstash.hooks.pjrt.fingerprint import Fingerprints
from graphstash.hooks.pjrt.topology import Topology
from graphstash_schema import ArtifactKey

__all__ = ["ClientCall"]


class ClientCall(Call):
    """One call; its arguments are `ClientCompileArgs`."""

    def serve(self, fingerprints: Fingerprints) -> bool:
        """Loads the artifact with the caller's options; without one a compilation begins."""
        topology = Topology.of_client(self.plugin.api, self.args.client)
        key = self.describe(fingerprints, topology) if _is_served(topology) else None
        if key is None:
            return False
        try:
            with tempfile.TemporaryDirectory(
                prefix="graphstash-", ignore_cleanup_errors=True
            ) as directory:
                payload = Path(directory) / "payload"
                self.compilation = self.cache.find_or_begin(key, payload)
                if self.compilation is not None:
                    return False
                serialized = payload.read_bytes()
        except OSError as error:
            self.cache.trouble(LocalTierError(str(error)))
            return False
        return self._load(key, serialized)

    def publish(self, *, compile_seconds: float) -> None:
        """Publishes it under the compilation that `serve` began."""
        if self.compilation is not None:
            with self.plugin.api.executable_of(self.args.executable) as executable:
                self.publish_executable(executable, compile_seconds=compile_seconds)

    def _load(self, key: ArtifactKey, serialized: bytes) -> bool:
        try:
            self.args.executable = self.plugin.api.load(
                self.args.client,
                serialized,
                options=self.args.options,
                options_size=self.args.options_size,
            )
        except PjrtError as error:
            self.experience.rejected += 1
            name = self.plugin.path.name
            self.cache.reject(key, f"{name} could not load {key}; it compiles instead: {error}")
            return False
        self.experience.loaded += 1
        return True


def _is_served(topology: Topology) -> bool:
    """Whether a process may load what the others compile, or wait while another one compiles.

    On GPUs the processes of one job may share the search for the best kernels, each waiting for the
    results of all others (`--xla_gpu_shard_autotuning`): there none may be missing, and at this
    level they have nothing by which they could agree.
    """
    return topology.process_count <= 1 or topology.platform.lower() == "tpu"
