# SPDX-License-Identifier: Apache-2.0
"""How much of the time tasks wait for memory (Documentation/accounting/psi.rst).

/proc/pressure/memory, percent of the time over 10, 60 and 300 seconds, and microseconds in all::

    some avg10=0.12 avg60=0.05 avg300=0.01 total=1204211
    full avg10=0.00 avg60=0.00 avg300=0.00 total=803122
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tierd.kernel import text

FILE = Path("proc/pressure/memory")
_LINE = re.compile(r"^(some|full) avg10=(\d+\.\d+) ", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Percent of the last 10 seconds in which some or all tasks waited for memory."""

    some_percent: float
    full_percent: float


def read_pressure(root: Path = Path("/")) -> Pressure | None:
    """Returns None where the kernel doesn't tell (no CONFIG_PSI, or psi=0).

    Raises:
        UnexpectedContent: the file is not as documented.
    """
    try:
        content = text.read(root / FILE)
    except OSError:  # EOPNOTSUPP where it was turned off at boot
        return None
    if content is None:
        return None
    found = dict(_LINE.findall(content))
    if found.keys() != {"some", "full"}:
        raise text.UnexpectedContent(root / FILE, content, "lines of some and full")
    return Pressure(some_percent=float(found["some"]), full_percent=float(found["full"]))
