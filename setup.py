"""Builds what can be built here; everything else about the package is in pyproject.toml.

The package works with nothing compiled. Where a C++ compiler is found, the planner's search is compiled, without which
plans are only constructed, and on Linux the launcher of Triton kernels; where nvcc and a GPU that they are for are
found, the CUDA kernels are. A compile that fails is an error. The environment variable ZBKERN_BUILD decides: "auto"
(the default) builds what this machine has compilers and GPUs for, "cpu" all but the CUDA kernels, "cuda" insists on
them, also for another machine, "off" builds nothing.
build_tools/decision.py is the decision.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where the build runs without pyproject.toml's backend-path

from build_tools import cuda
from build_tools.decision import decide, this_machine


def extension(part: str, platform: str) -> Extension:
    """What setuptools compiles for a part. Its headers come with the build environment, no torch among them."""
    import pybind11

    flags = ["/O2", "/std:c++17"] if platform == "win32" else ["-O2", "-g0", "-std=c++17", "-fvisibility=hidden"]
    root = Path(__file__).parent
    sources, headers = (
        sorted(path.relative_to(root).as_posix() for path in (root / "csrc").glob(f"{part}{each}"))
        for each in ("_*.cpp", "*.h")
    )
    return Extension(
        f"zbkern._{part}",
        sources,
        depends=headers,
        include_dirs=["csrc", pybind11.get_include()],
        extra_compile_args=flags,
        libraries=["dl"] if part == "launcher" else [],
        language="c++",
    )


def description() -> str:
    """README for where its files are not: without pictures, and with a page's path in the place of a link to it."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text)
    link = r"\[([^\]]+)\]\((?![a-z]+:)([^)\s]+)\)"
    return re.sub(link, lambda found: found[1] if found[1] in found[2] else f"{found[1]} ({found[2]})", text)


class FreshBuild(build):
    """build, but a wheel gets nothing that an earlier one left: kernels switched off since, modules since removed."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib, "zbkern"), ignore_errors=True)
        super().run()


class LoudBuild(build_ext):
    """build_ext that builds the CUDA kernels, too, and whose errors say how to do without.

    What was built before of the same sources is copied: setuptools would compile it anew for each editable install.
    """

    def build_extension(self, ext: Extension) -> None:
        machine, target = this_machine(), Path(self.get_ext_fullpath(ext.name))
        if ext.name == "zbkern._cuda":
            cuda.build(target, machine)
            return
        kept = cuda.cache_folder(machine) / f"{ext.name}-{self.content_hash(ext)}"
        if not kept.exists():
            self.force = True  # what lies in the build folder may be of other flags
            try:
                super().build_extension(ext)
            except Exception as error:
                raise RuntimeError(
                    f"building {ext.name} failed: {error}\n  to install without it: ZBKERN_BUILD=off"
                ) from error
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = shutil.copy2(target, kept.with_suffix(f".{os.getpid()}"))
            os.replace(part, kept)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(kept, target)

    def content_hash(self, ext: Extension) -> str:
        """Of everything that an extension depends on."""
        words = [self.get_ext_filename(ext.name), *ext.extra_compile_args]
        for command in ("compiler_so_cxx", "linker_so_cxx"):
            words += getattr(self.compiler, command, None) or []
        texts = [Path(name).read_bytes() for name in (*ext.sources, *ext.depends)]
        return cuda.hash_of(*texts, " ".join(words).encode())


if __name__ == "__main__":
    parts = decide(this_machine()).parts
    commands = {"build": FreshBuild, "build_ext": LoudBuild}
    setup(
        ext_modules=[extension(part, sys.platform) for part in parts],
        cmdclass=commands,
        long_description=description(),
        long_description_content_type="text/markdown",
    )
