"""Links: a star of network namespaces, each with one link of a given rate to a switch.

    hub:  bridge, port0 ... portN-1
    0:    eth0 ---- port0        10.77.0.1
    1:    eth0 ---- port1        10.77.0.2

A token bucket shapes each end of a link, so a node sends and receives at its rate at the same time.
The interfaces exist only in the namespaces and disappear with them. Only the nodes' own traffic is
on the links: no IPv6, no ARP.
"""

import json
import os
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

PREFIX = "reduce-bench"
KILLED_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")

LARGEST = 65536  # bytes that the kernel forwards as one packet; smaller packets take more CPU
QUEUE = 64 * 1024**2  # bytes in front of a link, so that nothing is dropped


class Traffic(NamedTuple):
    """Traffic to the nodes. Bytes include all headers from Ethernet's on."""

    wire_bytes: int
    packets: int

    def since(self, before):
        return Traffic(*(now - then for now, then in zip(self, before, strict=True)))


class Star(AbstractContextManager):
    """`nodes` namespaces around a switch. Raises RuntimeError without the permission."""

    name = "network namespaces"

    def __init__(self, nodes, gbits):
        self._nodes = nodes
        self._rate = int(gbits * 1e9)  # bit/s
        self._base = f"{PREFIX}-{os.getpid()}"
        self._hub = f"{self._base}-hub"
        sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self):
        for name in (self._hub, *map(self._node, range(self._nodes))):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self._hub, "link", "add", "switch", "type", "bridge", "mcast_snooping", "0")
        ip("-n", self._hub, "link", "set", "switch", "addrgenmode", "none", "up")
        for number in range(self._nodes):
            hub, node, port = ("-n", self._hub), ("-n", self._node(number)), f"port{number}"
            peer = ("peer", "name", "eth0", "address", mac(number), "netns", self._node(number))
            ip(*hub, "link", "add", port, "type", "veth", *peer)
            ip(*hub, "link", "set", port, "master", "switch", "addrgenmode", "none", "up")
            ip(*node, "link", "set", "eth0", "addrgenmode", "none", "up")
            ip(*node, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            for other in range(self._nodes):
                if other != number:
                    static = ("lladdr", mac(other), "nud", "permanent", "dev", "eth0")
                    ip(*node, "neighbour", "add", self.address(other), *static)
            self._shape(self._hub, port)
            self._shape(self._node(number), "eth0")

    def _shape(self, namespace, device):
        """Shape a device by a bucket of two packets, 1 or 2 ms of the rate."""
        packet = max(4096, min(LARGEST, self._rate // 8000))
        bucket = ("rate", f"{self._rate}bit", "burst", str(2 * packet), "limit", str(QUEUE))
        ip("-n", namespace, "link", "set", device, "gso_max_size", str(packet))
        tc("-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket)

    def command(self, number):
        """Return the prefix of a command that runs at a node and ends with this process."""
        return ("ip", "netns", "exec", self._node(number), *KILLED_WITH_PARENT)

    def interface(self):
        return "eth0"

    def address(self, number):
        return f"10.77.0.{number + 1}"

    def traffic(self):
        """Return the traffic to all nodes, after it has stopped for a while."""
        found = None
        while found != (found := self._read()):
            time.sleep(0.05)
        return found

    def _read(self):
        queues = json.loads(tc("-n", self._hub, "-s", "-j", "qdisc", "show"))
        of = [each for each in queues if each["kind"] == "tbf"]
        if any(each["drops"] for each in of):
            raise RuntimeError("the queue of a link was full, so its figures are invalid")
        return Traffic(sum(each["bytes"] for each in of), sum(each["packets"] for each in of))

    def close(self):
        remove(self._base)

    def __exit__(self, *_):
        self.close()

    def _node(self, number):
        return f"{self._base}-{number}"


class Loopback(AbstractContextManager):
    """The fallback without the permission for namespaces: no rates, and no counts of packets."""

    name = "loopback"

    def __init__(self, nodes, gbits):
        self._nodes = nodes

    def command(self, number):
        return KILLED_WITH_PARENT

    def interface(self):
        return "lo"

    def address(self, number):
        return "127.0.0.1"

    def traffic(self):
        time.sleep(0.05)
        return Traffic(0, 0)

    def __exit__(self, *_):
        pass


def sweep():
    """Remove the namespaces of killed runs."""
    for name in names():
        owner = name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if not Path("/proc", owner).exists():
            ip("netns", "delete", name)


def remove(base):
    for name in names():
        if name.startswith(f"{base}-"):
            ip("netns", "delete", name)


def names():
    """Return the names of this benchmark's namespaces."""
    lines = ip("netns", "list").splitlines()
    return [name for line in lines if (name := line.split()[0]).startswith(f"{PREFIX}-")]


def mac(number):
    return f"02:00:00:00:00:{number + 1:02x}"


def ip(*arguments):
    return call("ip", *arguments)


def tc(*arguments):
    return call("tc", *arguments)


def call(*command):
    """Run a command, and raise RuntimeError with its error output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]} is not installed (Debian: iproute2)") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
