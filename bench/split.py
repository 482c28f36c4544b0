"""What splitting a backward costs: (B + W) / full backward, merged W, the bytes held in between, and heads with a loss.

Every ratio is taken within one interleaved run, against plain `backward()` of the same torch.nn model and against
torch's own split (stage_backward_input, stage_backward_weight). One thread, random data, and no figure without a check
that the gradients are equal.

    python -m bench.split [--rounds 20]
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern
from bench import report
from bench.split_heads import HEADS, HEADS_TABLE, head_row
from bench.split_models import (
    LLAMA,
    LlamaBlock,
    OwnLinear,
    OwnNorm,
    TorchMLP,
    attention_block,
    chain,
    not_of_attention,
)
from zbkern import testing


def own_part(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def saved_bytes(forward: Callable[[], Tensor], kept: Sequence[Tensor]) -> tuple[Tensor, int]:
    """What a forward returns, and the bytes that it leaves for the backward beyond `kept`, each storage once."""
    there = {own_part(tensor).untyped_storage().data_ptr() for tensor in kept}
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = own_part(tensor).untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = forward()
    return output, sum(size for address, size in saved.items() if address not in there)


def split_row(
    name: str,
    model: nn.Module,
    x: Tensor,
    floor: int,
    rounds: int,
    twin: nn.Module | None = None,
    defer: Callable[[str, nn.Module], bool] | None = None,
) -> dict:
    """Times one model: plain, torch's split, ours split, ours in one piece. Gradients exist already, as from the second
    microbatch on. floor: bytes of all layers' inputs and output gradients, which every W needs. defer: of `convert`."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    x = x.requires_grad_()
    if twin is None:
        twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    zbkern.convert(twin, defer=defer)
    queue = zbkern.WGradQueue()
    dy = torch.randn_like(model(x))

    def plain() -> list[Callable]:
        y = model(x)
        return [lambda: y.backward(dy)]

    def torch_split() -> list[Callable]:
        y = model(x)
        groups: list = []

        def b() -> None:
            groups.extend(stage_backward_input([y], [dy], [x], iter(model.parameters()))[1])

        return [b, lambda: stage_backward_weight(iter(model.parameters()), groups)]

    def ours() -> list[Callable]:
        with queue.defer():
            y = twin(x)

        def b() -> None:
            with queue.defer():
                y.backward(dy)

        return [b, queue.run]

    def ours_whole() -> list[Callable]:
        y = twin(x)
        return [lambda: y.backward(dy)]

    for candidate in (plain, ours):
        for function in candidate():
            function()
    testing.assert_same_gradients(twin, model)
    x.grad = None
    # Two interleaved runs: torch's split walks the graph in Python and leaves the caches cold for whoever comes next.
    timings = testing.measure({"plain": plain, "ours": ours, "whole": ours_whole}, rounds=rounds, warmup=5)
    peers = testing.measure({"plain": plain, "torch": torch_split}, rounds=rounds, warmup=5)
    with queue.defer():
        y, activation = saved_bytes(lambda: twin(x), [*twin.parameters()])
        y.backward(dy)
    held = queue.bytes
    queue.discard()
    return {
        "case": name,
        "plain_us": timings["plain"].median * 1e6,
        "split": timings["ours"].ratio(timings["plain"]),
        "whole": timings["whole"].ratio(timings["plain"]),
        "torch_split": peers["torch"].ratio(peers["plain"]),
        "held_bytes": held,
        "held_over_floor": held / floor,
        "held_over_activation": held / activation,
    }


def llama_row(name: str, tokens: int, rounds: int, defer: Callable[[str, nn.Module], bool] | None) -> dict:
    width, hidden = LLAMA["width"], LLAMA["hidden"]
    keys = width // LLAMA["heads"] * LLAMA["key_heads"]
    model = zbkern.restore(LlamaBlock(**LLAMA, mlp=TorchMLP))
    floor = floor_bytes(tokens, 6 * width + 2 * keys + 3 * hidden)
    twin = LlamaBlock(**LLAMA, mlp=zbkern.nn.MLP)
    return split_row(name, model, torch.randn(1, tokens, width), floor, rounds, twin, defer)


CALLS = 6  # layers of a call_row
OWN: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: OwnLinear, nn.RMSNorm: OwnNorm}


def call_row(kind: type[nn.Module], *sizes: int, rounds: int) -> dict:
    """What one call of a tiny layer costs the host, F, B and W: plain, recognised by `convert`, and intercepted; the
    first and the last also compiled, with all calls in one graph."""
    plain, x = nn.Sequential(*[kind(*sizes) for _ in range(CALLS)]), torch.randn(16, sizes[0])
    dy, queue = torch.randn(16, sizes[-1]), zbkern.WGradQueue()
    intercepted = nn.Sequential(*[OWN[kind](*sizes) for _ in range(CALLS)])
    intercepted.load_state_dict(plain.state_dict())
    models = {"plain": plain, "intercepted": zbkern.convert(intercepted)}
    models["recognised"] = zbkern.convert(copy.deepcopy(plain))
    models |= {f"{name}_compiled": copy.deepcopy(models[name]) for name in ("plain", "intercepted")}
    torch._dynamo.reset()
    compiled = {n: torch.compile(m, fullgraph=True, dynamic=False) for n, m in models.items() if n.endswith("compiled")}

    def step(name: str) -> list[Callable]:
        model = compiled.get(name, models[name])

        def f_and_b() -> None:
            model(x).backward(dy)

        def deferred() -> None:
            with queue.defer():
                model(x).backward(dy)

        return [f_and_b] if name.startswith("plain") else [deferred, queue.run]

    for name in models:
        for function in step(name):
            function()
    for model in models.values():
        testing.assert_same_gradients(model, plain)
    timings = testing.measure({name: functools.partial(step, name) for name in models}, rounds=rounds, warmup=5)
    return {"case": kind.__name__, **{f"{name}_us": timings[name].median * 1e6 / CALLS for name in models}}


def merge_row(width: int, tokens: int, rounds: int, microbatches: int = 4) -> dict:
    """W of four microbatches: as one merged kernel per weight, one by one, and as four plain W (dy^T x, added)."""
    torch.manual_seed(0)
    model = zbkern.convert(chain(width))
    xs = [torch.randn(tokens, width) for _ in range(microbatches)]
    queues = {"merged": zbkern.WGradQueue(), "separate": zbkern.WGradQueue(merge=False)}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def backward(queue: zbkern.WGradQueue) -> None:
        for key, x in enumerate(xs):
            with queue.defer(key):
                model(x).sum().backward()

    def candidate(queue: zbkern.WGradQueue) -> list[Callable]:
        backward(queue)
        return [queue.run]

    def plain() -> list[Callable]:
        """The W of torch's backward, by hand: a matmul and a sum, then added to the gradient."""
        queue = queues["separate"]
        backward(queue)
        work = [(task.parameters, task.tensors) for task in queue.tasks()]
        queue.discard()

        def run() -> None:
            with torch.no_grad():
                for (weight, bias), (x, dy) in work:
                    weight.grad += dy.t() @ x
                    bias.grad += dy.sum(0)

        return [run]

    candidates = {**{name: functools.partial(candidate, queue) for name, queue in queues.items()}, "plain": plain}
    gradients = {}
    for name, prepare in candidates.items():
        for parameter in model.parameters():
            parameter.grad.zero_()
        for function in prepare():
            function()
        gradients[name] = [parameter.grad.clone() for parameter in model.parameters()]
    for merged, separate, expected in zip(*gradients.values(), strict=True):
        testing.assert_close(merged, expected)
        testing.assert_close(separate, expected)
    timings = testing.measure(candidates, rounds=rounds, warmup=5)
    return {
        "case": f"6 x {width}, {microbatches} x {tokens} tokens",
        "plain_us": timings["plain"].median * 1e6,
        "merged": timings["merged"].ratio(timings["plain"]),
        "separate": timings["separate"].ratio(timings["plain"]),
    }


Row = Callable[[], dict]


def split_rows(rounds: int) -> list[Row]:
    """Each of the models, small ones with more rounds."""
    many = 4 * rounds
    gated = TorchMLP(256, 768), torch.randn(256, 256), floor_bytes(256, 2 * 256 + 3 * 768)
    attention = attention_block(256, 4), torch.randn(2, 128, 256), floor_bytes(256, 6 * 256)
    large = chain(512), torch.randn(256, 512), floor_bytes(256, 12 * 512)
    small = chain(64), torch.randn(16, 64), floor_bytes(16, 12 * 64)
    deferrals = (("all wait", None), ("attention's do not", not_of_attention))
    return [
        lambda: split_row("six 512-wide, 256 tokens", *large, rounds),
        lambda: split_row("six 64-wide, 16 tokens", *small, 20 * rounds),
        lambda: split_row("gated MLP 256/768, 256 tokens", *gated, many, zbkern.nn.MLP(256, 768)),
        lambda: split_row("attention 256, 2 x 128 tokens", *attention, many),
        *(
            functools.partial(llama_row, f"Llama block 512, 256 tokens: {name}", 256, rounds, defer)
            for name, defer in deferrals
        ),
    ]


def floor_bytes(tokens: int, features: int) -> int:
    """Of so many fp32 features of so many tokens."""
    return 4 * tokens * features


def parts(rounds: int) -> dict[str, list[Row]]:
    """The rows of each table, those that say most first."""
    many = 20 * rounds
    heads = HEADS if hasattr(F, "linear_cross_entropy") else ()  # torch 2.13
    merges = ((512, 8, rounds), (512, 32, rounds), (512, 256, rounds), (64, 16, many))
    return {
        "split": split_rows(rounds),
        "calls": [
            lambda: call_row(nn.Linear, 64, 64, rounds=many),
            lambda: call_row(nn.RMSNorm, 64, rounds=many),
        ],
        "heads": [functools.partial(head_row, *sizes, max(3, rounds // 4)) for sizes in heads],
        "merge": [functools.partial(merge_row, *sizes) for sizes in merges],
    }


TABLES = {
    "split": (
        "(B + W) / full backward of the torch.nn model, one thread, medians of interleaved rounds",
        "case: {case}; full backward, us: {plain_us:.0f}; zbkern B + W: {split:.3f}; zbkern, no queue: {whole:.3f}; "
        "torch's split: {torch_split:.3f}; held / floor: {held_over_floor:.3f}; "
        "held / activation: {held_over_activation:.3f}",
    ),
    "calls": (
        "Host time of one call, us: F, B and W of a layer with 64 features and 16 tokens",
        "layer: {case}; torch: {plain_us:.1f}; zbkern, recognised: {recognised_us:.1f}; "
        "zbkern, intercepted: {intercepted_us:.1f}; torch, compiled: {plain_compiled_us:.1f}; "
        "zbkern, compiled: {intercepted_compiled_us:.1f}",
    ),
    "heads": HEADS_TABLE,
    "merge": (
        "W of four microbatches / four plain W (matmul and sum, then added to the gradient)",
        "case: {case}; four plain W, us: {plain_us:.0f}; merged: {merged:.3f}; one by one: {separate:.3f}",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of the large cases; small ones take 20 x")
    report.add_out(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, list[dict]] = {}
    saved = ""
    for name, rows in parts(options.rounds).items():
        found[name] = []
        for row in rows:
            found[name].append(row())
            saved = report.write_json("split", found, options.out)  # what is there stays if the rest is cut off
        print(report.table(*TABLES[name], found[name]), end="\n\n", flush=True)
    print(saved)
    return 0


if __name__ == "__main__":
    sys.exit(main())
