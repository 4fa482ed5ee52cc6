"""What a program is compiled for: a platform and its devices, as the plug-in describes them."""

import hashlib
from dataclasses import dataclass
from typing import Final

from graphstash.hooks.host import cpu_device_type
from graphstash.hooks.pjrt.abi import POINTER_BYTES, Function
from graphstash.hooks.pjrt.api import Api, PjrtError, view_of
from graphstash_schema import DeviceType

__all__ = ["NEEDED", "Topology"]


NEEDED: Final = (
    Function.TOPOLOGY_DESCRIPTION_PLATFORM_NAME,
    Function.TOPOLOGY_DESCRIPTION_PLATFORM_VERSION,
    Function.TOPOLOGY_DESCRIPTION_GET_DEVICE_DESCRIPTIONS,
    Function.TOPOLOGY_DESCRIPTION_SERIALIZE,
    Function.DEVICE_DESCRIPTION_KIND,
    Function.DEVICE_DESCRIPTION_PROCESS_INDEX,
)
"""What describes a topology to us."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A description of devices.

    Attributes:
        platform: e.g. `cpu`, `tpu`.
        version: of the platform, in the plug-in's words.
        digest: SHA-256 of the serialized description; it names the CPU's features, the chips and
            their arrangement. `none` where a plug-in has no description.
        kinds: of its devices, each once, e.g. `TPU v5 lite`.
        device_count: in all processes.
        process_count: that share the devices.
    """

    platform: str
    version: str
    digest: str
    kinds: tuple[str, ...]
    device_count: int
    process_count: int

    @classmethod
    def of_client(cls, api: Api, client: int) -> "Topology":
        """What a client runs on.

        Raises:
            PjrtError: the plug-in does not even name its platform.
        """
        if api.has(Function.CLIENT_TOPOLOGY_DESCRIPTION, *NEEDED):
            try:
                topology = api.ask(Function.CLIENT_TOPOLOGY_DESCRIPTION, client).answer
                return cls.of(api, topology)
            except PjrtError:  # not implemented for this kind of device
                pass
        return cls(
            platform=api.text(Function.CLIENT_PLATFORM_NAME, client),
            version=api.text(Function.CLIENT_PLATFORM_VERSION, client),
            digest="none",
            kinds=(),
            device_count=0,
            process_count=0,
        )

    @classmethod
    def of(cls, api: Api, topology: int) -> "Topology":
        """Reads a `PJRT_TopologyDescription`.

        Raises:
            PjrtError: the plug-in cannot describe it.
        """
        with api.serialized(Function.TOPOLOGY_DESCRIPTION_SERIALIZE, topology) as serialized:
            digest = hashlib.sha256(serialized).hexdigest()
        listed = api.ask(Function.TOPOLOGY_DESCRIPTION_GET_DEVICE_DESCRIPTIONS, topology)
        pointers = view_of(listed.answer, listed.size * POINTER_BYTES).cast("Q")
        kinds = {api.text(Function.DEVICE_DESCRIPTION_KIND, device) for device in pointers}
        processes = {
            api.ask(Function.DEVICE_DESCRIPTION_PROCESS_INDEX, device).answer for device in pointers
        }
        return cls(
            platform=api.text(Function.TOPOLOGY_DESCRIPTION_PLATFORM_NAME, topology),
            version=api.text(Function.TOPOLOGY_DESCRIPTION_PLATFORM_VERSION, topology),
            digest=digest,
            kinds=tuple(sorted(kinds)),
            device_count=len(pointers),
            process_count=len(processes),
        )

    @property
    def device_type(self) -> DeviceType:
        """The word for it; hosts of one device type run each other's executables."""
        if self.platform.lower() == "cpu":
            return cpu_device_type()
        kinds = "+".join(self.kinds)[:48]
        count = str(self.device_count)
        return DeviceType.of(self.platform[:32], kinds, count, self.digest[:16])
