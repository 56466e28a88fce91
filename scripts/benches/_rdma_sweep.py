# SPDX-License-Identifier: Apache-2.0
"""A sweep over layers of which half are on three donors, each on two of them.

The work on a layer takes as long as its copies, out to both donors and in, when it is fetched on
demand. That is a device's, which the CPUs wait for (simulated); beside it a digest on a CPU, for
which donors and the copies here leave little of two CPUs.
"""

from contextlib import ExitStack
from functools import partial

from sweeps.donors import DonorProcess
from sweeps.layers import Elsewhere, Sweep, some_layers

from benches.figure import Figure
from benches.sweep import shares
from tierd.remote.wire import Keys
from tierd.tiers.rdma import RemoteTier, rdma

DONORS, LENT_MIB = 3, 512
LAYERS, FAST, LAYER_BYTES = 64, 32, 2 << 20
LEAST = 0.9


def measure(keys: Keys, _: int) -> list[Figure]:
    layers = some_layers(LAYERS, LAYER_BYTES)
    with ExitStack() as stack:
        donors = []
        for _number in range(DONORS):
            donors.append(DonorProcess(keys, LENT_MIB))
            stack.callback(donors[-1].end)

        def far(capacity_bytes: int) -> RemoteTier:
            addresses = [donor.address for donor in donors]
            return rdma(addresses, capacity_bytes, ca=keys.ca, cert=keys.cert, key=keys.key)

        sweep = Sweep(layers, FAST, far)
        return [
            *shares(sweep, partial(Elsewhere, layers), "sweep, work elsewhere", LEAST),
            *shares(sweep, sweep.work_for, "sweep, work on a CPU", None),
        ]
