# SPDX-License-Identifier: Apache-2.0
"""A fake of DAMON's admin directory, for the unit tests: it answers as mm/damon/sysfs.c does.

What it copies from the kernel is each errno, the wiping by nr_kdamonds, and that a kdamond stops by
itself when its process exits. The guests' tests hold the real thing.
"""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

ADMIN = "sys/kernel/mm/damon/admin/kdamonds"
_CONTEXT = {
    "avail_operations": "vaddr\nfvaddr\npaddr",
    "operations": "vaddr",
    "monitoring_attrs/intervals/sample_us": "5000",
    "monitoring_attrs/intervals/aggr_us": "100000",
    "monitoring_attrs/intervals/update_us": "60000000",
    "monitoring_attrs/nr_regions/min": "10",
    "monitoring_attrs/nr_regions/max": "1000",
    "targets/nr_targets": "0",
    "schemes/nr_schemes": "0",
}
_ENDS = ("min", "max")
_GOAL = ("access_bp", "aggrs", "min_sample_us", "max_sample_us")
_STATS = ("nr_tried", "sz_tried", "nr_applied", "sz_applied", "qt_exceeds")
_SCHEME = (
    *("action", "target_nid", "quotas/bytes", "quotas/reset_interval_ms", "quotas/goals/nr_goals"),
    "quotas/weights/nr_accesses_permil",
    *(f"access_pattern/{what}/{end}" for what in ("sz", "nr_accesses", "age") for end in _ENDS),
    *(f"stats/{what}" for what in _STATS),
)
_SCHEME_OF_LATER_KERNELS = (
    *("dests/nr_dests", "quotas/goal_tuner", "quotas/fail_charge_num", "quotas/fail_charge_denom"),
)
_ACTIONS = ("stat", "pageout", "migrate_hot", "migrate_cold")
_METRICS = ("user_input", "some_mem_psi_us")
_METRICS_OF_LATER_KERNELS = ("node_mem_used_bp", "node_mem_free_bp")


class FakeDamon:
    """tierd.kernel.tunable.Files over an imagined kernel."""

    def __init__(
        self,
        root: Path,
        *,
        kdamonds: int = 0,
        goal: bool = True,
        migration: bool = True,
        processes: Iterable[int] = (),
    ) -> None:
        self.root = root
        self.values: dict[str, str] = {}
        self.running: dict[int, int] = {}
        self.processes = set(processes)
        self.exclusive: dict[str, bool] = {}
        self.busy = 0
        self.writes: list[tuple[str, str]] = []
        self.done: dict[tuple[int, int], dict[str, int]] = {}
        """What a kdamond's scheme has done, by the names in stats/: by slot and scheme."""
        self._goal, self._migration = goal, migration
        self._next_pid = 400
        self._resize(kdamonds)
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        self.reboot("boot-1")

    def reboot(self, boot_id: str) -> None:
        (self.root / "proc/sys/kernel/random/boot_id").write_text(boot_id + "\n")

    def exit(self, pid: int) -> None:
        """Ends a process; the kdamonds that watch it alone stop."""
        self.processes.discard(pid)
        for slot in list(self.running):
            if self._target(slot) == pid:
                del self.running[slot]

    def start_foreign(self, slot: int, pid: int) -> None:
        """Sets up and starts a kdamond as somebody else would."""
        base = self.root / ADMIN / str(slot)
        self.write(base / "contexts/nr_contexts", "1")
        self.write(base / "contexts/0/targets/nr_targets", "1")
        self.write(base / "contexts/0/targets/0/pid_target", str(pid))
        self.write(base / "state", "on")

    def read(self, path: Path) -> str:
        name = self._name(path)
        self._trylock(name, only="/pid")
        slot = self._slot_of(name)
        if slot is not None and name.endswith("/state"):
            return "on" if slot in self.running else "off"
        if slot is not None and name.endswith(f"{slot}/pid"):
            return str(self.running.get(slot, -1))
        for module, enabled in self.exclusive.items():
            if name == f"sys/module/{module}/parameters/enabled":
                return "Y" if enabled else "N"
        return self.values[name]

    def write(self, path: Path, value: str) -> None:
        name = self._name(path)
        self._trylock(name, only="")
        self.writes.append((name, value))
        for module in self.exclusive:
            if name == f"sys/module/{module}/parameters/enabled":
                self._switch(module, value == "Y")
                return
        if name == f"{ADMIN}/nr_kdamonds":
            if self.running:
                raise self._error(errno.EBUSY, name)
            self._resize(int(value))
        elif name.endswith("/nr_contexts"):
            self._set_contexts(name, int(value))
        elif name.endswith("/nr_targets"):
            self.values[name] = value
            self.values[name.replace("nr_targets", "0/pid_target")] = "0"
            self.values[name.replace("nr_targets", "0/regions/nr_regions")] = "0"
        elif name.endswith("/regions/nr_regions"):
            prefix = name.removesuffix("nr_regions")
            self.values = {k: v for k, v in self.values.items() if not k.startswith(prefix)}
            edges = [f"{index}/{edge}" for index in range(int(value)) for edge in ("start", "end")]
            self.values |= {name: value} | {prefix + edge: "0" for edge in edges}
        elif name.endswith("/nr_schemes"):
            self._set_schemes(name, int(value))
        elif name.endswith(("/nr_goals", "/nr_dests")):
            self._set_members(name, int(value))
        elif name.endswith("/target_metric"):
            later = _METRICS_OF_LATER_KERNELS if self._migration else ()
            self._choose(name, value, (*_METRICS, *later))
        elif name.endswith("/action"):
            self._choose(name, value, _ACTIONS)
        elif name.endswith("/state"):
            self._command(name, value)
        else:
            self.values[name] = value

    def write_ranges(self, folder: Path, start: int, size: int, count: int) -> None:
        for index in range(count):
            self.write(folder / f"{index}/start", str(start + index * size))
            self.write(folder / f"{index}/end", str(start + (index + 1) * size))

    def exists(self, path: Path) -> bool:
        name = str(path.relative_to(self.root))
        try:
            self._name(path)
        except FileNotFoundError:
            return any(known.startswith(f"{name}/") for known in self.values)
        return True

    def names(self, path: Path) -> list[str]:
        prefix = f"{path.relative_to(self.root)}/"
        inside = {k.removeprefix(prefix).split("/")[0] for k in self.values if k.startswith(prefix)}
        if not inside:
            raise self._error(errno.ENOENT, str(path.relative_to(self.root)))
        return sorted(inside)

    def _name(self, path: Path) -> str:
        name = str(path.relative_to(self.root))
        computed = {f"{ADMIN}/{slot}/{what}" for slot in self._slots() for what in ("state", "pid")}
        switches = {f"sys/module/{module}/parameters/enabled" for module in self.exclusive}
        if name not in self.values and name not in computed | switches:
            raise self._error(errno.ENOENT, name)
        return name

    def _slots(self) -> range:
        return range(int(self.values.get(f"{ADMIN}/nr_kdamonds", "0")))

    def _slot_of(self, name: str) -> int | None:
        first = name.removeprefix(f"{ADMIN}/").split("/")[0]
        return int(first) if first.isdigit() else None

    def _trylock(self, name: str, *, only: str) -> None:
        if self.busy and name.startswith(ADMIN) and name.endswith(only):
            self.busy -= 1
            raise self._error(errno.EBUSY, name)

    def _resize(self, count: int) -> None:
        self.values = {k: v for k, v in self.values.items() if not k.startswith(ADMIN)}
        self.values[f"{ADMIN}/nr_kdamonds"] = str(count)
        for slot in range(count):
            self.values[f"{ADMIN}/{slot}/contexts/nr_contexts"] = "0"

    def _set_contexts(self, name: str, count: int) -> None:
        slot = self._slot_of(name)
        if count not in (0, 1):
            raise self._error(errno.EINVAL, name)
        assert slot not in self.running or count, "the kernel would follow a null pointer"
        prefix = name.replace("nr_contexts", "0/")
        self.values = {k: v for k, v in self.values.items() if not k.startswith(prefix)}
        self.values[name] = str(count)
        if count:
            self.values |= {prefix + what: value for what, value in _CONTEXT.items()}
            if self._goal:
                goal = f"{prefix}monitoring_attrs/intervals/intervals_goal/"
                self.values |= {goal + what: "0" for what in _GOAL}

    def _set_schemes(self, name: str, count: int) -> None:
        folder = name.removesuffix("nr_schemes")
        self.values = {k: v for k, v in self.values.items() if not k.startswith(folder)}
        files = _SCHEME + (_SCHEME_OF_LATER_KERNELS if self._migration else ())
        self.values |= {f"{folder}{n}/{file}": "0" for n in range(count) for file in files}
        self.values[name] = str(count)

    def _set_members(self, name: str, count: int) -> None:
        """Makes the folders of a scheme's goals or destinations."""
        files = ["id", "weight"]
        if name.endswith("/nr_goals"):
            files = ["target_metric", "target_value", *(["nid"] if self._migration else [])]
        folder = name.rpartition("/")[0]
        self.values |= {f"{folder}/{n}/{file}": "0" for n in range(count) for file in files}
        self.values[name] = str(count)

    def _choose(self, name: str, value: str, known: Iterable[str]) -> None:
        if value not in known:
            raise self._error(errno.EINVAL, name)
        self.values[name] = value

    def _tell_done(self, slot: int) -> None:
        for (of, number), done in self.done.items():
            folder = f"{ADMIN}/{slot}/contexts/0/schemes/{number}/stats"
            if of == slot and f"{folder}/nr_tried" in self.values:
                self.values |= {f"{folder}/{what}": str(count) for what, count in done.items()}

    def _target(self, slot: int) -> int:
        return int(self.values[f"{ADMIN}/{slot}/contexts/0/targets/0/pid_target"])

    def _command(self, name: str, command: str) -> None:
        slot = self._slot_of(name)
        assert slot is not None
        if command == "on":
            self._on(slot, name)
        elif slot not in self.running:
            raise self._error(errno.EPERM if command == "off" else errno.ECANCELED, name)
        elif command == "off":
            del self.running[slot]
        elif command == "update_schemes_stats":
            self._tell_done(slot)

    def _on(self, slot: int, name: str) -> None:
        if self.values[f"{ADMIN}/{slot}/contexts/nr_contexts"] != "1":
            raise self._error(errno.EINVAL, name)
        if slot in self.running or any(self.exclusive.values()):
            raise self._error(errno.EBUSY, name)
        if self._target(slot) not in self.processes:
            raise self._error(errno.EINVAL, name)
        self.running[slot] = self._next_pid
        self._next_pid += 1

    def _switch(self, module: str, enabled: bool) -> None:
        if enabled and self.running:
            raise self._error(errno.EBUSY, module)
        self.exclusive[module] = enabled

    def _error(self, number: int, name: str) -> OSError:
        return OSError(number, os.strerror(number), str(self.root / name))
