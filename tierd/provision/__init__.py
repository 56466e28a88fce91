# SPDX-License-Identifier: Apache-2.0
"""Brings CXL memory into the machine: what is to be written to sysfs, and how it is done."""
