"""Two Llama blocks on a GPU: torch's backward, zbkern's in one piece, and with B and W apart.

    python -m bench.gpu_block [--rounds 10] [--tokens 2048 4096 8192] [--out FOLDER]

Blocks are those of the transformers library, of Llama 3 8B's size in bf16, and the same converted. Gradients are
compared before anything is timed, and contestants take turns. A time ends when the GPU has, and the host's part of it
counts, which `zbkern.testing.measure` leaves out.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zbkern
from bench import report

FULL = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
WARM_UP = 2  # rounds
WORST = 3e-2  # of a gradient: norm of the difference from torch's / norm
COLUMNS = (
    "tokens: {tokens}; torch F: {torch F:.2f}; zbkern F: {zbkern F:.2f}; torch F + backward: {torch:.2f}; "
    "zbkern F + backward: {zbkern:.2f}; F + B: {F + B:.2f}; W: {W:.2f}; 4 W, one by one: {4 W:.2f}; "
    "4 W, merged: {merged:.2f}"
)


class Blocks(nn.Module):
    """Two blocks, and what makes the rotary embeddings that they are given."""

    def __init__(self, sizes: dict[str, int]) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        config = LlamaConfig(num_hidden_layers=2, attn_implementation="sdpa", **sizes)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(2))
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor:
        for layer in self.layers:
            x = layer(x, position_embeddings=embeddings)
        return x


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    begin = now()
    run()
    return 1e3 * (now() - begin)


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def measure(plain: Blocks, ours: Blocks, x: Tensor, rounds: int) -> dict[str, float]:
    """Medians in ms, and the largest error of a gradient of x or of a weight; AssertionError where one is wrong."""
    dy, queue = torch.randn_like(x), zbkern.WGradQueue()
    embeddings = plain.rotary(x, torch.arange(x.shape[1], device=x.device)[None])
    for model in (plain, ours):
        model.zero_grad()

    def forward(model: Blocks, inputs: Tensor) -> Tensor:
        return model(inputs, embeddings)

    def backward(model: Blocks) -> Tensor:
        inputs = x.detach().requires_grad_()
        forward(model, inputs).backward(dy)
        assert inputs.grad is not None
        return inputs.grad

    def deferred() -> Tensor:
        with queue.defer():
            return backward(ours)

    def four(merged: bool) -> float:
        spent = 0.0
        for _ in range(4):
            deferred()
            spent += 0.0 if merged else milliseconds(queue.run, x.device)
        return spent + milliseconds(queue.run, x.device)

    errors = [difference(deferred(), backward(plain))]
    queue.run()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    errors += [difference(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
    assert len(errors) == 1 + len([*plain.parameters()]), "a weight has no gradient"
    assert max(errors) < WORST, errors
    times: defaultdict[str, list[float]] = defaultdict(list)
    contestants: dict[str, Callable[[], object]] = {
        "torch F": lambda: forward(plain, x.detach().requires_grad_()),
        "zbkern F": lambda: forward(ours, x.detach().requires_grad_()),
        "torch": lambda: backward(plain),
        "zbkern": lambda: backward(ours),
        "F + B": deferred,
        "W": queue.run,
    }
    for number in range(WARM_UP + rounds):
        row = {name: milliseconds(run, x.device) for name, run in contestants.items()}
        row |= {"4 W": four(merged=False), "merged": four(merged=True)}
        for name, value in row.items():
            times[name] += [value] if number >= WARM_UP else []
    return {"error": max(errors), **{name: statistics.median(values) for name, values in times.items()}}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192], help="of one sequence")
    parser.add_argument("--tiny", action="store_true", help="on a CPU: a test of this program, not a measurement")
    report.add_out(parser)
    options = parser.parse_args(argv)
    if not options.tiny and not torch.cuda.is_available():
        print("cannot run: this needs a CUDA GPU")
        return 2
    device, sizes = torch.device("cpu" if options.tiny else "cuda"), TINY if options.tiny else FULL
    torch.manual_seed(0)
    plain = Blocks(sizes).to(device, torch.bfloat16)
    ours = zbkern.convert(copy.deepcopy(plain))
    rows = []
    for tokens in options.tokens:
        x = torch.randn(1, tokens, sizes["hidden_size"], device=device, dtype=torch.bfloat16)
        rows.append({"tokens": tokens, **measure(plain, ours, x, options.rounds)})
    print(report.table("Two blocks, times in ms", COLUMNS, rows))
    print("\n" + report.write_json("gpu_block", rows, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
