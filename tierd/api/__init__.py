# SPDX-License-Identifier: Apache-2.0
"""What is asked of a running daemon, over HTTP on Unix sockets."""
