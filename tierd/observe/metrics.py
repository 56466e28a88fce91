# SPDX-License-Identifier: Apache-2.0
"""The daemon's account in Prometheus' text format.

Everything is told from one round's account (docs/status.md), so that a scrape and a status of that
round agree to the page. The daemon's own CPU time, memory and files are prometheus_client's
process_* metrics.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tierd.observe.flows import OTHERS

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MIB = 1 << 20

BOUNDS: Sequence[float] = tuple(2.0**n for n in range(-6, 9))
"""Of the heat histogram, in accesses per page and second: from once a minute on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """A tier's bytes in each bucket of BOUNDS and above the last, and their heat taken together."""

    bytes: NDArray[np.number]
    total: float


def as_text(account: Mapping[str, Any], heat: Mapping[str, Heat]) -> str:
    """Returns a scrape's answer. `heat` is by the tiers' names."""
    return exposition(_metrics(account, heat))


def exposition(metrics: Iterable["Metric"]) -> str:
    """Spells metrics, and those of this process, as Prometheus reads them."""
    # A daemon that is never scraped does not pay for the library.
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    class Told:
        def collect(self) -> Iterator["Metric"]:
            yield from metrics

    registry = CollectorRegistry()
    registry.register(Told())
    ProcessCollector(registry=registry)
    return generate_latest(registry).decode()


def _metrics(account: Mapping[str, Any], heat: Mapping[str, Heat]) -> Iterator["Metric"]:
    yield from _tiers(account["tiers"])
    yield from _flows(account["flows"])
    yield from _schemes(account["schemes"])
    yield from _targets(account["targets"])
    yield from _arenas(account["arenas"], account["arena_blocks"])
    yield from _shares(account["tenants"])
    yield from _cxl(account["cxl"])
    yield from _daemon(account)
    yield _heat(heat)


def _tiers(tiers: Sequence[Mapping[str, Any]]) -> Iterator["Metric"]:
    from prometheus_client.core import GaugeMetricFamily

    for key, told in (
        ("capacity", "The memory of a tier's nodes."),
        ("free", "What of it the kernel's free lists hold above the watermarks."),
        ("headroom", "What of it promotions leave for new allocations."),
    ):
        family = GaugeMetricFamily(f"tierd_tier_{key}_bytes", told, labels=["tier"])
        for tier in tiers:
            family.add_metric([tier["name"]], tier[key])
        yield family
    yield from _loaded(tiers)


def _loaded(tiers: Sequence[Mapping[str, Any]]) -> Iterator["Metric"]:
    from prometheus_client.core import GaugeMetricFamily

    told = "What loads from a tier take lately, in cycles of their CPUs, where that is known."
    family = GaugeMetricFamily("tierd_tier_loaded_cycles", told, labels=["tier"])
    for tier in tiers:
        if tier["loaded_cycles"] is not None:
            family.add_metric([tier["name"]], tier["loaded_cycles"])
    yield family
    told = "1 while nothing is moved up to a tier from a slower one that answers as soon."
    family = GaugeMetricFamily("tierd_tier_closed", told, labels=["tier", "source"])
    for upper, lower in combinations(tiers, 2):
        family.add_metric([upper["name"], lower["name"]], lower["name"] in upper["closed_to"])
    yield family


def _flows(flows: Sequence[Mapping[str, Any]]) -> Iterator["Metric"]:
    from prometheus_client.core import CounterMetricFamily

    labels = ["tenant", "source", "destination", "direction", "outcome"]
    for unit, factor in (("pages", 1), ("bytes", 4096)):
        family = CounterMetricFamily(
            f"tierd_migration_{unit}", f"What became of {unit} that were to move.", labels=labels
        )
        for flow in flows:
            family.add_metric([flow[label] for label in labels], flow["pages"] * factor)
        yield family


def _schemes(schemes: Sequence[Mapping[str, Any]]) -> Iterator["Metric"]:
    from prometheus_client.core import CounterMetricFamily

    for key, name, told in (
        ("pages", "moved_pages", "Pages that the kernel has moved by itself."),
        ("tried_bytes", "tried_bytes", "Bytes that it has looked through for that."),
        ("over_quota", "over_quota", "How often it has spent the budget."),
    ):
        family = CounterMetricFamily(f"tierd_damos_{name}", told, labels=["action"])
        for scheme in schemes:
            family.add_metric([scheme["action"]], scheme[key])
        yield family


def _targets(targets: Sequence[Mapping[str, Any]]) -> Iterator["Metric"]:
    from prometheus_client.core import GaugeMetricFamily

    for key, told in (
        ("resident", "What a tenant's targets have on a tier."),
        ("hot", "What of it is hot."),
    ):
        family = GaugeMetricFamily(f"tierd_tenant_{key}_bytes", told, labels=["tenant", "tier"])
        total: dict[tuple[str, str], int] = {}
        for target in targets:
            for tier, size in target[key].items():
                place = (target["cgroup"] or OTHERS, tier)
                total[place] = total.get(place, 0) + size
        for (tenant, tier), size in total.items():
            family.add_metric([tenant, tier], size)
        yield family
    yield GaugeMetricFamily("tierd_targets", "Processes that are watched.", len(targets))


def _arenas(arenas: Sequence[Mapping[str, Any]], blocks: Mapping[str, int]) -> Iterator["Metric"]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    told = "What became of blocks that arenas were to bring to another tier."
    outcomes = CounterMetricFamily("tierd_arena_blocks", told, labels=["outcome"])
    for outcome, count in blocks.items():
        outcomes.add_metric([outcome], count)
    yield outcomes

    yield GaugeMetricFamily("tierd_arenas", "Arenas that are connected.", len(arenas))
    for key, name, factor, told in (
        ("resident", "resident_bytes", 1, "have on a tier"),
        ("far_used_mbps", "far_bytes_per_second", MIB, "copy to and from a far tier"),
        ("far_limit_mbps", "far_limit_bytes_per_second", MIB, "may copy, where that is limited"),
    ):
        told = f"What a tenant's arenas {told}, by the arenas' own names."
        family = GaugeMetricFamily(f"tierd_arena_{name}", told, labels=["tenant", "tier"])
        total: dict[tuple[str, str], float] = {}
        for arena in arenas:
            for tier, size in arena[key].items():
                place = (arena["tenant"], tier)
                total[place] = total.get(place, 0) + size * factor
        for (tenant, tier), size in total.items():
            family.add_metric([tenant, tier], size)
        yield family


def _shares(tenants: Sequence[Mapping[str, Any]]) -> Iterator["Metric"]:
    from prometheus_client.core import GaugeMetricFamily

    told = "What a configured tenant may have of a tier now."
    family = GaugeMetricFamily("tierd_tenant_share_bytes", told, labels=["tenant", "tier"])
    for tenant in tenants:
        for tier, size in tenant["share"].items():
            family.add_metric([tenant["name"], tier], size)
    yield family


def _cxl(cxl: Mapping[str, Any]) -> Iterator["Metric"]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["device", "region", "kind", "severity"]
    told = "Errors that CXL devices have told of."
    family = CounterMetricFamily("tierd_cxl_errors", told, labels=labels)
    for error in cxl["errors"]:
        family.add_metric([error[label] or "" for label in labels], error["count"])
    yield family
    yield CounterMetricFamily(
        "tierd_cxl_lost_events", "Events of CXL devices that could not be read.", cxl["lost"]
    )
    told = "1 while nothing is placed on a node for errors of its device."
    fenced = GaugeMetricFamily("tierd_cxl_fenced", told, labels=["node", "device"])
    for fence in cxl["fenced"]:
        fenced.add_metric([str(fence["node"]), fence["device"]], 1)
    yield fenced


def _daemon(account: Mapping[str, Any]) -> Iterator["Metric"]:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        SummaryMetricFamily,
    )

    yield SummaryMetricFamily(
        "tierd_round_seconds",
        "How long rounds took, their moves included.",
        count_value=account["rounds"],
        sum_value=account["rounds_s"],
    )
    yield CounterMetricFamily(
        "tierd_sampler_lost_records", "Records of DAMON lost.", account["sampler"]["lost"]
    )
    yield GaugeMetricFamily(
        "tierd_move_cost_seconds", "What moving a page costs.", account["page_cost_ns"] / 1e9
    )
    yield GaugeMetricFamily("tierd_paused", "1 while an operator has it pause.", account["paused"])
    yield CounterMetricFamily(
        "tierd_cache_pages", "Pages of page cache that made way.", account["cache_pages"]
    )
    kept = GaugeMetricFamily(
        "tierd_kept_bytes", "Hot bytes that the last plan left in a slower tier.", labels=["reason"]
    )
    for reason, size in account["kept"].items():
        kept.add_metric([reason], size)
    yield kept


def _heat(heat: Mapping[str, Heat]) -> "Metric":
    from prometheus_client.core import GaugeHistogramMetricFamily

    family = GaugeHistogramMetricFamily(
        "tierd_heat_bytes",
        "Bytes of targets by their heat, in accesses per page and second.",
        labels=["tier"],
    )
    bounds = [*map(str, BOUNDS), "+Inf"]
    for tier, found in heat.items():
        buckets = zip(bounds, np.cumsum(found.bytes).tolist(), strict=True)
        family.add_metric([tier], list(buckets), gsum_value=found.total)
    return family
