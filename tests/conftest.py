# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests.

With TIERD_NO_SKIP=1 in the environment, a skip is a failure. Properties have no deadline, since
guests may share the machine, and in CI they try the same examples each time. The options of
tests/vm are here too: where pytest is given no path, it looks for options in this folder's conftest
alone.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TypeVar

import pytest
from hypothesis import settings

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

settings.register_profile("tierd", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("tierd")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        choices=["central", "all"],
        default="central",
        help="on which kernels guests' tests run: each on one and the central ones on all, or all",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _refuse_skip((yield))


def _refuse_skip(report: Report) -> Report:
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not expected_failure and os.environ.get("TIERD_NO_SKIP") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped, and TIERD_NO_SKIP is set: {report.longrepr}"
    return report
