# SPDX-License-Identifier: Apache-2.0
"""tierctl: the commands that need no daemon, and those that ask and steer one."""

import click

from tierd.cli.errors import Commands

_IN = {
    "asking": ("events", "explain", "targets", "top"),
    "completion": ("completion",),
    "config": ("config",),
    "cxl": ("cxl",),
    "doctor": ("doctor",),
    "heat": ("heat",),
    "lending": ("donor",),
    "measure": ("measure",),
    "replaying": ("replay", "size"),
    "status": ("status",),
    "steering": ("drain", "pause", "pin", "record", "resume", "set", "unpin"),
    "topology": ("topology",),
    "version": ("version",),
}
"""The modules beside this one, and the commands in each."""


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    modules={name: f"tierd.cli.{module}" for module, names in _IN.items() for name in names},
)
@click.version_option(package_name="tierd")
def main() -> None:
    """See what tierd does with the memory of this machine."""
