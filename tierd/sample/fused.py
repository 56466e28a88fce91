# SPDX-License-Identifier: Apache-2.0
"""DAMON and samples of hardware as one sampler.

Who asks for a look at single pages has it at once where samples have told enough of them, and from
DAMON where not.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Accesses
from tierd.config import HardwareConfig, Samples
from tierd.errors import TierdError
from tierd.kernel import pmu, text
from tierd.kernel.pmu import Nothing, Source
from tierd.model import Pid
from tierd.sample.hardware import Hardware, Sampling
from tierd.sample.hits import Hits
from tierd.sample.sampler import Sampler
from tierd.sample.tuning import Tuning

log = logging.getLogger("tierd")


def with_hardware(
    damon: Sampler,
    config: HardwareConfig,
    root: Path = Path("/"),
    *,
    write_weight: float = 1.0,
) -> Sampler:
    """Returns DAMON with what samples addresses here; alone, and says why, where nothing does."""
    if config.samples is Samples.OFF:
        return damon
    try:
        source = _source(config, root)
        if isinstance(source, Nothing):
            log.info("accesses are not sampled by hardware: %s", source.why)
            return damon
        online = text.read_ids(root / "sys/devices/system/cpu/online") or ()
        cpus = [cpu for cpu in online if source.cpus is None or cpu in source.cpus]
        hardware = Hardware(source, cpus, cpu_percent=config.cpu_percent, write_weight=write_weight)
    except (OSError, TierdError) as error:
        log.warning("accesses are not sampled by hardware: %s", error)
        return damon
    log.info("accesses are sampled too: %s on %d CPUs", source.name, len(cpus))
    return Fused(damon, hardware)


def _source(config: HardwareConfig, root: Path) -> Source | Nothing:
    return pmu.page_faults() if config.samples is Samples.PAGE_FAULTS else pmu.find(root)


class Fused:
    """A tierd.sample.sampler.Sampler.

    Args:
        damon: what watches the targets' regions.
        hardware: what samples addresses.
    """

    def __init__(self, damon: Sampler, hardware: Hardware) -> None:
        self._damon, self._hardware = damon, hardware
        self._hits: dict[Pid, Hits] = {}
        self._looks: list[Accesses] = []
        self._hit_pages = 0

    def weigh_writes(self, weight: float) -> None:
        """Counts a store for so many reads from now on."""
        self._hardware.write_weight = weight

    @property
    def way(self) -> str:
        return self._damon.way

    @property
    def losses(self) -> int:
        return self._damon.losses

    @property
    def tuning(self) -> Mapping[Pid, Tuning]:
        return self._damon.tuning

    @property
    def sampling(self) -> Sampling | None:
        return self._hardware.sampling

    @property
    def loads(self) -> NDArray[np.void]:
        return self._hardware.loads

    @property
    def zoomed_pages(self) -> int:
        return self._damon.zoomed_pages + self._hit_pages

    @property
    def is_calm(self) -> bool:
        return self._damon.is_calm

    @is_calm.setter
    def is_calm(self, is_calm: bool) -> None:
        self._damon.is_calm = is_calm

    @property
    def can_look(self) -> bool:
        return True

    @property
    def can_zoom(self) -> bool:
        return True

    def watch(self, pid: Pid) -> None:
        self._damon.watch(pid)
        self._hits.setdefault(pid, Hits())

    def unwatch(self, pid: Pid) -> None:
        self._damon.unwatch(pid)
        self._hits.pop(pid, None)

    def poll(self) -> list[Accesses]:
        now_s = time.monotonic()
        for pid, hits in self._hardware.read(self._hits).items():
            self._hits[pid].take_in(hits["page"], now_s, hits["weight"])
        looks, self._looks = self._looks, []
        return self._damon.poll() + [look for look in looks if look.pid in self._hits]

    def zoom(self, pid: Pid, start: int, end: int, *, per_page_s: float) -> bool:
        known = self._hits[pid].look(pid, start, end) if pid in self._hits else None
        if known is not None:
            self._looks.append(known)
            self._hit_pages += int((known.regions["nr_accesses"] > 0).sum())
            return True
        return self._damon.zoom(pid, start, end, per_page_s=per_page_s)

    def gone(self) -> list[Pid]:
        gone = self._damon.gone()
        for pid in gone:
            self._hits.pop(pid, None)
        return gone

    def filenos(self) -> Sequence[int]:
        return self._damon.filenos()

    def close(self) -> None:
        with closing(self._hardware):
            self._damon.close()
