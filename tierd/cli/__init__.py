# SPDX-License-Identifier: Apache-2.0
"""The commands tierd and tierctl."""
