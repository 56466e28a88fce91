# SPDX-License-Identifier: Apache-2.0
"""The commands tierd and tierctl."""

import os

# NumPy's BLAS starts a thread for each CPU as it is loaded, and nothing here has work for one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
