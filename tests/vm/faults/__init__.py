# SPDX-License-Identifier: Apache-2.0
"""Kills the daemon at every step, inside a guest; tests/vm/test_faults.py starts it there."""
