"""Triton's interpreter, made quicker for tests."""

from __future__ import annotations

import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def patch_once() -> None:
    """Of the functions of a launch, only the first that sees a module of the language patches it, for all of them.

    Triton looks through all of the language in every call of a jitted function by another: a third of the tests' time.
    """
    patch = interpreter._patch_lang

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def patch_if_new(function: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages(function)):
            return patch(function)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = patch_if_new
