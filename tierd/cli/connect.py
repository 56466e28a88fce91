# SPDX-License-Identifier: Apache-2.0
"""The sockets of the daemon that a configuration is of."""

from pathlib import Path

from tierd import config
from tierd.api.client import Client
from tierd.api.sockets import CONTROL, MONITOR


def monitor(config_path: Path | None) -> Client:
    """Returns the daemon's read-only side, which anybody may ask."""
    return Client(config.load(config_path).daemon.runtime_dir / MONITOR)


def control(config_path: Path | None) -> Client:
    """Returns the side that is for root and the group tierd."""
    return Client(config.load(config_path).daemon.runtime_dir / CONTROL)
