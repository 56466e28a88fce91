# SPDX-License-Identifier: Apache-2.0
"""PEP 517 backend: setuptools, after cffi has written the extension's glue code.

setuptools compiles C but does not run cffi; cffi's own setuptools hook needs a setup.py. So this
backend emits ``native/_shim.c`` from ``native/tierd.h`` and then is setuptools.
"""

from pathlib import Path

from cffi import FFI
from setuptools.build_meta import *  # noqa: F403  # every hook of PEP 517 and PEP 660

NATIVE = Path(__file__).parent
BEGIN, END = "/* cffi: begin */", "/* cffi: end */"


def declarations(header: str) -> str:
    """Returns the part of tierd.h that cffi can read: what stands between the two marks."""
    return header.split(BEGIN, 1)[1].split(END, 1)[0]


def emit() -> None:
    """Writes native/_shim.c, only when it would change, so that builds stay incremental."""
    ffi = FFI()
    ffi.cdef(declarations((NATIVE / "tierd.h").read_text()))
    ffi.set_source("tierd.kernel._shim", '#include "tierd.h"')
    ffi.emit_c_code(str(NATIVE / "_shim.c"))


emit()
