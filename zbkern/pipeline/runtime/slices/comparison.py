"""What the parts of a module compute for a sequence, and how far from it they are for parts of the sequence: what they
return, the gradients of that, and those of inputs and weights.

Every part of the module is compared, and then goes on with what it has returned for the whole, and with the gradient
that came for it: rounding does not add up from part to part, and the part that needs whole sequences is named.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbkern.pipeline.runtime.forward_state import evaluation_mode
from zbkern.pipeline.runtime.slices.alike import Alike
from zbkern.pipeline.runtime.slices.case import Case, Fault, Found, Unable
from zbkern.pipeline.runtime.slices.differences import Rounding
from zbkern.pipeline.runtime.slices.runs import Runs
from zbkern.pipeline.runtime.slices.traces import Traces, are_same
from zbkern.pipeline.runtime.slices.undrawn import Undrawn
from zbkern.pipeline.runtime.slices.watching import Watching
from zbkern.pipeline.runtime.slices.what_differs import WhatDiffers
from zbkern.wgrad.queue import thread

_OTHERS = 2
_ATTEMPTS = 8  # until no other thread draws random numbers: a quarter of a second
_one_at_a_time = threading.Lock()  # random numbers, and what torch compiles, are the same for all threads


class _Draws(Exception):
    """Random numbers of torch's were drawn."""


class Comparison:
    """Compares cases, one after the other; `running` is around all. module, call: it, and how it is called with inputs
    and side inputs. Gradients are compared where they are on."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], device: torch.device) -> None:
        self._module, self._call, self._device = module, call, device
        self._rounding = Rounding(module)
        self._draws = 0  # random numbers: none, those that `Undrawn` knows, or others
        self._watching: Watching | None = None  # of the present case
        # of the last case whose tokens are chosen alike: as `Alike` has them
        self.chooses = self.compares = self.orders = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, forwards are watched; at the end all is as it was."""
        with ExitStack() as stack:
            stack.enter_context(_one_at_a_time)
            stack.enter_context(_alone())
            self._traces = Traces(self._module, self._device)
            stack.callback(torch.clear_autocast_cache)  # of casts whose graph is gone
            stack.callback(self._traces.restore)
            for name, part in self._module.named_modules():
                stack.callback(part.register_forward_pre_hook(partial(self._enter, name), prepend=True).remove)
                stack.callback(part.register_forward_hook(partial(self._leave, name)).remove)
            if torch.is_grad_enabled():
                stack.enter_context(self._traces.aside())
            stack.enter_context(_eagerly(self._module))
            yield

    def difference(self, case: Case) -> str | None:
        """What differs, and by how much; None where nothing does.

        Raises Unable where the forwards cannot be compared, and Fault where that is not for what they do. Where random
        numbers are drawn, `Undrawn` makes constants of them, and modules are in evaluation mode if they draw yet
        others.
        """
        while True:
            calm = evaluation_mode([self._module]) if self._draws == _OTHERS else nullcontext()
            try:
                with calm:
                    return self._difference(case)
            except _Draws:
                if self._draws == _OTHERS:
                    raise Unable("its forward, or another thread all the time, draws random numbers") from None
                self._draws += 1  # also for the cases to come

    def _difference(self, case: Case) -> str | None:
        trains = case.trains and torch.is_grad_enabled()
        undrawn = Undrawn(per_forward=case.parts is None) if self._draws else None
        alike = Alike(case.passes, case.tokens) if case.alike else None
        watching = self._watching = Watching(case, trains, self._rounding, alike)
        runs = Runs(self._module, self._call, self._traces, watching, undrawn)
        try:
            whole = self._run_whole(case, runs)
            if case.may_end and alike is not None and not alike.chooses:
                return None
            try:
                found = runs.parts(case.lengths)
            except Unable:  # it may come of what differs: the carry raises where a slice does not go on from a state
                if (wrong := self._what_differs(runs, watching).in_a_part()) is not None:
                    return wrong
                raise
            return self._what_differs(runs, watching).first(whole, found)
        finally:
            watching.forget()
            if alike is not None:
                self.chooses, self.compares, self.orders = alike.chooses, alike.compares, alike.orders
            for each in (alike, undrawn, watching):
                if each is not None and each.fault is not None:  # whatever the module has made of it
                    raise Fault(each.fault) from each.fault

    def _what_differs(self, runs: Runs, watching: Watching) -> WhatDiffers:
        return WhatDiffers(self._module, runs.places, watching, self._rounding.limit)

    def _run_whole(self, case: Case, runs: Runs) -> Found:
        found, drawn = runs.whole(), self._traces.drawn()
        for attempt in range(_ATTEMPTS):
            if not drawn:
                break
            time.sleep(0.001 * 2**attempt)
            before, found, drawn = drawn, runs.whole(), self._traces.drawn()
            if are_same(before, drawn):
                break  # the module has drawn, as it does each time; other threads draw on
        if (others := sorted(drawn.keys() - {"torch", "cuda"})) and case.parts is None:
            library = {"python": "Python", "numpy": "NumPy"}[others[0]]
            raise Unable(f"its forward draws random numbers of {library}, once for all tokens")
        if drawn:
            raise _Draws
        counted = case.counted
        for leaf in found.outputs[0]:
            if leaf.is_floating_point() and leaf.dim() > 1 and leaf.shape[1] == case.tokens and type(leaf) is Tensor:
                flat = leaf.unsqueeze(-1).flatten(2)
                if not bool(torch.isfinite(flat if counted is None else flat[counted]).all()):
                    raise Unable("it gives NaN or infinity")
        return found

    def _enter(self, name: str, part: nn.Module, inputs: Any) -> None:
        if self._watching is not None:
            self._watching.enter(name)

    def _leave(self, name: str, part: nn.Module, inputs: Any, output: Any) -> Any:
        return None if self._watching is None else self._watching.leave(name, inputs, output)


@contextmanager
def _alone() -> Iterator[None]:
    """Inside, no pass beside this one goes on, whose gradients would be taken for those of a probe."""
    give_way, thread.give_way = thread.give_way, None
    try:
        yield
    finally:
        thread.give_way, thread.in_slice = give_way, False


@contextmanager
def _eagerly(module: nn.Module) -> Iterator[None]:
    """Inside, nothing is compiled: hooks of parts run, and no code is made for a few tokens."""
    if all(part._compiled_call_impl is None and "_orig_mod" not in part._modules for part in module.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
