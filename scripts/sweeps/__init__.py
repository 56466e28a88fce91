# SPDX-License-Identifier: Apache-2.0
"""Sweeps over more layers than the fast tier holds: for ./scripts/demo --arena and the bench."""
