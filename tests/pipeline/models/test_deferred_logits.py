"""A chunk that ends in a linear head, under a loss that takes logits which are not computed: the loss and gradients of
one that gets logits, without these; and logits wherever anybody else needs them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from bench.slices import Allocated
from tests.support.chunks import one_rank, results_on_threads
from tests.support.deferred_losses import of_logits, policy_loss, policy_loss_of_logits, without_logits
from tests.support.schedules import schedule_of
from tests.support.small_models import DECODER, batch, make, transformers
from zbkern.kernels.spec import CrossEntropyOptions
from zbkern.kernels.triton import loss as triton_loss
from zbkern.pipeline import (
    Optimizer,
    Pipeline,
    cut,
    schedules,
    simulate,
    token_log_probs,
    token_loss,
    token_targets,
)
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.planning.cost_model.architecture import architecture
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting


def test_log_probs_and_entropy_of_logits_that_are_there() -> None:
    """A loss need not know whether they are."""
    logits, tokens = torch.randn(2, 5, 7, dtype=torch.float64), torch.randint(7, (2, 5))
    logits[..., 3] = -torch.inf
    logits.requires_grad_()
    tokens[tokens == 3] = -100
    log_probs, entropy = token_log_probs(logits, tokens)
    (log_probs.sum() + entropy.sum()).backward()
    distribution = torch.distributions.Categorical(logits=logits.detach())
    counts = tokens != -100
    torch.testing.assert_close(log_probs[counts], distribution.log_prob(tokens.clamp(min=0))[counts])
    torch.testing.assert_close(entropy[counts], distribution.entropy()[counts])
    assert not log_probs[~counts].any()
    assert not entropy[~counts].any()
    assert logits.grad.isfinite().all()


def test_pending_w_hold_no_logits() -> None:
    schedule = schedule_of(" ".join(f"0{kind}{n}" for kind in "FBW" for n in range(4)), microbatches=4)
    config = transformers.LlamaConfig(**{**DECODER, "vocab_size": 4000, "num_hidden_layers": 1})
    (tokens, _, labels), held = batch(), []
    for loss_fn in (without_logits, of_logits):
        chunks = [*map(zbkern.convert, cut(config, schedule, rank=0))]
        with one_rank(chunks, schedule, loss_fn) as pipe:
            pipe.step(tokens, token_targets(labels, 4))
            held.append(pipe.queue.peak_bytes)
    assert held[1] - held[0] > 0.9 * 4 * 10 * 4000 * 4  # four microbatches of ten tokens


class Own(nn.Module):
    def __init__(self, after: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(61, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 61, bias=False)
        self.after = after

    def forward(self, tokens: Tensor) -> Any:
        return self.after(self, self.head(self.block(self.embed(tokens))))


def written(module: nn.Module, logits: Tensor) -> Tensor:
    logits[..., :3] = -100.0
    return logits.float()


def halved(module: nn.Module, logits: Tensor) -> Tensor:
    doubled = logits * 2
    logits.mul_(0.5)
    return doubled + logits


def chunk_of(after: Any = lambda module, logits: logits) -> Any:
    torch.manual_seed(0)
    return cut(Own(after), schedules.gpipe(1, 1), [0], layers=["embed", "block", "head"])[0]


TOKENS = torch.arange(40).view(2, 20)


@pytest.mark.parametrize(
    ("after", "scale", "softcap"),
    [
        (lambda _, logits: logits.float().contiguous(), 1.0, None),
        (lambda _, logits: 3 * logits / 2.0, 1.5, None),
        (lambda _, logits: torch.tanh(logits / 30.0) * 30.0, 1.0, 30.0),
        (lambda _, logits: 5.0 * (0.5 * logits).tanh(), 2.5, 5.0),
    ],
    ids=["as it is", "scaled", "capped", "scaled and capped"],
)
def test_what_comes_after_the_head_is_read_off(after: Any, scale: float, softcap: float | None) -> None:
    chunk = chunk_of(after)
    expected = nn.functional.cross_entropy(chunk(TOKENS).flatten(0, 1), TOKENS.flatten(), reduction="none")
    with chunk.deferred_logits():
        logits = chunk(TOKENS)
    assert (logits.scale, logits.softcap) == (scale, softcap)
    torch.testing.assert_close(-logits.log_probs(TOKENS).flatten(), expected)


@pytest.mark.parametrize(
    "after",
    [
        lambda module, logits: logits + 1.0,
        lambda module, logits: logits * module.embed.weight[0, 0],
        lambda module, logits: logits.softmax(-1),
        lambda module, logits: -5.0 * torch.tanh(logits),
        lambda module, logits: torch.tanh(torch.tanh(logits)),
        lambda module, logits: torch.cat([logits[:, :3], logits[:, 3:]], 1),
        lambda module, logits: logits if logits.sum() > 0 else -logits,
        lambda module, logits: logits.half(),
        written,
        halved,
    ],
)
def test_for_any_other_operation_there_are_logits(after: Any) -> None:
    chunk = chunk_of(after)
    with chunk.deferred_logits():
        found = chunk(TOKENS)
    assert type(found) is Tensor
    assert torch.equal(found, chunk(TOKENS))


def quietly_hooked(head: nn.Module) -> None:
    head.register_forward_hook(lambda module, inputs, output: output * 2)


def weighed(head: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(head)


def other_forward(head: nn.Module) -> None:
    head.forward = lambda x: x @ head.weight.t() + 1  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [quietly_hooked, weighed, other_forward])
def test_a_head_that_is_more_than_its_weight_is_called(change: Any) -> None:
    chunk = chunk_of()
    change(chunk.get_submodule("head"))
    with chunk.deferred_logits():
        found = chunk(TOKENS)
    assert torch.equal(found, chunk(TOKENS))


def test_autocast_is_that_of_the_forward() -> None:
    chunk = chunk_of()
    with torch.autocast("cpu", torch.bfloat16), chunk.deferred_logits():
        logits = chunk(TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        expected = nn.functional.cross_entropy(chunk(TOKENS).flatten(0, 1).float(), TOKENS.flatten())
    torch.testing.assert_close(logits.cross_entropy(TOKENS, "mean"), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("each", "reshard", "policy"),
    [
        *((False, True, False), (True, True, True)),
        *(pytest.param(*each, False, marks=pytest.mark.slow) for each in ((True, False), (False, False))),
    ],
)
def test_fsdp(two_ranks: Any, each: bool, reshard: bool, policy: bool) -> None:
    """Under FSDP2 the head's weight may be gathered in its forward alone."""
    two_ranks.run(shard, each, reshard, policy)


def shard(each: bool, reshard: bool, policy: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model, schedule, tokens = make("llama"), schedules.gpipe(1, 4), batch()[0]
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    gradients = []
    losses_fn = (of_logits, without_logits if each or not reshard else token_loss)
    for loss_fn in (policy_loss_of_logits, policy_loss) if policy else losses_fn:
        (chunk,) = cut(copy.deepcopy(model), schedule, rank=0)
        zbkern.convert(chunk)
        if each:
            for name in chunk.layer_names:
                fully_shard(chunk.get_submodule(name), reshard_after_forward=reshard)
        fully_shard(chunk, reshard_after_forward=reshard)
        with Pipeline(
            chunk, schedule, loss_fn, group=dist.new_group([dist.get_rank()], use_local_synchronization=True)
        ) as pipe:
            losses = [pipe.step(tokens, token_targets(tokens, 4)) for _ in range(2)]
        gradients.append((losses, [parameter.grad.full_tensor() for parameter in chunk.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-11, atol=1e-12)


def test_what_it_keeps_is_what_plans_count() -> None:
    """Of norm and head: the input of each and the head's gradient of it until B, and the head's input until W."""
    config = transformers.LlamaConfig(**{**DECODER, "hidden_size": 512, "num_hidden_layers": 1, "vocab_size": 4000})
    planned = Setting(architecture(config.to_dict()), load_hardware("h100"), Job(96)).costs.layers[-1]
    schedule, tokens = schedules.gpipe(1, 1), torch.randint(4000, (1, 96))
    chunk, saved, queue = zbkern.convert(cut(config, schedule)[0].bfloat16()), {}, zbkern.WGradQueue()
    resident = {each.untyped_storage().data_ptr() for each in (*chunk.parameters(), *chunk.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hidden = torch.randn(1, 96, 512, dtype=torch.bfloat16, requires_grad=True)
    model = chunk.whole.model  # the chunk's last two layers alone
    model.forward = lambda *_, **__: transformers.modeling_outputs.BaseModelOutputWithPast(model.norm(hidden))
    with queue.defer(), torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each), chunk.deferred_logits():
        loss = token_loss(chunk(tokens), *token_targets(tokens, 1))
    kept = sum(size for place, size in saved.items() if place not in resident)
    assert kept == pytest.approx(planned.activation, rel=0.05)
    with queue.defer():
        loss.backward()
    assert queue.peak_bytes == pytest.approx(planned.held, rel=0.05)


@pytest.mark.slow
def test_the_last_rank_holds_what_plans_count() -> None:
    """As `launch.py` trains, with a vocabulary of 131,072. A CPU has logits in float32, too, and the chunk before."""
    vocabulary, length = 131072, 96
    sizes = {"hidden_size": 512, "num_hidden_layers": 2, "vocab_size": vocabulary, "tie_word_embeddings": False}
    config, partition = transformers.LlamaConfig(**{**DECODER, **sizes}), [0, 3]  # norm and head are the last chunk
    schedule, tokens = schedules.zb_h1(2, 4), torch.randint(vocabulary, (4, length))
    costs = Setting(architecture(config.to_dict()), load_hardware("h100"), Job(length)).costs.chunk_costs(partition)

    def of_rank(transport: LocalTransport) -> Any:
        (chunk,) = cut(config, schedule, partition, rank=transport.rank)
        zbkern.convert(chunk.bfloat16())
        for parameter in chunk.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        with Pipeline(chunk, schedule, token_loss, transport, timeout=60) as pipe:
            adam = torch.optim.AdamW(chunk.parameters())
            optimizer = Optimizer(adam, pipe, master_weights=True, undo="inverse")
            with Allocated() as allocated:
                pipe.step(tokens, token_targets(tokens, 4))
            optimizer.step()
            optimizer.validate()
            states = [value for state in adam.state.values() for value in state.values()]
            weights = [each for parameter in chunk.parameters() for each in (parameter, parameter.main_grad)]
            resident = sum(each.nbytes for each in (*states, *weights, *(master for _, master in optimizer.masters)))
            return resident, allocated.most, pipe.queue.peak_bytes

    resident, most, waiting = results_on_threads(2, of_rank)[1]
    pending = [0]
    for action in schedule.actions[1]:
        pending.append(pending[-1] + {"B": 1, "W": -1}.get(action.kind, 0))
    logits = length * vocabulary
    assert waiting == pytest.approx(max(pending) * costs.held[1], rel=0.05)
    assert resident + 2 * logits == pytest.approx(costs.static[1], rel=0.01)
    assert resident + most - 8 * logits == pytest.approx(simulate(schedule, costs).peak_memory[1], rel=0.01)
    assert most < 10 * logits + 0.01 * resident


@pytest.mark.parametrize(("rows", "vocabulary"), [(4096, 128256), (96, 4000)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_logits_that_kernels_allocate_are_those_that_plans_count(
    rows: int, vocabulary: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In F and in W, whose launches are left out here: gradients are where the logits were."""
    for name in ("linear_fwd", "linear_dgrad", "linear_wgrad", "_loss", "_gradient"):
        monkeypatch.setattr(triton_loss, name, lambda *_, **__: None)
    x, weight = (torch.empty(size, 64, dtype=torch.bfloat16, device="meta") for size in (rows, vocabulary))
    target, lse, options = torch.empty(rows, dtype=torch.long, device="meta"), x.new_empty(rows), CrossEntropyOptions()
    with Allocated() as forward:
        triton_loss.cross_entropy_fwd(x, weight, None, target, options, lse, lse, x)
    with Allocated() as w:
        triton_loss.cross_entropy_wgrad([(x, target, lse, lse)], (weight, None), True, weight, None, options)
    sizes = {"hidden_size": 64, "vocab_size": vocabulary, "tie_word_embeddings": tied}
    model = architecture(transformers.LlamaConfig(**{**DECODER, **sizes}).to_dict())
    embedding, *_, head = Setting(model, load_hardware("h100"), Job(rows)).costs.layers
    logits = head.static - 18 * weight.numel()
    assert forward.most == logits == 2 * min(rows, 1024) * vocabulary
    assert w.most == pytest.approx(logits, rel=0.02)
    assert embedding.static == 18 * weight.numel()  # also where the head is tied to it
