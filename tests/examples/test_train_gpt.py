from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zbkern.pipeline import ScheduleError, schedules

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.dist


def arguments(out: Path, **changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {
        "data": None,
        "schedule": None,
        "fill": "planned",
        "steps": 6,
        "microbatches": 4,
        "rows": 2,
        "layers": 4,
        "width": 16,
        "heads": 1,
        "context": 8,
        "tied": True,
        "lr": 3e-3,
        "seed": 0,
        "out": out,
        "log_every": 2,
        "checkpoint_every": 0,
        "resume": False,
    }
    return argparse.Namespace(**{**values, **changes})


def example(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return __import__(name)


def check_losses(names: list[str], microbatches: int, tied: bool, fill: str, out: Path) -> list[str]:
    train_gpt, text = example("train_gpt"), example("text")
    asked = arguments(out, microbatches=microbatches, tied=tied, fill=fill)
    source = text.Text(str(EXAMPLES))
    done = []
    for name in names:
        try:
            schedule = getattr(schedules, name)(2, microbatches)
        except ScheduleError:
            continue
        train_gpt.check(asked, source, schedule)  # exits with an error when a loss differs
        done.append(name)
    return done


@pytest.mark.parametrize(
    ("microbatches", "tied", "fill"), [(4, False, "planned"), (5, True, "planned"), (4, True, "eager")]
)
def test_losses_equal_a_plain_loop(two_ranks: Any, tmp_path: Path, microbatches: int, tied: bool, fill: str) -> None:
    for done in two_ranks.run(check_losses, schedules.NAMES, microbatches, tied, fill, tmp_path):
        assert len(done) >= len(schedules.NAMES) - 2, f"only {done} were checked"


def check_finds_a_difference(out: Path) -> str:
    train_gpt, text = example("train_gpt"), example("text")
    source = text.Text(str(EXAMPLES))
    plain_step = train_gpt.PlainTrainer.step
    train_gpt.PlainTrainer.step = lambda self, step: plain_step(self, step) * (1 + 3e-5)
    try:
        train_gpt.check(arguments(out), source, schedules.zb_h1(2, 4))
    except SystemExit as error:
        return str(error)
    finally:
        train_gpt.PlainTrainer.step = plain_step
    return ""


def test_the_check_can_fail(two_ranks: Any, tmp_path: Path) -> None:
    for message in two_ranks.run(check_finds_a_difference, tmp_path):
        assert "the loss of step 0 is" in message


def trained(out: Path, steps: list[int], resume: list[bool]) -> dict[str, torch.Tensor]:
    train_gpt, text, checkpoint = example("train_gpt"), example("text"), example("checkpoint")
    source = text.Text(str(EXAMPLES))
    for until, again in zip(steps, resume, strict=True):
        asked = arguments(out, steps=until, checkpoint_every=2, resume=again)
        train_gpt.train(asked, source, schedules.zb_h1(2, 4))
    state = checkpoint.load(out / "checkpoint")
    assert state["step"] == steps[-1]
    weights = {f"{i}.{k}": v for i, model in enumerate(state["model"]) for k, v in model.items()}
    moments = {f"{i}.{k}": v for i, entry in state["optimizer"]["state"].items() for k, v in entry.items()}
    return {**weights, **moments}


def test_a_resumed_run_equals_an_uninterrupted_one(two_ranks: Any, tmp_path: Path) -> None:
    whole = two_ranks.run(trained, tmp_path / "whole", [6], [False])
    parts = two_ranks.run(trained, tmp_path / "parts", [4, 6], [False, True])
    for a, b in zip(whole, parts, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key], b[key]), key
    log = (tmp_path / "whole" / "train.log").read_text().splitlines()
    again = (tmp_path / "parts" / "train.log").read_text().splitlines()
    assert [line.split("tokens")[0].rsplit(None, 1)[0] for line in log] == [
        line.split("tokens")[0].rsplit(None, 1)[0] for line in again
    ]
    assert sorted(p.name for p in (tmp_path / "whole").iterdir()) == [
        "checkpoint",
        "timeline.svg",
        "trace.json",
        "train.log",
    ]


def compared(out: Path) -> str:
    compare, text = example("compare"), example("text")
    return compare.best(arguments(out), text.Text(str(EXAMPLES))).name


def test_the_table_has_every_contestant(two_ranks: Any, tmp_path: Path) -> None:
    best = two_ranks.run(compared, tmp_path)
    assert best[0] == best[1]
    table = (tmp_path / "table.md").read_text()
    for name in ("one process", "one_f_one_b", "zb_h1", "zb_h2", "zb_v", best[0]):
        assert f" {name} |" in table


def test_text_refuses_what_is_not_there(tmp_path: Path) -> None:
    text = example("text")
    with pytest.raises(SystemExit, match="does not exist"):
        text.Text(str(tmp_path / "missing"))
    (tmp_path / "small").write_text("too little")
    with pytest.raises(SystemExit, match="holds only 10 bytes"):
        text.Text(str(tmp_path / "small"))
