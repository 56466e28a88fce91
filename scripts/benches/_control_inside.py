# SPDX-License-Identifier: Apache-2.0
"""The guest's half of the control benchmark.

Usage: python -m benches._control_inside SOCKET
"""

import http.client
import json
import socket
import sys
import time

ROUNDS, ASKED = 5, 60


def latency_ms(path: str, asked: str = "/v1/status") -> float:
    """Milliseconds of one request, on a connection of its own, as tierctl makes them."""
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    begin_ns = time.monotonic_ns()
    connection.sock.connect(path)
    connection.request("GET", asked)
    answer = connection.getresponse()
    answer.read()
    end_ns = time.monotonic_ns()
    connection.close()
    assert answer.status == 200, answer.status
    return (end_ns - begin_ns) / 1e6


def main() -> None:
    rounds = [[latency_ms(sys.argv[1]) for _ in range(ASKED)] for _ in range(ROUNDS)]
    print(json.dumps(rounds))


if __name__ == "__main__":
    main()
