# SPDX-License-Identifier: Apache-2.0
"""The configuration: /etc/tierd/tierd.toml and its drop-ins, checked whole before anything is used.

systemd/tierd.toml is the same as no file at all: it names every key with its default and range.
Every problem of every file is told at once, with its line.
"""

from tierd.config.files import (
    DEFAULT_PATH,
    LARGEST_BYTES,
    drop_ins,
    files,
    load,
    load_with_places,
    parse,
)
from tierd.config.values import (
    Config,
    ConflictsConfig,
    CxlConfig,
    DaemonConfig,
    DamonConfig,
    DiscoverConfig,
    Engine,
    HardwareConfig,
    MigrateConfig,
    Mode,
    OnError,
    Place,
    PolicyConfig,
    Provision,
    Rival,
    Samples,
    TargetConfig,
    TenantConfig,
    TierConfig,
)

__all__ = [
    "DEFAULT_PATH",
    "LARGEST_BYTES",
    "Config",
    "ConflictsConfig",
    "CxlConfig",
    "DaemonConfig",
    "DamonConfig",
    "DiscoverConfig",
    "Engine",
    "HardwareConfig",
    "MigrateConfig",
    "Mode",
    "OnError",
    "Place",
    "PolicyConfig",
    "Provision",
    "Rival",
    "Samples",
    "TargetConfig",
    "TenantConfig",
    "TierConfig",
    "drop_ins",
    "files",
    "load",
    "load_with_places",
    "parse",
]
