# SPDX-License-Identifier: Apache-2.0
"""Tests of sampling that run inside a guest; tests/vm/test_inside.py starts them there."""

import os

collect_ignore_glob = [] if os.environ.get("TIERD_IN_GUEST") else ["test_*.py"]
