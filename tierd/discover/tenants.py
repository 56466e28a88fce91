# SPDX-License-Identifier: Apache-2.0
"""Tenants: whose memory competes as one. A process is of the [[tenant]] whose cgroup is nearest."""

from collections.abc import Sequence

from tierd.config import TenantConfig
from tierd.discover.targets import is_below
from tierd.errors import ConfigError, Problem
from tierd.model import Rank, Tenant, Tier

OTHERS = "others"
"""The tenant of all that are of no [[tenant]]."""

MIB = 1 << 20


class Tenants:
    """The tenants as configured, and behind them those who are of none.

    What is promised of a tier that isn't there is left out: tiers come and go.
    """

    def __init__(self, configured: Sequence[TenantConfig], tiers: Sequence[Tier]) -> None:
        ranks = {tier.name: tier.rank for tier in tiers}
        self._cgroups = [tenant.cgroup for tenant in configured]
        self.all = (*(_tenant(each, ranks) for each in configured), Tenant(name=OTHERS))

    def index(self, cgroup: str | None) -> int:
        """Returns whose a process of that cgroup is."""
        above = [i for i, known in enumerate(self._cgroups) if is_below(cgroup, known)]
        return max(above, key=lambda i: len(self._cgroups[i]), default=len(self._cgroups))


def check_tenants(configured: Sequence[TenantConfig], tiers: Sequence[Tier]) -> None:
    """Refuses tenants that are promised what isn't there.

    Raises:
        ConfigError: each tier that is unknown, and each that more is guaranteed of than it has.
    """
    problems = []
    capacity_mib = {tier.name: tier.capacity_bytes / MIB for tier in tiers}
    promised_mib = dict.fromkeys(capacity_mib, 0.0)
    for tenant in configured:
        for key in ("guaranteed_mib", "maximum_mib"):
            problems += [
                _problem(
                    tenant, key, f"there is no tier {tier}; there are {', '.join(promised_mib)}"
                )
                for tier in getattr(tenant, key)
                if tier not in capacity_mib
            ]
        for tier, size_mib in tenant.guaranteed_mib.items():
            if tier not in capacity_mib:
                continue
            promised_mib[tier] += size_mib
            if promised_mib[tier] > capacity_mib[tier] >= promised_mib[tier] - size_mib:
                told = f"with this {promised_mib[tier]:g} MiB of {tier} are guaranteed"
                told += f", which has {capacity_mib[tier]:.0f}"
                problems.append(_problem(tenant, "guaranteed_mib", told))
    if problems:
        raise ConfigError(problems)


def _tenant(configured: TenantConfig, ranks: dict[str, Rank]) -> Tenant:
    guaranteed, maximum = (
        {ranks[tier]: int(size * MIB) for tier, size in sizes.items() if tier in ranks}
        for sizes in (configured.guaranteed_mib, configured.maximum_mib)
    )
    return Tenant(
        name=configured.cgroup,
        class_=configured.class_,
        weight=configured.weight,
        guaranteed_bytes=guaranteed,
        maximum_bytes=maximum,
        far_mbps=configured.far_mbps,
    )


def _problem(tenant: TenantConfig, key: str, message: str) -> Problem:
    place = tenant.place
    return Problem(
        file=place.file, line=place.line, key=f"tenant {tenant.cgroup}: {key}", message=message
    )
