"""The program of docs/gradients.md: a layer of one's own, whose W waits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from zbkern import WGradQueue

PAGE = Path(__file__).parents[2] / "docs" / "gradients.md"
(LAYER,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_layer_of_the_page() -> None:
    names: dict[str, Any] = {}
    exec(LAYER, names)
    ours, plain = (kind(3, 4, 3, padding=1, bias=False) for kind in (names["Conv1d"], torch.nn.Conv1d))
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 8)
    plain(x).square().sum().backward()
    queue = WGradQueue()
    with queue.defer():
        ours(x).square().sum().backward()
    assert queue.pending() == 1
    queue.run()
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad)
