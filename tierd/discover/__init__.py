# SPDX-License-Identifier: Apache-2.0
"""What memory the machine has, and which processes are to be placed."""
