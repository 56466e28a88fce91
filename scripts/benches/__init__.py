# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each module but the frame has `run() -> list[Figure]`, and its name is a NAME."""
