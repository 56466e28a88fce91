# SPDX-License-Identifier: Apache-2.0
"""A running tierd takes over a changed configuration whole, or not at all."""

import json
import signal

import pytest
from guests.guest import Guest
from guests.tiering import FOLDER, SETTINGS, Tierd, tierd, until
from guests.topology import slow_node
from guests.workloads import hotset

DROP_IN = f"{FOLDER}/tierd.toml.d/50-test.toml"
CONFIG = ("--config", f"{FOLDER}/tierd.toml")
RULE = """
[policy]
mode = "observe"
horizon_s = 300
[[target]]
command = "hotset"
"""


def reload(guest: Guest, running: Tierd, main: str, drop_in: str) -> None:
    guest.write(f"{FOLDER}/tierd.toml", main.encode())
    guest.run(["mkdir", "-p", f"{FOLDER}/tierd.toml.d"])
    guest.write(DROP_IN, drop_in.encode())
    running.process.signal(signal.SIGHUP)


@pytest.mark.guest(slow_node())
def test_a_reload_is_taken_whole_or_not_at_all(guest: Guest) -> None:
    options = ("--mib", "32", "--hot-mib", "4", "--share", "95", "--node", "1")
    main = SETTINGS + RULE
    try:
        with hotset(guest, *options) as load, tierd(guest, settings=RULE) as running:
            load.sample()
            until(load, running, lambda: sees_hot_memory(running))
            assert load.sample().hot_share == 0, "it only observes"

            reload(guest, running, main, '[policy]\nmode = "place"\npaybck = 3\n')
            until(load, running, lambda: "not reloaded" in running.process.stderr)
            assert f"{DROP_IN}:3: policy.paybck: unknown key" in running.process.stderr
            reload(guest, running, main.replace("take_over = true", "take_over = false"), "")
            until(load, running, lambda: "only a restart" in running.process.stderr)
            assert "damon.take_over: only a restart can change this" in running.process.stderr
            assert running.status is not None
            assert running.status["mode"] == "observe"

            reload(guest, running, main, '[policy]\nmode = "place"\n')
            until(load, running, lambda: "reloaded: policy.mode" in running.process.stderr)
            until(load, running, lambda: load.sample().hot_share >= 0.95)
            differing = guest.run(["tierctl", "config", "diff", *CONFIG], check=False)
            assert (differing.rc, differing.stdout) == (0, "the daemon has what the files say\n")

            reload(guest, running, main.replace('"hotset"', '"nothing"'), "")
            until(load, running, lambda: (running.status or {"targets": 0})["targets"] == [])
            shown = guest.run(["tierctl", "config", "show", "--json", *CONFIG])
            assert json.loads(shown.stdout)["target"] == [{"command": "nothing"}]
    finally:
        guest.run(["rm", "-rf", f"{FOLDER}/tierd.toml.d"])


def sees_hot_memory(running: Tierd) -> bool:
    status = running.status or {"targets": []}
    return any(target["hot"]["pmem"] for target in status["targets"])
