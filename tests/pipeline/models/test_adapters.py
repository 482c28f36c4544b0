"""Adapters of the peft library in chunks: trained as in one process, written alone, and merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zbkern
from tests.support.chunks import gradients_of, step_and_evaluate
from tests.support.ranks import Ranks
from zbkern.pipeline import (
    Optimizer,
    Pipeline,
    PipelineError,
    cut,
    export,
    export_adapter,
    schedules,
    token_loss,
    token_targets,
)

transformers = pytest.importorskip("transformers", minversion="5.0", reason="cut is for transformers 5")
peft = pytest.importorskip("peft", reason="needs the peft library: pip install zbkern[test]")

STEPS, MICROBATCHES = 3, 4
ALONE = schedules.zb_h1(1, 1)


def base_model(tied: bool = False) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 61, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2, pad_token_id=0)
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def lora(**options: Any) -> Any:
    options = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | options
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, 61, (8, 7), generator=generator)
    return tokens, tokens.masked_fill(torch.rand(8, 7, generator=generator) < 0.2, -100)


def adapted_model(folder: Path, **options: Any) -> Any:
    """A base model and an adapter in folders, and the model of both."""
    base_model(options.pop("tied", False)).save_pretrained(folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    torch.manual_seed(1)
    model = peft.get_peft_model(model, lora(**options))
    model.save_pretrained(folder / "adapter")
    return model


def trained(model: Any) -> list[float]:
    """The losses of a PeftModel in one process."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        tokens, labels = batch(step)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def chunks_with_adapters(folder: Path, schedule: Any, when: str) -> list[Any]:
    base, adapter = folder / "base", folder / "adapter"
    if when == "before":
        whole = transformers.AutoModelForCausalLM.from_pretrained(base)
        return cut(peft.PeftModel.from_pretrained(whole, adapter, is_trainable=True), schedule)
    if when == "by transformers":
        whole = transformers.AutoModelForCausalLM.from_pretrained(base)
        whole.load_adapter(str(adapter), is_trainable=True)
        return cut(whole, schedule)
    from safetensors.torch import load_file

    state = load_file(adapter / "adapter_model.safetensors")
    state = {name.removeprefix("base_model.model."): value for name, value in state.items()}
    config = peft.LoraConfig.from_pretrained(adapter)
    config.inference_mode = False  # as it was saved, its weights are frozen
    chunks = cut(transformers.AutoConfig.from_pretrained(base), schedule, weights=base)
    for chunk in chunks:
        peft.inject_adapter_in_model(config, chunk.whole)
        peft.set_peft_model_state_dict(chunk.whole, state)
    return chunks


def train_in_a_pipeline(folder: Path, when: str) -> tuple[list[float], int, int]:
    """Losses, on the rank that has them; how many parameters are trained; how many frozen ones have a gradient."""
    schedule = schedules.zb_v(2, MICROBATCHES)
    chunks = [zbkern.convert(chunk) for chunk in chunks_with_adapters(folder, schedule, when)]
    parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    with Pipeline(chunks, schedule, token_loss, timeout=60) as pipe:
        optimizer = Optimizer(torch.optim.AdamW(parameters, lr=1e-2), pipe, max_norm=1.0)
        losses = []
        for step in range(STEPS):
            tokens, labels = batch(step)
            optimizer.zero_grad()
            loss = pipe.step(tokens, token_targets(labels, MICROBATCHES))
            optimizer.step()
            losses += [] if loss is None else [loss.item()]
        export(folder / "merged", pipe)
        export_adapter(folder / "trained", pipe)
        frozen = [p for chunk in chunks for p in chunk.parameters() if not p.requires_grad and p.grad is not None]
        return losses, len(parameters), len(frozen)


@pytest.mark.dist
@pytest.mark.parametrize("when", ["before", "by transformers", "after"])
def test_they_train_and_are_written_as_in_one_process(two_ranks: Ranks, tmp_path: Path, when: str) -> None:
    model = adapted_model(tmp_path)
    found = two_ranks.run(train_in_a_pipeline, tmp_path, when)
    assert [held for _, held, _ in found] == [8, 8]
    assert [frozen for _, _, frozen in found] == [0, 0]
    losses = [loss for of_rank, _, _ in found for loss in of_rank]
    assert losses == pytest.approx(trained(model), rel=1e-6)

    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    back = peft.PeftModel.from_pretrained(whole, tmp_path / "trained")
    state, expected = peft.get_peft_model_state_dict(back), peft.get_peft_model_state_dict(model)
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "trained" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert (config["inference_mode"], config["target_modules"]) == (True, ["down_proj", "q_proj"])

    merged, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = back.merge_and_unload().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in merged.state_dict().items())


def write_one_of_two(folder: Path) -> None:
    """Rank 0 alone, as its group says; then in vain with rank 1, which comes late."""
    rank = torch.distributed.get_rank()
    groups = [torch.distributed.new_group([each]) for each in range(2)]
    chunks = cut(base_model(), ALONE, rank=0)
    for name, target in (("default", "q_proj"), ("other", "down_proj")):
        peft.inject_adapter_in_model(lora(target_modules=[target]), chunks[0].whole, adapter_name=name)
    if rank == 0:
        export_adapter(folder, chunks, name="other", group=groups[0], timeout=60)
    else:
        torch.distributed.barrier()
    with pytest.raises(PipelineError, match=r"^export_adapter: rank 1 did not come to 'adapters listed' in 0\.2 s"):
        export_adapter(folder, chunks, timeout=0.2)
    if rank == 0:
        torch.distributed.barrier()


@pytest.mark.dist
def test_an_adapter_is_written_by_its_name_and_the_ranks_of_a_group(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(write_one_of_two, tmp_path)
    back = peft.PeftModel.from_pretrained(base_model(), tmp_path)
    assert back.active_peft_config.target_modules == {"down_proj"}
    assert all("down_proj" in name for name in peft.get_peft_model_state_dict(back))


def test_a_copy_of_a_tied_head_that_is_trained_is_tied_to_nothing() -> None:
    model = base_model(tied=True)
    for rank in range(2):
        (chunk,) = cut(model, schedules.zb_h1(2, 2), rank=rank)
        peft.inject_adapter_in_model(lora(modules_to_save=["lm_head"]), chunk.whole)
        (weight,) = chunk.tied_parameters.values()
        assert weight is model.get_input_embeddings().weight
        assert not weight.requires_grad


TIED = {
    "token indices": {"trainable_token_indices": [5, 7, 11]},
    "a copy": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("kind", TIED)
def test_adapters_of_tied_weights_that_are_made_before_cut_are_tied(kind: str) -> None:
    model = peft.get_peft_model(base_model(tied=True).double(), lora(**{"target_modules": ["q_proj"], **TIED[kind]}))
    tokens, labels = batch(0)
    (loss, _), chunks = step_and_evaluate(
        model.get_base_model(), schedules.zb_h1(2, 2), None, token_loss, {"input_ids": tokens}, token_targets(labels, 2)
    )
    expected = model(input_ids=tokens, labels=labels, use_cache=False).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    right = {name.removeprefix("base_model.model."): p.grad for name, p in model.named_parameters() if p.requires_grad}
    found = gradients_of(chunks)
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_tied_weights_that_are_made_after_cut_are_refused(kind: str) -> None:
    """Another chunk has the other layer, and would keep its weight."""
    config = lora(**{"target_modules": ["q_proj"], **TIED[kind]})
    (chunk,) = cut(base_model(tied=True), schedules.zb_h1(2, 2), rank=0)
    peft.inject_adapter_in_model(config, chunk.whole)
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' is tied to a layer of another chunk"):
        assert chunk.tied_parameters
    (chunk,) = cut(base_model(tied=True), ALONE)
    peft.inject_adapter_in_model(config, chunk.whole)
    assert chunk.tied_parameters


def test_only_the_weights_of_adapters_wait(tmp_path: Path) -> None:
    model = adapted_model(tmp_path).get_base_model()
    (chunk,) = (zbkern.convert(chunk) for chunk in cut(copy.deepcopy(model), ALONE))
    tokens, labels = batch(0)
    queue = zbkern.WGradQueue()
    with queue.defer():
        token_loss(chunk(tokens), *token_targets(labels, 1)).backward()
    adapters = {name: p for name, p in chunk.named_parameters() if p.requires_grad}
    assert len(queue) == len(adapters) == 16
    assert all(p.grad is None for p in chunk.parameters())
    queue.run()
    model(input_ids=tokens, labels=labels).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    torch.testing.assert_close({name: p.grad for name, p in adapters.items()}, expected)


def test_modules_that_are_saved_whole(tmp_path: Path) -> None:
    """A copy of the head is trained, as `modules_to_save` has it; DoRA has a vector beside the adapter."""
    model = adapted_model(tmp_path, modules_to_save=["lm_head"], use_dora=True)
    chunks = cut(copy.deepcopy(model), ALONE)
    with torch.no_grad():
        for name, parameter in [*chunks[0].named_parameters(), *model.get_base_model().named_parameters()]:
            if parameter.requires_grad and "lm_head" in name:
                parameter.add_(1.0)
    export_adapter(tmp_path / "alone", chunks)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    state = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(whole, tmp_path / "alone"))
    assert {name for name in state if "lm_head" in name}
    assert {name for name in state if "magnitude" in name}
    torch.testing.assert_close(state, peft.get_peft_model_state_dict(model), rtol=0, atol=0)
    export(tmp_path / "merged", chunks)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    torch.testing.assert_close(merged, model.merge_and_unload().state_dict(), rtol=0, atol=0)


def test_experts_that_are_one_parameter(tmp_path: Path) -> None:
    """Two adapters around one module, its `target_parameters`."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 61, "num_attention_heads": 2}
    config = transformers.MixtralConfig(**sizes, num_hidden_layers=2, num_key_value_heads=1, num_local_experts=4)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(base, lora(target_modules=["q_proj"], target_parameters=experts))
    (chunk,) = (zbkern.convert(chunk) for chunk in cut(copy.deepcopy(model), ALONE))
    tokens, labels = batch(0)
    token_loss(chunk(tokens), *token_targets(labels, 1)).backward()
    model(input_ids=tokens, labels=labels).loss.backward()
    found = {name: p.grad for name, p in chunk.named_parameters() if p.requires_grad}
    torch.testing.assert_close(found, {name: p.grad for name, p in base.named_parameters() if p.requires_grad})

    export(tmp_path / "merged", chunk)
    export_adapter(tmp_path / "alone", chunk)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    back = peft.PeftModel.from_pretrained(whole, tmp_path / "alone").merge_and_unload().state_dict()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    torch.testing.assert_close(merged, back, rtol=0, atol=0)


def test_what_cannot_be_cut_or_written_is_refused(tmp_path: Path) -> None:
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="inside of its layers, as LoRA's are; got PROMPT_TUNING"):
        cut(peft.get_peft_model(base_model(), prompt), ALONE)
    with pytest.raises(ValueError, match="a chunk must have an adapter that peft knows as 'default'; got none"):
        export_adapter(tmp_path / "none", cut(base_model(), ALONE))
    assert not (tmp_path / "none").exists()
    tied = cut(adapted_model(tmp_path, tied=True, target_modules=["q_proj", "embed_tokens"]), ALONE)
    with pytest.raises(
        ValueError, match=r"adapter of 'model\.embed_tokens' cannot be merged into a weight that is tied"
    ):
        export(tmp_path / "tied", tied)
    assert not [*(tmp_path / "tied").glob("*")]
