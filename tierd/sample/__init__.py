# SPDX-License-Identifier: Apache-2.0
"""How often memory is accessed, and where it lies."""
