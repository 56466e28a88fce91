# SPDX-License-Identifier: Apache-2.0
"""Emulated machines with slow memory: `with boot(topology, kernel) as guest: guest.run([...])`."""
