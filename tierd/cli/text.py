# SPDX-License-Identifier: Apache-2.0
"""Tables and amounts for people."""

from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def amount(size_bytes: int) -> str:
    """Spells a size with three digits or so: 512 MiB, 1.86 GiB."""
    size = float(size_bytes)
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    digits = 0 if size.is_integer() or size >= 100 else 1 if size >= 10 else 2
    return f"{size:.{digits}f} {_UNITS[unit]}"


def ids(numbers: Iterable[int]) -> str:
    """Spells ids as the kernel does: 0-3,5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lays out rows below their heads, in columns as wide as they need."""
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def share(part: float, whole: float) -> str:
    """Spells a share in percent, a dash where there is nothing to have a share of."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else "-"
