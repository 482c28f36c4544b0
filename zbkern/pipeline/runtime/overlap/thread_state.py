"""What torch and Python keep for each thread, carried into another one."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class ThreadState:
    """That of the thread which makes it: gradients on or off, autocast, device and stream, modes such as a default
    device, hooks on saved tensors, context variables."""

    def __init__(self, device: torch.device) -> None:
        self._context = contextvars.copy_context()
        self._records = torch.is_grad_enabled()
        self._autocasts = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=torch.is_autocast_cache_enabled())
            for kind in sorted({"cpu", device.type})
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        ]
        self._modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run(self, function: Callable[[], None]) -> None:
        """function(), in the thread of the caller, with this state."""
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._stream.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(torch.set_grad_enabled(self._records))
            if self._hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self._hooks))
            for each in (*self._autocasts, *self._modes):
                stack.enter_context(each)
            self._context.run(function)
