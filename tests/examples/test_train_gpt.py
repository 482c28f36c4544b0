from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.programs import EXAMPLES, example
from tests.support.restarts import restarted
from zbkern.pipeline import checkpoint, schedules

pytestmark = pytest.mark.dist


SMALL = {"steps": 6, "microbatches": 4, "layers": 4, "width": 16, "heads": 2, "context": 8, "lr": 3e-3, "log_every": 2}


def arguments(out: Path, **changes: Any) -> argparse.Namespace:
    """What the program is asked for without options, but for a small, tied model and these changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_gpt.py", "--tied", "--out", str(out)])
        return argparse.Namespace(**{**vars(example("train_gpt").parse()), **SMALL, **changes})


def check_losses(names: list[str], out: Path, asked_for: dict[str, Any]) -> list[str]:
    train_gpt, text = example("train_gpt"), example("text")
    asked = arguments(out, **asked_for)
    source = text.Text(str(EXAMPLES))
    for name in names:  # the check exits with an error when a loss differs
        train_gpt.check(asked, source, getattr(schedules, name)(2, asked.microbatches, slices=asked.slices))
    return names


def test_the_smallest_model_has_all_its_parts() -> None:
    gpt = example("gpt")
    assert all(p.numel() for p in gpt.chunk(gpt.Config(layers=1, width=2, heads=1), 0, 1).parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "asked"),
    [
        (["zb_h1", "zb_v"], {"microbatches": 5}),
        (["zb_v"], {"tied": False, "fill": "eager"}),
        (["zb_h1"], {"slices": 2}),
    ],
)
def test_losses_equal_a_plain_loop(two_ranks: Any, tmp_path: Path, names: list[str], asked: dict[str, Any]) -> None:
    assert two_ranks.run(check_losses, names, tmp_path, asked) == [names, names]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "asked"), [(["zb_h2", "zb_v"], {"replicas": 2, "fill": "eager"}), (["zb_v"], {"tensor_parallel": 2})]
)
def test_losses_of_four_ranks_equal_a_plain_loop(
    four_ranks: Any, tmp_path: Path, names: list[str], asked: dict[str, Any]
) -> None:
    assert four_ranks.run(check_losses, names, tmp_path, asked) == [names] * 4


def train_side_by_side(out: Path, sizes: dict[str, int]) -> None:
    train_gpt, text = example("train_gpt"), example("text")
    asked = arguments(out, steps=4, checkpoint_every=2, layers=2, **sizes)
    train_gpt.train(asked, text.Text(str(EXAMPLES)), schedules.zb_h1(2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["replicas", "tensor_parallel"])
def test_replicas_and_tensor_parallel_stages_train_and_save(four_ranks: Any, tmp_path: Path, option: str) -> None:
    four_ranks.run(train_side_by_side, tmp_path, {option: 2})
    assert [step for step, _ in losses(tmp_path)] == ["2", "4"]
    assert checkpoint.latest(tmp_path / "checkpoint").name == "step-00000004"
    assert (tmp_path / "timeline.svg").exists()


def with_another_loss(program: str, out: Path) -> str:
    """What is said where the losses of one process are a little larger."""
    module, source = example(program), example("text").Text(str(EXAMPLES))
    plain_step = module.PlainTrainer.step
    module.PlainTrainer.step = lambda self, step: plain_step(self, step) * (1 + 3e-5)
    try:
        if program == "compare":
            module.best(arguments(out), source)
        else:
            module.check(arguments(out), source, schedules.zb_h1(2, 4))
    except SystemExit as error:
        return str(error)
    finally:
        module.PlainTrainer.step = plain_step
    return ""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("train_gpt", "the loss of step 0 is"),
        pytest.param("compare", "the losses of the first step differ", marks=pytest.mark.slow),
    ],
)
def test_another_loss_is_seen(two_ranks: Any, tmp_path: Path, program: str, said: str) -> None:
    for message in two_ranks.run(with_another_loss, program, tmp_path):
        assert said in message
    assert not (tmp_path / "table.md").exists()


def losses(out: Path) -> list[tuple[str, str]]:
    return [tuple(line.split()[1:4:2]) for line in (out / "train.log").read_text().splitlines()]


def train_as_commanded(command: list[str]) -> None:
    train_gpt = example("train_gpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        asked = train_gpt.parse()
    train_gpt.train(asked, example("text").Text(asked.data, asked.seed), schedules.zb_h1(2, asked.microbatches))


def train_and_die(command: list[str], before: int) -> int:
    """The program under torchrun's agent. Rank 1 is killed in the first attempt, before that step."""
    train_gpt, attempt = example("train_gpt"), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    step = train_gpt.Trainer.step

    def or_die(self: Any, number: int) -> Any:
        if attempt == 0 and number == before and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.Trainer, "step", or_die)
        patch.setattr(sys, "argv", command)
        train_gpt.main()
    return attempt


@pytest.mark.slow
def test_torchrun_restarts_a_killed_run(two_ranks: Any, tmp_path: Path) -> None:
    """With the program's arguments of the documentation; its losses are those of a whole run."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    sizes = {"layers": 2, "width": 32, "context": 16, "heads": 1, "microbatches": 8}
    numbers = {**sizes, "steps": 9, "checkpoint-every": 4}
    command = [str(EXAMPLES / "train_gpt.py"), "--data", str(EXAMPLES), "--schedule", "zb_h1", "--log-every", "1"]
    command += [f"--{name}={value}" for name, value in numbers.items()]
    two_ranks.run(train_as_commanded, [*command, "--out", str(whole)])
    assert restarted(train_and_die, [*command, "--out", str(killed)], 6) == {0: 1, 1: 1}
    assert set(losses(whole)) == set(losses(killed))
    steps = [int(step) for step, _ in losses(killed)]
    assert steps[-5:] == [5, 6, 7, 8, 9], "the second attempt was to go on after step 4"
    assert steps[:-5] in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])  # the other rank may end before it logs step 6


def compared(out: Path) -> list[str]:
    compare, text = example("compare"), example("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "ROUNDS", 1)
        schedule, costs = compare.best(arguments(out), text.Text(str(EXAMPLES)))
        assert len(costs.forward) == len(schedule.placement)
        return ["one process", "1F1B, torch's engine", *compare.CANDIDATES]


def test_the_table_has_every_contestant(two_ranks: Any, tmp_path: Path) -> None:
    names = two_ranks.run(compared, tmp_path)[0]
    rows = [line.split("|") for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert {row[1].strip() for row in rows} == set(names)
    for row in rows:
        engine = row[1].strip() in names[2:]
        assert all(cell.strip().endswith("%") is engine for cell in row[3:5]), row


def test_text_refuses_what_is_not_there(tmp_path: Path) -> None:
    text = example("text")
    with pytest.raises(SystemExit, match="does not exist"):
        text.Text(str(tmp_path / "missing"))
    (tmp_path / "small").write_text("too little")
    with pytest.raises(SystemExit, match="holds only 10 bytes"):
        text.Text(str(tmp_path / "small"))
