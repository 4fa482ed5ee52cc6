"""`PJRT_Compile`: compiles for a description of devices, which need not be there.

What it returns has no client, and the interface has no way to read a serialized executable without
one (none up to 0.105, by its CHANGELOG; libtpu 0.0.42.1 says so when it is asked). So nothing is
saved here: the result is published, for the jobs that compile the same program with a client, and
is compiled again the next time. Whether a TPU takes what was compiled without one is not tried; if
it does not, the job counts a rejected artifact and compiles.
"""

from graphstash.hooks.pjrt.call import Call
from graphstash.hooks.pjrt.fingerprint import Fingerprints
from graphstash.hooks.pjrt.topology import Topology
from graphstash_schema import ArtifactKey

__all__ = ["AheadOfTimeCall"]


class AheadOfTimeCall(Call):
    """One call; its arguments are `AheadOfTimeArgs`."""

    _key: ArtifactKey | None = None

    def serve(self, fingerprints: Fingerprints) -> bool:
        """Only reads the arguments, which are the caller's again after the call."""
        topology = Topology.of(self.plugin.api, self.args.topology)
        self._key = self.describe(fingerprints, topology)
        return False

    def publish(self, *, compile_seconds: float) -> None:
        """Publishes it unless the server has it; no lease, because there is nothing to wait for.

        Raises:
            CacheError: the server cannot say.
        """
        if self._key is None or self.cache.config.read_only:
            return
        if not self.cache.stash.lookup([self._key]).found:
            self.cache.counters.add(misses=1)
            self.compilation = self.cache.begin(self._key)
            self.publish_executable(self.args.executable, compile_seconds=compile_seconds)
