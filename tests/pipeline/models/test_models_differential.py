"""Models of the transformers library that `cut` has cut: random cases against the library's own in one process.

Every family of decoders, with padded and packed rows, in slices, within blocks, with load-balancing losses, recomputed
and offloaded, in float64 throughout; then `full_weights`, and files. The slow run has the families that are like
others, with another seed: see `tests/support/seeds.py`.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import gradients_of, results_on_threads
from tests.support.cut_models import assert_equal, check_files_and_names, state_of, written
from tests.support.deferred_losses import policy_loss, policy_loss_of_logits, without_logits
from tests.support.schedules import saved_in_turn, with_actions
from tests.support.seeds import seed
from tests.support.small_models import DECODER, DECODERS, PACKED, InFloat64, config_of, make, rows_of, transformers
from zbkern.pipeline import (
    Optimizer,
    Pipeline,
    PipelineError,
    StepOptions,
    cut,
    full_weights,
    layers_of,
    schedules,
    token_loss,
    token_targets,
)
from zbkern.pipeline.transport.local import LocalTransport

MORE = {  # whose norms stand elsewhere, or which do something after the head
    "olmo2": ("Olmo2", DECODER),
    "mistral": ("Mistral", DECODERS["qwen3"][1]),
    "granite": ("Granite", {**DECODER, "residual_multiplier": 0.22, "logits_scaling": 2.0}),
    "cohere": ("Cohere", {**DECODER, "logit_scale": 0.3}),
    "gemma2_capped": ("Gemma2", {**DECODER, "head_dim": 8, "final_logit_softcapping": 0.7}),
    "phi": ("Phi", {**DECODER, "tie_word_embeddings": False, "resid_pdrop": 0.0}),  # a bias in its head
}
FAMILIES = [*DECODERS, *MORE]
# like others, and of the slow run alone
SLOWER = (
    *("mixtral", "gpt2", "qwen3", "qwen3_moe", "gpt_oss", "gemma2", "gemma2_capped", "cohere", "mistral", "olmo2"),
    *("phi", "granite", "bamba", "falcon_h1", "nemotron_h", "lfm2"),
)
ROUTED = ("mixtral", "qwen3_moe", "gpt_oss")
MAKE_NO_MASKS = ("gpt_oss", "opt")  # of positions that begin anew: packed sequences would see each other
# whose states go on into the next sequence of a row
STATES = ("mamba2", "bamba", "falcon_h1", "zamba2", "nemotron_h", "lfm2", "qwen3_next")
ONE_CHUNK = ("zamba2",)  # whose blocks use embeddings
LINEAR_HEAD = ("llama", "qwen3", "gemma2", *MORE)  # which is not computed: the loss takes its input
COEFFICIENT = 0.7
PUBLISHED = ("zb_h1", "zb_v", "one_f_one_b", "interleaved_zero_bubble")


class Case:
    def __init__(self, rng: random.Random, family: str) -> None:
        self.rng, self.family = rng, family
        self.model = model_of(family)
        self.balanced = family in ROUTED and rng.random() < 0.6
        if self.balanced:
            self.model.config.output_router_logits = True
            self.model.router_aux_loss_coef = COEFFICIENT
        self.rows = rng.choice(["plain", "right", "left", "packed"])
        self.slices = rng.choice([1, 1, 2, 3, (5, 19), (3, 2, 5, 2)])
        ranks = 1 if family in ONE_CHUNK else rng.choice([1, 2, 2, 4])
        name = "zb_h1" if family in ONE_CHUNK else rng.choice(PUBLISHED[: 4 if ranks < 4 else 1])
        schedule = getattr(schedules, name)(ranks, rng.choice([2, 4]), slices=self.slices)
        self.saved = rng.choice([(), (), ("recomputed", None), ("copied", "recomputed", None)])
        self.schedule = with_actions(schedule, saved_in_turn(*self.saved)) if self.saved else schedule
        self.partition = self.random_partition(len(schedule.placement)) if rng.random() < 0.6 else None
        parts = ("*.layers.*",) if self.partition is None and family not in ("gpt2", "opt") else ()
        self.options = StepOptions(recompute=rng.choice([(), parts]))
        self.checkpointed = self.slices == 1 and rng.random() < 0.2
        if self.checkpointed:
            within = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), InFloat64())}
            self.model.gradient_checkpointing_enable(within)
        # of the pipeline, and of the library's logits
        self.losses: tuple[Any, Any] = token_loss, token_loss
        if family in LINEAR_HEAD:
            pairs = (without_logits, token_loss), (policy_loss, policy_loss_of_logits)
            self.losses = rng.choice(pairs)
        self.converted = rng.random() < 0.7
        self.given = rng.choice(["tensors", "a mapping", "microbatches", "side"])  # as collators make batches

    def random_partition(self, chunks: int) -> list[float]:
        """Where chunks begin, also between attention and MLP."""
        halves = {
            layer.name.removesuffix(":mlp") for layer in layers_of(self.model, halves=True) if ":mlp" in layer.name
        }
        whole = [*range(1, len(layers_of(self.model)))]
        names = [layer.name for layer in layers_of(self.model)]
        starts = whole + [number + 0.5 for number in whole if names[number] in halves]
        return [0, *sorted(self.rng.sample(starts, chunks - 1))]

    def describe(self) -> str:
        told = {name: value for name, value in vars(self).items() if name not in ("model", "rng", "schedule")}
        return f"{told}\n{self.schedule}"


def model_of(family: str) -> Any:
    if family in DECODERS:
        return make(family)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_of(*MORE[family])).double().train()


def in_microbatches(arguments: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    parts = {name: value.chunk(count) for name, value in arguments.items()}
    return [{name: value[number] for name, value in parts.items()} for number in range(count)]


def plainly(case: Case, model: Any, arguments: dict[str, Tensor], targets: Any) -> tuple[float, float]:
    """The losses of the library in one process, and gradients in the model."""
    count, found = len(targets), [0.0, 0.0]
    apart = case.rows == "packed" and case.family in MAKE_NO_MASKS
    for part, target in zip(in_microbatches(arguments, count), targets, strict=True):
        every = part["input_ids"].split(PACKED, 1) if apart and not case.balanced else ()
        balance: Any = 0.0
        if every:
            logits = torch.cat([model(input_ids=tokens, use_cache=False).logits for tokens in every], 1)
        else:
            outputs = model(**part, use_cache=False)
            logits = outputs.logits
            balance = COEFFICIENT * outputs.aux_loss if case.balanced else 0.0
        loss = case.losses[1](logits, target)
        ((loss + balance) / count).backward()
        found = [found[0] + loss.item() / count, found[1] + float(balance) / count]
    return found[0], found[1]


def given_by(case: Case, arguments: dict[str, Tensor]) -> tuple[Any, Any]:
    """inputs and side."""
    if case.given == "a mapping":
        return UserDict(arguments), None  # as BatchEncoding is
    if case.given == "microbatches":
        return in_microbatches(arguments, case.schedule.microbatches), None
    own = {"input_ids"} if case.given == "side" else set(arguments)
    inputs = {name: value for name, value in arguments.items() if name in own}
    return inputs, {name: value for name, value in arguments.items() if name not in own} or None


def pipelined(case: Case, arguments: dict[str, Tensor], targets: Any) -> list[Any]:
    """By rank: losses and what was added to them, of a step and an evaluation, chunks, and full weights after it."""

    def of_rank(transport: LocalTransport) -> Any:
        chunks = cut(copy.deepcopy(case.model), case.schedule, case.partition, rank=transport.rank)
        modules = [*map(zbkern.convert, chunks)] if case.converted else chunks
        with (
            InFloat64(),
            Pipeline(modules, case.schedule, case.losses[0], transport, timeout=60, options=case.options) as pipe,
        ):
            optimizer = Optimizer(torch.optim.SGD(nn.ModuleList(chunks).parameters(), lr=0.5), pipe)
            inputs, side = given_by(case, arguments)
            losses = [
                (None if loss is None else loss.item(), pipe.last.auxiliary_losses())
                for loss in (call(inputs, targets, side) for call in (pipe.step, pipe.evaluate))
            ]
            gradients = {name: None if p is None else p.clone() for name, p in gradients_of(chunks).items()}
            optimizer.step()
            return losses, chunks, gradients, [(name, tensor.clone()) for name, tensor in full_weights(pipe)]

    return results_on_threads(case.schedule.ranks, of_rank)


def check(case: Case, folder: Path) -> None:
    model, (arguments, labels) = copy.deepcopy(case.model), rows_of(case.rows)
    if case.balanced and case.rows == "packed" and case.family in MAKE_NO_MASKS:
        arguments.pop("position_ids")
    targets = token_targets(labels, case.schedule.microbatches)
    with InFloat64():
        loss, balance = plainly(case, model, arguments, targets)
    if case.rows == "packed" and case.family in STATES:
        with pytest.raises(PipelineError, match="cannot take sequences packed into a row"):
            pipelined(case, arguments, targets)
        return
    found = pipelined(case, arguments, targets)
    for losses, *_ in found:
        for own, added in losses:
            assert own is None or own == pytest.approx(loss, rel=1e-9)
            assert added == pytest.approx({"router_aux_loss": balance} if case.balanced else {}, rel=1e-9)
    gradients = {name: gradient for _, _, own, _ in found for name, gradient in own.items()}
    named = dict(model.named_parameters(remove_duplicate=False))
    assert gradients.keys() == named.keys()
    largest = max(p.grad.abs().max().item() for p in named.values() if p.grad is not None)
    for name, parameter in named.items():
        if parameter.grad is not None:
            assert (gradients[name] - parameter.grad).abs().max().item() < 1e-9 * largest, name
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    by_number = {
        n: c for r, (_, own, *_) in enumerate(found) for n, c in zip(case.schedule.chunks_of(r), own, strict=True)
    }
    chunks = [by_number[number] for number in sorted(by_number)]
    for name, tensor in state_of(chunks).items():
        if name in named:
            torch.testing.assert_close(tensor, named[name].detach(), rtol=1e-8, atol=1e-8, msg=name)
    check_files_and_names(folder, type(model), chunks, case.schedule, case.partition)
    files = written(folder / "exported")
    for *_, weights in found:
        assert len(weights) == len(dict(weights)), "a tensor comes twice"
        assert_equal(dict(weights), files)


def check_all(family: str, chosen: int, count: int, folder: Path) -> None:
    for number in range(count):
        case = Case(random.Random(f"{chosen} {number} {family}"), family)
        try:
            check(case, folder / str(number))
        except BaseException as error:
            raise AssertionError(f"ZBKERN_SEED={chosen}, {family}, number {number}:\n{case.describe()}") from error


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in SLOWER])
def test_cut_models_train_as_the_librarys_own(family: str, tmp_path: Path) -> None:
    check_all(family, seed(0), 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", SLOWER)
def test_more_cut_models(family: str, tmp_path: Path) -> None:
    check_all(family, seed(1), 1, tmp_path)
