# SPDX-License-Identifier: Apache-2.0
"""Memory of other hosts: what a donor lends, and how a borrower has it (docs/remote.md)."""
