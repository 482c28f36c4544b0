"""Triton's interpreter, made quicker for tests; and integers that overflow end a launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@functools.cache
def quicken() -> None:
    """For the rest of this process. Results stay as they are."""
    interpreter._patch_lang = patching_once(interpreter._patch_lang)
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow


def patching_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of the functions of a launch, only the first that sees a module of the language patches it, for all of them.

    Triton looks through all of the language in every call of a jitted function by another: a third of the tests' time.
    """

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def patch_if_new(function: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages(function)):
            return patch(function)
        return interpreter._LangPatchScope()  # which restores nothing

    return patch_if_new


def check_overflow(semantic: TritonSemantic, lhs: Any, rhs: Any, operation: Any) -> None:
    """Triton's own builds ten of its tensors for every sum and product of integers, and asserts with `debug` only."""
    kind = lhs.type.scalar
    if kind.int_bitwidth < 64 and semantic.builder.options.sanitize_overflow:
        exact = WIDE[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
        assert fits, f"{kind} overflow detected for operation {operation.__name__}"
