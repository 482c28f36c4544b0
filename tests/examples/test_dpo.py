"""examples/dpo.py: losses and weights are those of one process with a batch of padded rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs import WORDS, example, save_model

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
