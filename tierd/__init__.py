# SPDX-License-Identifier: Apache-2.0
"""tierd keeps hot data in fast memory and cold data in slow memory.

The flow goes one way: discover, sample, decide, migrate, observe. Each stage is a package that
takes and returns values of :mod:`tierd.model` and :mod:`tierd.bulk`; :mod:`tierd.daemon` is the
loop that joins them.
"""
