# SPDX-License-Identifier: Apache-2.0
"""A donor's status in Prometheus' text format (docs/remote.md). No label names a borrower."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tierd.observe.metrics import exposition

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def as_text(status: Mapping[str, Any]) -> str:
    """Returns a scrape's answer."""
    return exposition(_metrics(status))


def _metrics(status: Mapping[str, Any]) -> Iterator["Metric"]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, value, told in (
        ("capacity_bytes", status["capacity"], "What it lends, borrowed or not."),
        ("borrowed_bytes", status["borrowed"], "What of it borrowers have."),
        ("reserve_bytes", status["reserve"], "What was to be free on its nodes besides."),
        ("spare_bytes", status["spare"], "What they have free above that; below 0 it lacks."),
        ("borrowers", len(status["borrowers"]), "Leases that are in use."),
        ("draining", status["leaves"], "1 while borrowers are asked to move away."),
    ):
        yield GaugeMetricFamily(f"tierd_donor_{name}", told, value)
    yield CounterMetricFamily("tierd_donor_leases", "Leases that were given.", status["leases"])
    for name, label, told in (
        ("refused", "reason", "Who came and was lent nothing."),
        ("ended", "how", "Leases that have ended; silent and lost are borrowers that were lost."),
    ):
        family = CounterMetricFamily(f"tierd_donor_{name}", told, labels=[label])
        for value, count in status[name].items():
            family.add_metric([value], count)
        yield family
