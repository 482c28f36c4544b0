"""setuptools' build backend, which asks for the CUDA part's build requirements only where that part is built.

nvidia-cutlass (headers) brings a hundred megabytes of Python packages, which no machine without nvcc should fetch.
"""

from __future__ import annotations

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from build_tools import decision

CUDA_REQUIREMENTS = ["nvidia-cutlass==4.2.*"]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_cuda_requirements()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_cuda_requirements()]


def _cuda_requirements() -> list[str]:
    return CUDA_REQUIREMENTS if "cuda" in decision.decide(decision.this_machine()).parts else []
