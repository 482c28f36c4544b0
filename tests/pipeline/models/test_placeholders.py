"""What a chunk's forward uses of layers that another chunk holds: shapes alone, and what is said of all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbkern.pipeline import cut, schedules


class Chain(nn.Module):
    """An embedding, four blocks and a head; what the embedding gave is used once more by every block."""

    def __init__(self, use: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(4, 9)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        more = self.use(h)
        for block in self.blocks:
            h = block(h) + more
        return self.head(h)


USES: dict[str, Callable[[Tensor], Any]] = {
    "skip": lambda h: h,
    "padding": lambda h: (h == 0).all(-1, keepdim=True),
    "branch": lambda h: 2.0 if h.abs().max() > 1 else 1.0,
    "number": lambda h: float(h.detach().sum()),
    "argmax": lambda h: torch.arange(4.0)[h.argmax(-1)][..., None],
    "nan_to_num": torch.nan_to_num,
    "comparison": lambda h: torch.where(h > 0, torch.ones_like(h), torch.zeros_like(h)),
    "norm": lambda h: (h.norm(dim=-1, keepdim=True) > 1.5).float(),
    "fmax": lambda h: torch.fmax(h, torch.zeros(())),
    "in place": lambda h: torch.zeros_like(h).add_(h > 0),
    "one column": lambda h: torch.cat([torch.zeros_like(h[..., :3]), h[..., 3:]], -1),
}


@pytest.mark.parametrize("use", USES)
def test_what_an_early_layer_gave_is_for_the_next_alone(use: str) -> None:
    """Whatever of it is used, its values or what follows from them, and whether or not a NaN would show it."""
    layers, tokens = ["embed", "blocks.*", "head"], torch.tensor([[1, 0, 3]])
    first, second = (cut(Chain(USES[use]), schedules.zb_h1(2, 2), layers=layers, rank=rank)[0] for rank in range(2))
    passed = first(tokens)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cut: .*'blocks.2'.* uses? .*of 'embed', which another chunk holds"):
            second(passed, x=tokens)


def test_placeholders_have_shapes_and_are_passed_by() -> None:
    """What a forward computes between layers that other chunks hold changes nothing; sizes are theirs."""

    class Between(Chain):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x) + 1
            positions = torch.arange(h.shape[1], dtype=h.dtype)[:, None].to(h) + h.new_zeros(1)
            for block in self.blocks:
                h = nn.functional.gelu(block(h * 1.5).mul_(2) + positions)
            return self.head(h)

    model, tokens = Between(lambda h: h), torch.tensor([[1, 0, 3]])
    chunks = [
        cut(model, schedules.zb_h1(2, 2), layers=["embed", "blocks.*", "head"], rank=rank)[0] for rank in range(2)
    ]
    assert torch.equal(chunks[1](chunks[0](tokens), x=tokens), model(tokens))


def test_whole_numbers_that_an_early_layer_gave() -> None:
    class Block(nn.Linear):
        def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.tanh(super().forward(h))
            return y, y.argmax(-1)

    class Adds(Chain):
        def forward(self, x: Tensor) -> Tensor:
            h, total = self.embed(x), torch.zeros(())
            for block in self.blocks:
                h, largest = block(h)
                total = total + torch.arange(4.0)[largest][..., None]
            return self.head(h + total)

    model, tokens = Adds(lambda h: h), torch.tensor([[1, 0, 3]])
    model.blocks = nn.ModuleList([Block(4, 4) for _ in range(4)])
    layers = ["embed", "blocks.*", "head"]
    first, second = (cut(model, schedules.zb_h1(2, 2), layers=layers, rank=rank)[0] for rank in range(2))
    with pytest.raises(ValueError, match=r"'head' uses what is computed from that of 'blocks.0', which another chunk"):
        second(**first(tokens), x=tokens)


class Beside(nn.Module):
    """Uses a parameter, or a module, that stands beside its layers: in the first token, before and after block 1."""

    def __init__(self, module: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8) if module else nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            first = x[:, :1] * self.first if isinstance(self.first, Tensor) else self.first(x[:, :1])
            x = block(torch.cat([first, x[:, 1:]], 1))
        return x


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_what_stands_beside_the_layers_cannot_be_used_by_several_chunks(module: bool, grad: bool) -> None:
    model, schedule, layers = Beside(module), schedules.zb_h1(2, 2), ["embed", "blocks.*"]
    first, second = (cut(model, schedule, [0, 2], layers=layers, rank=rank)[0] for rank in range(2))
    message = (
        r"cut: the layers 'blocks.1' to 'blocks.2' use 'first', which stands beside the layers and is in the chunk of "
        rf"'{'blocks.0' if module else 'embed'}' alone: put it into each layer that uses it.*or cut"
    )
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=message):
        second(first(torch.randn(2, 3, 8)))
