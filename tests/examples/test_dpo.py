"""examples/dpo.py: losses and weights are those of one process with a batch of padded rows, and of TRL's DPOTrainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zbkern
from tests.support.programs import WORDS, example, save_model
from zbkern import pipeline

transformers = pytest.importorskip("transformers", minversion="5.0", reason="cut is for transformers 5")

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def write_pairs(file: Path, count: int) -> list[dict[str, str]]:
    generator = torch.Generator().manual_seed(1)

    def text(least: int, most: int) -> str:
        length = int(torch.randint(least, most, (1,), generator=generator))
        return " ".join(WORDS[word] for word in torch.randint(len(WORDS), (length,), generator=generator))

    pairs = [{"prompt": text(2, 9), "chosen": text(1, 12), "rejected": text(1, 12)} for _ in range(count)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return pairs


def train(folder: str) -> Any:
    return example("dpo").main(f"{folder}/model", f"{folder}/pairs", f"{folder}/out")


def log_probs(model: Any, tokenizer: Any, pairs: list[dict[str, str]]) -> torch.Tensor:
    """[pairs, 2], of one row at a time, in words of torch's."""
    found = []
    for pair in pairs:
        prompt = tokenizer(pair["prompt"]).input_ids
        for kind in ("chosen", "rejected"):
            tokens = torch.tensor(prompt + tokenizer(pair[kind]).input_ids)
            logits = model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1]
            found.append(-torch.nn.functional.cross_entropy(logits, tokens[len(prompt) :], reduction="sum"))
    return torch.stack(found).view(-1, 2)


def test_the_program_trains_like_one_process(two_ranks: Any, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    pairs = write_pairs(tmp_path / "pairs", 20)
    (losses,) = [found for found in two_ranks.run(train, str(tmp_path)) if found]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.no_grad():
        references = log_probs(model, tokenizer, pairs)
    expected = []
    for first in range(0, 20, 8):
        optimizer.zero_grad()
        gain = log_probs(model, tokenizer, pairs[first : first + 8]) - references[first : first + 8]
        loss = -torch.nn.functional.logsigmoid(0.1 * (gain[:, 0] - gain[:, 1])).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[0] == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-6)  # the policy is the reference
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(trained.get_parameter(name), weight, rtol=1e-3, atol=1e-4, msg=name)


# ---- beside TRL's DPOTrainer


def trl_trainer(folder: Path, pairs: list[dict[str, str]], reference: str) -> Any:
    """DPOTrainer with the options of the example: one step takes 8 pairs, in their order."""
    trl = pytest.importorskip("trl", reason="needs TRL: pip install trl")
    datasets = pytest.importorskip("datasets", reason="comes with TRL")
    options: dict[str, Any] = {"per_device_train_batch_size": 8, "max_steps": 3, "logging_steps": 1, "beta": 0.1}
    options |= {"max_grad_norm": 1.0, "train_sampling_strategy": "sequential", "report_to": [], "use_cpu": True}
    arguments = trl.DPOConfig(str(folder / "trl"), **options, bf16=False, save_strategy="no", disable_tqdm=True)
    model, other = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for name in ("model", reference)
    )
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return trl.DPOTrainer(
        model,
        other,
        arguments,
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
        optimizers=(adamw, torch.optim.lr_scheduler.ConstantLR(adamw, 1.0)),
    )


def write_for_trl(folder: Path) -> list[dict[str, str]]:
    """Pairs as TRL joins them, a space before each answer, and a tokenizer with the end of text that it adds."""
    save_model(folder / "model")
    transformers.AutoTokenizer.from_pretrained(folder / "model", eos_token="<end>").save_pretrained(folder / "model")
    pairs = write_pairs(folder / "pairs", 20)
    pairs = [{**pair, **{kind: f" {pair[kind]}" for kind in ("chosen", "rejected")}} for pair in pairs]
    (folder / "pairs").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    config.vocab_size += 1
    for seed, name in enumerate(("model", "reference")):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    return pairs


def gradients(folder: str) -> Any:
    """The loss of a step of 8 pairs, whose reference is another model, and this rank's gradients."""
    dpo, tokenizer = example("dpo"), transformers.AutoTokenizer.from_pretrained(f"{folder}/model")
    pairs = [dpo.pair_of(line, tokenizer) for line in Path(f"{folder}/pairs").read_text().splitlines()[:8]]
    inputs, plan, following = dpo.planned(pairs, 2)
    schedule, reference = pipeline.schedules.zb_v(2, 2), [None] * 8
    for name in ("reference", "model"):
        config = transformers.AutoConfig.from_pretrained(f"{folder}/{name}")
        chunks = [*map(zbkern.convert, pipeline.cut(config, schedule, weights=f"{folder}/{name}"))]
        targets = pipeline.sequence_targets([*zip(following, reference, strict=True)], plan)
        with pipeline.Pipeline(chunks, schedule, pipeline.per_sequence(dpo.dpo)) as pipe:
            if name == "reference":
                reference = pipe.forward(inputs, targets, schedule=plan.schedule) or reference
            else:
                loss = pipe.step(inputs, targets, schedule=plan.schedule)
    found = {name: parameter.grad for chunk in chunks for name, parameter in chunk.named_parameters()}
    return None if loss is None else loss.item(), {name: grad for name, grad in found.items() if grad is not None}


def test_the_program_trains_like_trls_dpo_trainer(two_ranks: Any, tmp_path: Path) -> None:
    """Then loss and gradients where the reference is another model."""
    pairs = write_for_trl(tmp_path)
    trainer = trl_trainer(tmp_path, pairs, "model")
    trainer.train()
    expected = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    (losses,) = [found for found in two_ranks.run(train, str(tmp_path)) if found]
    assert len(losses) == 3
    assert losses == pytest.approx(expected, rel=1e-5)

    trainer = trl_trainer(tmp_path, pairs, "reference")
    batch = trainer.data_collator([*trainer.train_dataset][:8])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    found = two_ranks.run(gradients, str(tmp_path))
    assert [each for each, _ in found if each is not None] == pytest.approx([loss.item()], rel=1e-6)
    assert abs(loss.item() - torch.tensor(2.0).log().item()) > 1e-3  # the policy is not the reference
    for _, own in found:
        assert own
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, trainer.model.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)
