# SPDX-License-Identifier: Apache-2.0
"""Heat, placement and budgets: pure functions of values."""
