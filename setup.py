"""The compiled kernels, which are optional: without a C++ compiler the package is installed without them."""

import hashlib
import sys
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/gramgn/optim/kernels")
# In the order in which gramgn.optim.kernels hashes them, to recognise a library of older sources.
SOURCES = sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")])

setup(
    ext_modules=[
        Extension(
            "gramgn.optim.kernels.compiled",
            [str(FOLDER / "kernels.cpp")],
            depends=[str(path) for path in SOURCES],
            define_macros=[
                (
                    "GRAMGN_SOURCES",
                    f'"{hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()}"',
                )
            ],
            extra_compile_args=[
                # gcc 12 calls values of its own header of intrinsics uninitialized, in 400 lines.
                *("-O3", "-g0", "-std=c++17", "-Wno-uninitialized"),
                *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
            ],
            language="c++",
            optional=True,
        )
    ]
    if sys.platform != "win32"
    else []
)
