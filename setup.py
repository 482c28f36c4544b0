"""Builds what can be built here; everything else about the package is in pyproject.toml.

The package works with nothing compiled. Where a C++ compiler is found, the planner's search core is compiled, which
makes it a thousand times faster; a compile that fails is then an error. The environment variable ZBKERN_BUILD decides:
"auto" (the default) builds what this machine has a compiler for, "off" builds nothing, "cuda" asks for CUDA kernels.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

MODES = ("auto", "off", "cuda")


def parts_to_build(mode: str, compiler: str | None) -> list[str]:
    """Names of the parts to build. compiler: path of a C++ compiler, or None. Raises ValueError when it cannot be."""
    if mode not in MODES:
        raise ValueError(f"ZBKERN_BUILD must be one of {', '.join(MODES)}; got {mode!r}")
    if mode == "cuda":
        raise ValueError("ZBKERN_BUILD=cuda: this version has no CUDA kernels to build; use auto or off")
    return ["planner"] if mode == "auto" and compiler is not None else []


def find_compiler(environment: Mapping[str, str], platform: str) -> str | None:
    """The C++ compiler that setuptools will use, if there is one."""
    if environment.get("CXX"):
        return shutil.which(shlex.split(environment["CXX"])[0])
    names = ("cl",) if platform == "win32" else ("c++", "g++", "clang++")
    return next((path for path in map(shutil.which, names) if path is not None), None)


def extension(part: str, platform: str) -> Extension:
    """What setuptools compiles for a part. Its headers come with the build environment, no torch among them."""
    import pybind11

    flags = ["/O2", "/std:c++17"] if platform == "win32" else ["-O3", "-std=c++17", "-fvisibility=hidden"]
    root = Path(__file__).parent
    sources = sorted(path.relative_to(root).as_posix() for path in (root / "csrc").glob(f"{part}_*.cpp"))
    return Extension(
        f"zbkern._{part}",
        sources,
        depends=[f"csrc/{part}.h"],
        include_dirs=["csrc", pybind11.get_include()],
        extra_compile_args=flags,
        language="c++",
    )


class LoudBuild(build_ext):
    """build_ext whose error says which command failed."""

    def build_extension(self, ext: Extension) -> None:
        spawn = self.compiler.spawn

        def spawn_loudly(command: list[str], **options: object) -> None:
            try:
                spawn(command, **options)
            except Exception as error:
                line = shlex.join(map(str, command))
                raise RuntimeError(
                    f"building {ext.name} failed: {error}\n  command: {line}\n  to install without it: ZBKERN_BUILD=off"
                ) from error

        self.compiler.spawn = spawn_loudly
        super().build_extension(ext)


if __name__ == "__main__":
    parts = parts_to_build(os.environ.get("ZBKERN_BUILD", "auto"), find_compiler(os.environ, sys.platform))
    setup(ext_modules=[extension(part, sys.platform) for part in parts], cmdclass={"build_ext": LoudBuild})
