"""Records the variants that calls of the kernels would compile, for this machine's GPU or for another."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class CompileJob:
    """A variant of a kernel as Triton's launcher would compile it; kernel: its module and its name there."""

    kernel: tuple[str, str]
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    target: Any
    options: dict[str, Any]

    def function(self) -> Any:
        """The jitted function."""
        module, name = self.kernel
        return getattr(importlib.import_module(module), name).function

    def source(self) -> Any:
        """Under the name that other processes look it up by."""
        from triton.compiler import ASTSource

        name_kernels()
        return ASTSource(self.function(), self.signature, self.constants, self.attributes)


def compile_job(job: CompileJob) -> Any:
    """Compiles one, into Triton's cache; returns Triton's CompiledKernel."""
    from triton.compiler import compile as triton_compile

    from zbkern.kernels.triton.common import compiling

    with compiling():
        return triton_compile(job.source(), target=job.target, options=job.options)


@contextlib.contextmanager
def recorded(target: Any = None) -> Iterator[list[CompileJob]]:
    """Records the variants that calls inside would compile, each once, in their order. The calls launch nothing.

    target: a triton.backends.compiler.GPUTarget, None for the GPU of Triton's driver.
    """
    from zbkern.kernels.triton.common import Kernel, compile_options
    from zbkern.kernels.triton.replay import replay

    found: list[CompileJob] = []
    seen: set[str] = set()

    def record(self: Any, grid: Any, arguments: Any, constants: Any, warps: int, stages: int) -> None:
        job = _job(self, arguments, constants, compile_options(warps, stages), target)
        if repr(job) not in seen:
            seen.add(repr(job))
            found.append(job)

    with replay.paused(), mock.patch.object(Kernel, "__call__", record):
        yield found


def jobs(runs: Iterable[Callable[[], object]]) -> list[CompileJob]:
    """The variants that the runs would compile here. A run that fails is skipped: it will say why itself."""
    with recorded() as found:
        for run in runs:
            with contextlib.suppress(Exception):
                run()
    return found


def _job(kernel: Any, arguments: Any, constants: Any, options: dict[str, Any], target: Any) -> CompileJob:
    """The variant that triton.runtime.jit.JITFunction.run (3.6) would compile for these arguments."""
    from triton import knobs
    from triton.runtime import driver

    target = target or driver.active.get_current_target()
    function, (backend, binder) = kernel.function, _backend_and_binder(kernel, target)
    options |= {
        "debug": function.debug or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    bound, specialization, _ = binder(*arguments, *constants, **options)
    values = tuple(bound.values())
    kinds = [kind for kind, _ in specialization]
    signature = dict(zip(function.arg_names, kinds, strict=True))
    fixed = {(i,): values[i] for i, kind in enumerate(kinds) if kind == "constexpr"}
    attributes = {(i,): backend.parse_attr(a) for i, (_, a) in enumerate(specialization) if isinstance(a, str)}
    parsed = dict(backend.parse_options(options).__dict__)
    return CompileJob((function.module, _name_of(kernel)), signature, fixed, attributes, target, parsed)


@functools.cache
def _backend_and_binder(kernel: Any, target: Any) -> tuple[Any, Callable]:
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend, function = make_backend(target), kernel.function
    return backend, create_function_from_signature(function.signature, function.params, backend)


@functools.cache
def _name_of(kernel: Any) -> str:
    return next(name for name, value in vars(sys.modules[kernel.function.module]).items() if value is kernel)


@functools.cache
def name_kernels() -> None:
    """Asks Triton for the key of every kernel's source, in one order in every process: it depends on which kernels were
    asked for before (3.6: a function that calls one that is being asked for takes a placeholder for it), and what one
    process has compiled another would not find."""
    from zbkern.kernels.triton.common import Kernel

    for module in sorted(kernel_modules()):
        for _, value in sorted(vars(importlib.import_module(module)).items()):
            if isinstance(value, Kernel):
                _ = value.function.cache_key


def kernel_modules() -> list[str]:
    """The modules that have kernels of their own."""
    import zbkern.kernels.triton as package
    from zbkern.kernels.triton.common import Kernel

    names = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]

    def has_kernels(name: str) -> bool:
        values = vars(importlib.import_module(name)).values()
        return any(isinstance(value, Kernel) and value.function.fn.__module__ == name for value in values)

    return [name for name in names if has_kernels(name)]
