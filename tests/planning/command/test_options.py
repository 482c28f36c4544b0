"""Pairs of options in the command's table: a plan, or an error that names an option, and nothing else."""

from __future__ import annotations

import argparse
import json
import random
import re
from itertools import combinations
from pathlib import Path

import pytest

from tests.support.seeds import seed
from zbkern.pipeline import Costs, LayerCosts, ModelCosts
from zbkern.planning.command import cli, layouts
from zbkern.planning.command.options import OPTIONS
from zbkern.planning.command.question import WrongArgument

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
SMALL = ["--effort", "0"]
OF_STAGES = ["--stages", "2", "--microbatches", "4", *SMALL]
NOTHING = "there was no search"
KINDS = ("chunks", "layers", "config", "gpus")
OF_KIND = {
    "P": "2",
    "M": "4",
    "N": "2",
    "V": "2",
    "B": "8",
    "LIMIT": "4x",
    "ROUNDS": "0",
    "GB/s": "50",
    "LIST": "1,.7",
    "": "",
}
OF_ONE = {
    "--batch": "4", "--sequence": "512", "--placement": "loop", "--schedule": "zb_v", "--gpu": "h200",
    "--attention": "flash_attention_2", "--software": "megatron",
}  # fmt: skip
"""What an option is given: one of its kind, or its own."""


@pytest.fixture
def given(tmp_path: Path) -> dict[str, list[str]]:
    """What is given of each kind, and by option what it is given with."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hardware.json").write_text(json.dumps({name: {"like": name} for name in ("h100", "h200")}))
    step = {"seconds": 1.0, "stages": 2, "microbatches": 4}
    (tmp_path / "step.json").write_text(json.dumps(step))
    chunk = Costs(tokens=4096, checkpoint=0.1, offload_bandwidth=1.0, reload_bandwidth=1.0).save(tmp_path / "one.json")
    layers = [LayerCosts(f"{n}", 1, 1, 1, 1, output=0.1) for n in range(4)]
    of_layers = ModelCosts(layers, offload_bandwidth=1.0, reload_bandwidth=1.0).save(tmp_path / "layers.json")
    config = ["--config", str(tmp_path / "config.json"), "--sequence", "256"]
    files = {"--costs": "one.json", "--out": "plan.csv", "--config": "config.json", "--costs-out": "computed.json"}
    files |= {"--hardware": "hardware.json", "--calibrate": "step.json"}
    found = {}
    for name, _, kind in (each.spelling.partition(" ") for each in OPTIONS):
        value = str(tmp_path / files[name]) if kind == "FILE" else OF_ONE.get(name) or OF_KIND[kind]
        found[name] = [name, value] if value else [name]
    found |= {"chunks": [*OF_STAGES, "--costs", str(chunk)], "layers": [*OF_STAGES, "--costs", str(of_layers)]}
    return found | {"config": [*OF_STAGES, *config], "gpus": ["--gpus", "2", "--batch", "4", *SMALL, *config]}


def test_the_pages_have_every_option_and_no_other() -> None:
    root = Path(__file__).parents[3]
    text = "\n".join(page.read_text(encoding="utf-8") for page in (root / "README.md", *(root / "docs").glob("*.md")))
    options = {each.spelling.split()[0] for each in OPTIONS}
    assert options <= {*re.findall(r"--[a-z][a-z0-9-]*", text)}
    commands = re.findall(r"zbkern plan ([^`\n]*)", text)
    assert len(commands) > 5
    assert {word for each in commands for word in re.findall(r"--[a-z][a-z0-9-]*", each)} <= options


@pytest.mark.parametrize("searched", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_is_planned_or_refused(
    kind: str,
    searched: bool,
    given: dict[str, list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The quick run ends where a search would begin, and draws half of the pairs; the slow one has all, and searches,
    for models in some that it draws."""
    if not searched:
        monkeypatch.setattr(cli, "answer", nothing_is_found)
        monkeypatch.setattr(layouts, "search", nothing_is_found)
    monkeypatch.setattr(layouts, "_PLANNED", 1)
    parser = argparse.ArgumentParser()
    cli.add_to(parser.add_subparsers())
    asked = 0
    pairs = [*combinations([name for name in given if name not in KINDS], 2)]
    share = 2 if not searched else 64 if kind in ("config", "gpus") else 1  # of these a search takes seconds
    pairs = random.Random(seed(0)).sample(pairs, len(pairs) // share)
    for pair in pairs:
        try:
            arguments = parser.parse_args(["plan", *given[kind], *given[pair[0]], *given[pair[1]]])
            status = arguments.run(arguments)
        except SystemExit as stop:
            status = stop.code
        printed = capsys.readouterr()
        assert status in (0, 2), pair
        assert not status or "argument --" in printed.err, (pair, printed.err)
        asked += not status or NOTHING in printed.err
    assert asked > len(pairs) // 12


def nothing_is_found(*_: object) -> None:
    raise WrongArgument("--effort", NOTHING)
