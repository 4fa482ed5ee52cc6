"""Start an aggregator: `python -m graphstash.training.reduce.aggregators --help`."""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from graphstash.errors import ConfigError
from graphstash.training.reduce.aggregators import sockets
from graphstash.training.reduce.aggregators.server import Owner, Server, read_secret

__all__ = ["main"]


def main() -> None:
    """Serve until SIGTERM or Ctrl-C. A rank's own aggregator serves until the rank exits."""
    options = _options()
    if options.owner is None:
        secret, owner, end = read_secret(options.secret_file), None, _signal_descriptor()
    else:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A signal to the process group must not end the sums of the rank's last step.
            signal.signal(number, signal.SIG_IGN)
        order = json.loads(sys.stdin.readline())
        secret, owner = bytes.fromhex(order["secret"]), Owner(options.owner, order["process"])
        end = sys.stdin.fileno()
    bound = sockets.bound(sockets.parsed(options.listen))
    print(json.dumps({"address": sockets.address_of(bound.getsockname())}), flush=True)
    Server(bound, secret, end=end, owner=owner).run()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m graphstash.training.reduce.aggregators",
        description=(
            "Adds up gradients that workers send it, see graphstash.training.reduce. Serves any "
            "number of jobs until SIGTERM, and prints one line of JSON when it listens."
        ),
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        required=True,
        help="UDP address of this host by which the workers know it; [HOST]:PORT with IPv6",
    )
    purpose = parser.add_mutually_exclusive_group(required=True)
    purpose.add_argument(
        "--secret-file",
        metavar="FILE",
        type=Path,
        help=(
            "32 bytes or more that the workers' secret_file= has as well; only its owner may read "
            "it"
        ),
    )
    # ColocatedAggregator passes the number of its rank.
    purpose.add_argument("--owner", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _signal_descriptor() -> int:
    """Return a descriptor that becomes readable after SIGTERM or Ctrl-C."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writes)
    return reads


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(2)
