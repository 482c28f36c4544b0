"""Forwards that run before the last optimizer step is validated, while ranks learn the norm over all of them."""

from __future__ import annotations

import torch

from zbkern.pipeline.optimizer.norm_chain import total_tag
from zbkern.pipeline.runtime.call import Calls
from zbkern.pipeline.runtime.forward_state import ForwardState


def run_ahead(calls: Calls) -> int:
    """Runs forwards of a step until the last optimizer step is validated; how many of them count.

    All ranks hear of the same total. Where it changes the weights, all start over, with other tags.
    """
    before, begun, loop, boundary = None, 0, calls.loop, calls.boundary
    while begun < loop.max_ahead and boundary.state == "early":
        forward = loop.program[begun]
        if not calls.replicas.agreement:  # else some pipelines would run fewer forwards, which hear sooner
            # a rank that hears of the total before this one may start over, and never send what this one waits for
            loop.wait_for_input(forward[0], total_tag(boundary.steps))
            if boundary.try_validate():
                break
        before = before or ForwardState([*calls.modules.values()], loop.recorder.device)
        loop.run([forward])
        begun += 1
    boundary.validate()
    if not boundary.changed:
        return begun
    loop.step += 1  # messages of forwards before, sent or to come, have the old number
    calls.transport.forget(loop.step)
    if before is not None:
        before.restore()
        torch.clear_autocast_cache()  # casts of weights that have changed
        loop.reset()
        loop.recorder.clear()
    return 0
