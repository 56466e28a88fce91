# SPDX-License-Identifier: Apache-2.0
"""Which tierd this is; apart, since what reads it takes as long to load as a tenth of tierctl."""

from importlib.metadata import version

VERSION = version("tierd")
"""As it was when this was loaded; an upgrade may have come since."""
