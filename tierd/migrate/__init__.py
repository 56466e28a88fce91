# SPDX-License-Identifier: Apache-2.0
"""Makes a plan's moves, and tells what became of each."""
