# SPDX-License-Identifier: Apache-2.0
"""What moved, what did not, and why."""
