"""The programs of docs/models.md and docs/planning.md, one after the other on four ranks, and the pages' commands."""

from __future__ import annotations

import copy
import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zbkern
from tests.support.chunks import gradients_of, results_on_threads
from tests.support.programs import block, blocks
from zbkern import __main__
from zbkern.pipeline import (
    Optimizer,
    Pipeline,
    Schedule,
    checkpoint,
    cut,
    layers_of,
    schedules,
    token_loss,
    token_targets,
)

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("models.md", "planning.md")]
WIDTH = 8


def save_llama(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="the page is about transformers 5")
    from tests.support.small_models import DECODER

    config = transformers.LlamaConfig(**{**DECODER, "num_hidden_layers": 28, "tie_word_embeddings": True})
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 61, (4, 7), generator=generator)
    mask = (torch.arange(7) < torch.tensor([7, 3, 5, 6])[:, None]).long()
    return {"tokens": tokens, "mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def whole_model(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(f"{folder}/llama")


def check_cut(names: dict[str, Any], folder: str) -> None:
    whole, given = whole_model(folder), batch()
    if names["loss"] is not None:
        logits = whole(given["tokens"], attention_mask=given["mask"]).logits
        expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())
        torch.testing.assert_close(names["loss"], expected.detach())
    assert all(zbkern.unconverted(chunk) == {} for chunk in names["chunks"])
    dist.barrier()
    exported = type(whole).from_pretrained(f"{folder}/trained").state_dict()
    assert all(torch.equal(value, exported[name]) for name, value in whole.state_dict().items())


def check_weights(names: dict[str, Any], folder: str) -> None:
    state = whole_model(folder).state_dict()
    for chunk in names["chunks"]:
        assert all(torch.equal(value, state[name]) for name, value in chunk.state_dict().items())


def run_page(folder: str) -> tuple[str, bool, int]:
    """The pages' programs in one namespace; the schedule that was measured for, and what the last chunk begins with."""
    (cutting, *_), (measuring, by_layer, from_file) = map(blocks, PAGES)
    names: dict[str, Any] = dict(batch())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(dist, "init_process_group", lambda: None)  # there is one already
        patch.setattr(zbkern.pipeline, "plan", functools.partial(zbkern.pipeline.plan, effort=0))
        exec(cutting, names)
        check_cut(names, folder)
        names["pipe"].close()
        names |= {"chunk": zbkern.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH))), "loss_fn": nn.functional.mse_loss}
        names |= {"inputs": torch.ones(16, WIDTH), "targets": torch.ones(16, WIDTH)}
        exec(measuring, names)
        with names["pipe"] as pipe:
            told = pipe.schedule.to_csv(), pipe.step(names["inputs"], names["targets"]) is not None
        exec(by_layer, names)
        names["pipe"].close()
        found = names["found"][0]
        assert [each.name for each in names["costs"].layers] == [each.name for each in layers_of(whole_model(folder))]
        assert (len(found.partition), found.schedule.ranks) == (len(found.schedule.placement), 4)
        check_weights(names, folder)
        exec(from_file, names)
        check_weights(names, folder)
        (chunk,) = names["chunks"]
        return *told, min(int(name.split(".")[2]) for name in chunk.state_dict() if ".layers." in name)


def states_after(
    code: str, model: nn.Module, schedule: Schedule, loss_fn: Any, rate: float, names: dict[str, Any], **options: Any
) -> dict[str, torch.Tensor]:
    """The state of the model once two ranks have run a block of the page. options: of the Optimizer."""

    def of_rank(transport: Any) -> dict[str, torch.Tensor]:
        chunks = [zbkern.convert(chunk) for chunk in cut(copy.deepcopy(model), schedule, rank=transport.rank)]
        with Pipeline(chunks, schedule, loss_fn, transport, timeout=60) as pipe:
            optimizer = Optimizer(torch.optim.SGD(nn.ModuleList(chunks).parameters(), rate), pipe, **options)
            exec(code, {"torch": torch, "chunks": chunks, "pipe": pipe, "optimizer": optimizer, **names})
            optimizer.validate()
        return {name: value for chunk in chunks for name, value in chunk.state_dict().items()}

    return {name: value for state in results_on_threads(2, of_rank) for name, value in state.items()}


@pytest.mark.parametrize("slices", [1, 2])
def test_a_policy_is_trained_as_in_one_process(slices: int) -> None:
    from tests.support import small_models

    names: dict[str, Any] = {}
    exec(block(PAGES[0], "def policy_loss"), names)
    model, (rows, mask, _) = small_models.make("llama"), small_models.batch()
    plain, schedule = copy.deepcopy(model), schedules.one_f_one_b(2, 2, slices=slices)
    chosen = mask.clone()
    chosen[:, :2] = 0
    advantages = torch.tensor([[1.0], [-2.0], [0.5], [3.0]], dtype=torch.float64)
    given = {"schedule": schedule, "chosen": chosen, "advantages": advantages}
    given["batch"] = {"input_ids": rows, "attention_mask": mask}
    steps = block(PAGES[0], "old = pipe.forward")
    found = states_after(steps, model, schedule, names["policy_loss"], 0.3, given)
    optimizer, old = torch.optim.SGD(plain.parameters(), lr=0.3), None
    follows = chosen[:, 1:] == 1
    for _ in range(2):
        optimizer.zero_grad()
        log_p = plain(rows, attention_mask=mask, use_cache=False).logits[:, :-1].log_softmax(-1)
        log_probs = log_p.gather(2, rows[:, 1:, None]).squeeze(2)
        old = log_probs.detach() if old is None else old
        ratio, entropy = (log_probs - old).exp(), -(log_p.exp() * log_p).sum(-1)
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.01 * entropy
        means = [some[counts].mean() for some, counts in zip(gain, follows, strict=True)]
        (-torch.stack(means).mean()).backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_a_bias_balances_experts_as_in_one_process() -> None:
    from tests.support import small_models

    code, speed = block(PAGES[0], "e_score_correction_bias"), 0.05
    model = small_models.make("deepseek_v3")
    plain = copy.deepcopy(model)
    inputs = torch.randint(3, 60, (3, 8, 6), generator=torch.Generator().manual_seed(0))
    targets = [token_targets(rows, 4) for rows in inputs]
    given = {"batches": [*zip(inputs, targets, strict=True)]}
    code = code.replace("1e-3", str(speed))
    found = states_after(code, model, schedules.zb_v(2, 4), token_loss, 0.1, given, max_norm=0.5)
    counts: dict[Any, list[torch.Tensor]] = {}
    for part in plain.modules():
        if hasattr(part, "e_score_correction_bias"):
            counts[part] = []
            part.register_forward_hook(lambda router, _, output: counts[router].append(output[2].flatten()))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows, own in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        for part, target in zip(rows.chunk(4), own, strict=True):
            (token_loss(plain(part, use_cache=False).logits, target) / 4).backward()
        for router, chosen in counts.items():
            each = torch.cat(chosen).bincount(minlength=4).float()
            router.e_score_correction_bias += speed * (each.mean() - each).sign()
            chosen.clear()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    moved = [name for name, value in plain.named_buffers() if "bias" in name and value.any()]
    assert len(moved) == 3
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["DeepseekV3", "Qwen3Next"])
def test_a_further_token_is_predicted_as_in_one_process(kind: str) -> None:
    from tests.support import small_models

    (code,) = (each for each in blocks(PAGES[0]) if "class WithMtp" in each)
    name, sizes = next(each for each in small_models.DECODERS.values() if each[0] == kind)
    names: dict[str, Any] = {"config": small_models.config_of(name, sizes)}
    names |= {"cut": cut, "schedule": schedules.zb_h1(1, 1)}
    exec(code.replace("DeepseekV3ForCausalLM", f"{kind}ForCausalLM"), names)  # all of it, on one rank
    zb_v, zb_h1 = schedules.zb_v(2, 2), schedules.zb_h1(3, 2)
    state = names["chunks"][0].state_dict()
    for rank in range(3):
        for chunk in names["cut"](names["model"], zb_h1, [0, 3, 6], layers=names["layers"], rank=rank):
            assert all(torch.equal(value, state[key]) for key, value in chunk.state_dict().items())
    torch.manual_seed(0)
    model = names["WithMtp"](names["config"]).double()
    model.set_experts_implementation("eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1 if parameter.dim() > 1 else 1.0, 0.1)
    plain = copy.deepcopy(model)
    tokens, mask, labels = small_models.batch()
    targets, losses = token_targets(labels, 2), [0.0, 0.0]
    for row, own, target in zip(tokens.chunk(2), mask.chunk(2), targets, strict=True):
        hidden = plain.model(input_ids=row, attention_mask=own, use_cache=False).last_hidden_state
        both = plain.mtp.enorm(plain.model.embed_tokens(row[:, 1:])), plain.mtp.hnorm(hidden[:, :-1])
        rotary = plain.model.rotary_emb(hidden, torch.arange(row.shape[1] - 1)[None])
        block = plain.mtp.block(plain.mtp.eh_proj(torch.cat(both, -1)), position_embeddings=rotary)
        logits = plain.lm_head(plain.mtp.norm(block[:, :-1]))
        further = row.masked_fill(own == 0, -100)[:, 2:]
        found = (
            token_loss(plain.lm_head(hidden), target),
            nn.functional.cross_entropy(logits.flatten(0, 1), further.flatten()),
        )
        ((found[0] + 0.3 * found[1]) / 2).backward()
        losses = [losses[0] + found[0].item() / 2, losses[1] + 0.3 * found[1].item() / 2]

    def of_rank(transport: Any) -> Any:
        chunks = cut(copy.deepcopy(model), *cuts, layers=names["layers"], rank=transport.rank)
        with Pipeline(chunks, cuts[0], token_loss, transport, timeout=60) as pipe:
            loss = pipe.step(None, targets, side={"input_ids": tokens, "attention_mask": mask})
            assert pipe.last.auxiliary_losses() == pytest.approx({"mtp": losses[1]}, rel=1e-12)
            assert loss is None or loss.item() == pytest.approx(losses[0], rel=1e-12)
        return chunks

    for cuts in ((zb_v, [0, 3, 5, 7]), (zb_h1, [0, 3, 6])):  # the last two layers apart, and together
        chunks = [chunk for chunks in results_on_threads(cuts[0].ranks, of_rank) for chunk in chunks]
        gradients = gradients_of(chunks)
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None and parameter.grad.any():
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.dist
def test_the_programs_run_as_they_stand(four_ranks: Any, tmp_path: Path) -> None:
    save_llama(tmp_path / "llama")
    sizes = ["--stages", "4", "--microbatches", "8", "--chunks", "1", "--sequence", "64", "--effort", "0"]
    config, out = str(tmp_path / "llama" / "config.json"), str(tmp_path / "plan.csv")
    assert __main__.main(["plan", "--config", config, *sizes, "--out", out]) == 0
    found = four_ranks.run(run_page, str(tmp_path), timeout=400)  # four processes, on a busy machine, too
    assert {text for text, _, _ in found} == {found[0][0]}
    assert [loss for _, loss, _ in found] == [False, False, False, True]
    assert [first for _, _, first in found] == [0, 8, 16, 25]  # the embedding is the first layer


def speech_program(folder: str) -> tuple[float | None, dict[str, torch.Tensor]]:
    sounds, labels = speech()
    names = {"torch": torch, "dist": dist, "zbkern": zbkern, "sounds": sounds, "labels": labels}
    names |= {name: getattr(zbkern.pipeline, name) for name in ("Pipeline", "cut", "schedules")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(block(PAGES[0], "Wav2Vec2ForCTC"), names)
    gradients = {name: parameter.grad for chunk in names["chunks"] for name, parameter in chunk.named_parameters()}
    return None if names["loss"] is None else names["loss"].item(), gradients


def speech() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(1, 30, (4, 9), generator=generator)
    behind = torch.arange(9) >= torch.tensor([[9], [4], [6], [7]])
    return torch.randn(4, 400, generator=generator), labels.masked_fill(behind, -100)


def save_speech(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="the page is about transformers 5")
    from tests.support.small_models import SIZES

    sizes = {**SIZES, "vocab_size": 30, "num_feat_extract_layers": 2, "layerdrop": 0.0, "mask_time_prob": 0.0}
    sizes |= {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3)}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    quiet = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(**sizes, **dict.fromkeys(quiet, 0.0), ctc_loss_reduction="mean")
    model = transformers.Wav2Vec2ForCTC(config).train()
    model.save_pretrained(folder)
    return model


@pytest.mark.dist
def test_a_model_of_modules_one_behind_the_other_equals_one_process(two_ranks: Any, tmp_path: Path) -> None:
    model = save_speech(tmp_path / "wav2vec2")
    sounds, labels = speech()
    losses = [model(sounds[rows], labels=labels[rows]).loss for rows in (slice(0, 2), slice(2, 4))]
    expected = sum(losses) / 2  # in the library's words
    expected.backward()
    (nothing, first), (loss, second) = two_ranks.run(speech_program, str(tmp_path))
    assert nothing is None
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    names: dict[str, Any] = {"torch": torch}
    exec(block(PAGES[0], "Wav2Vec2ForCTC").partition("def ctc")[0], names)
    whole = nn.Sequential(names["Sounds"](model.wav2vec2), *model.wav2vec2.encoder.layers, model.lm_head)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close((first | second)[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert checkpoint.load(tmp_path / "speech", whole).step == 1


class Front(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.time = nn.Linear(WIDTH, WIDTH), nn.Linear(1, WIDTH)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x(x), torch.tanh(self.time(time))


class Conditioned(nn.Bilinear):
    """A diffusion model's block: what it computes depends on the time."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x, time)


class Head(nn.Linear):
    def forward(self, passed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return super().forward(passed[0])


def denoiser_program() -> tuple[torch.Tensor | None, dict[str, torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """The page's loss and gradients, and those of one process."""
    torch.manual_seed(0)
    blocks_, names = [Conditioned() for _ in range(4)], {"torch": torch, "zbkern": zbkern}
    names |= {"front": Front().double(), "blocks": [each.double() for each in blocks_], "head": Head(WIDTH, 3).double()}
    names |= dict(zip(("x", "time", "noise"), torch.randn(8, WIDTH + 4).double().split((WIDTH, 1, 3), 1), strict=True))
    names |= {name: getattr(zbkern.pipeline, name) for name in ("Pipeline", "cut")}
    names["schedule"] = schedules.zb_v(2, 4)
    exec(block(PAGES[0], "class Denoiser"), names)
    found = {name: each.grad for chunk in names["chunks"] for name, each in chunk.named_parameters()}
    model = names["model"]
    found = {name: gradient.clone() for name, gradient in found.items()}
    model.zero_grad()
    expected = nn.functional.mse_loss(model(names["x"], names["time"]), names["noise"])
    expected.backward()
    return names["loss"], found, expected.detach(), {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.dist
def test_a_diffusion_models_time_is_passed_from_block_to_block(two_ranks: Any) -> None:
    (loss, first, expected, wanted), (_, second, *_) = two_ranks.run(denoiser_program)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert (first | second).keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close((first | second)[name], gradient, rtol=1e-12, atol=1e-14)


def unet_program() -> tuple[torch.Tensor | None, dict[str, torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """The page's loss and gradients, and those of one process."""
    torch.manual_seed(0)
    made = {name: getattr(zbkern.pipeline, name) for name in ("Pipeline", "cut")} | {"torch": torch, "zbkern": zbkern}
    made |= {"enter": nn.Conv1d(1, 2, 1), "middle": nn.Conv1d(2, 2, 1), "leave": nn.Conv1d(2, 1, 1)}
    made |= {"down": [nn.Conv1d(2, 2, 2, 2) for _ in range(3)], "up": [nn.Conv1d(4, 2, 1) for _ in range(3)]}
    made |= {"x": torch.randn(4, 1, 8), "noise": torch.randn(4, 1, 8), "partition": [0, 2, 4, 6]}
    made["schedule"] = schedules.zb_v(2, 4)
    exec(block(PAGES[0], "class UNet"), made)
    found = {name: each.grad.clone() for chunk in made["chunks"] for name, each in chunk.named_parameters()}
    model = made["model"]
    model.zero_grad()
    expected = nn.functional.mse_loss(model(made["x"]), made["noise"])
    expected.backward()
    return made["loss"], found, expected.detach(), {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.dist
def test_a_u_net_is_cut_with_its_skips(two_ranks: Any) -> None:
    (loss, first, expected, wanted), (_, second, *_) = two_ranks.run(unet_program)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert (first | second).keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close((first | second)[name], gradient, rtol=1e-5, atol=1e-7)


COMMANDS = [
    pytest.param(page, line, marks=pytest.mark.slow if "zbkern plan" in line else ())
    for page in sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    for code in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for line in code.split("\n")
    if line.startswith(("zbkern plan", "zbkern info"))
]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda value: getattr(value, "name", None))
def test_the_commands_run_as_they_stand(
    page: Path, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After what the page writes into files with echo, in a folder with the configuration of a model; except
    the effort, and for the numbers of layers, GPUs and sequences of a step, whose layouts take a minute."""
    monkeypatch.chdir(tmp_path)
    config = json.loads((ROOT / "bench" / "configurations" / "llama-3-70b.json").read_text())
    Path("config.json").write_text(json.dumps(config | {"num_hidden_layers": 16}))
    for text, path in re.findall(r"^echo '(.*?)' > (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE):
        Path(path).write_text(text)
    command = shlex.split(line.replace("--gpus 64 --batch 512", "--gpus 16 --batch 64"), comments=True)[1:]
    assert __main__.main([*command, *(["--effort", "0"] if command[0] == "plan" else [])]) == 0
    assert ("memory" if command[0] == "plan" else "launcher") in capsys.readouterr().out
