# SPDX-License-Identifier: Apache-2.0
"""One module per kernel interface: the sole home of paths, ioctls and the extension."""
