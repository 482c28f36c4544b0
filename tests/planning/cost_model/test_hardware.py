"""Tables of GPUs and of software, and what a GPU has besides its own speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.configurations import H100
from tests.support.cost_settings import LLAMA_8B
from zbkern.planning.cost_model.hardware import TABLE, load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.cost_model.software import under


def test_a_row_of_software_replaces_shares_of_every_gpu_and_of_some() -> None:
    older = under(H100, "nemo-24")
    assert (older.matmul_share, older.tensor_share, older.software) == (0.8, 0.91, "nemo-24")
    assert under(older, "nemo-24") is older
    assert under(load_hardware("gb200"), "nemo-24").matmul_share == load_hardware("gb200").matmul_share
    assert under(H100, "megatron-bridge").expert_time == 0
    with pytest.raises(ValueError, match=r"software: it must be one of torch, .*; got 'megatorn'"):
        under(H100, "megatorn")


def test_a_rank_holds_less_the_more_groups_it_is_in() -> None:
    one, three = H100.usable(1), H100.usable(3)
    assert one - three == pytest.approx(2 * H100.group_memory)
    assert 0.9 < three / H100.memory < one / H100.memory < 0.95


def test_the_table_of_hardware(tmp_path: Path) -> None:
    table = json.loads(TABLE.read_text())
    assert [*table][:5] == ["a100", "h100", "h100-500w", "h100-pcie", "h800"]
    for name in table:
        assert load_hardware(name).source
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"mine": {**table["h100"], "matmul_share": 0.8, "exposed_share": 0}}))
    mine = load_hardware("mine", own)
    assert (mine.matmul_share, mine.exposed_share, H100.matmul_share) == (0.8, 0, 0.72)
    assert (mine.name, H100.name, H100.attention) == ("", "h100", "flash_attention_3")
    older = load_hardware("h100", attention="flash_attention_2")
    assert older.attention_forward_share == table["h100"]["attention"]["flash_attention_2"][0] < 0.4
    with pytest.raises(ValueError, match=r"attention of a100 must be one of flash_attention_2, .*; got 'cudnn'"):
        load_hardware("a100", attention="cudnn")
    assert load_hardware("a100").host_bandwidth == 32e9  # PCIe 4.0 x16
    assert replace(H100, host_bandwidth=None).host_bandwidth is None
    own.write_text(json.dumps({"mine": {"like": "h200", "title": "mine"}, "other": {"like": "mine"}}))
    like, h200 = load_hardware("mine", own), load_hardware("h200")
    assert replace(h200, title="mine", name="") == like
    with pytest.raises(ValueError, match=r"like of other must be one of a100, .*; got 'mine'"):
        load_hardware("other", own)
    for kernels in ("cudnn", {"cudnn": 0.5}, {"cudnn": [0.5]}):
        own.write_text(json.dumps({"mine": {"like": "h200", "attention": kernels}}))
        with pytest.raises(ValueError, match=r"attention of mine must have the shares of each kernel, forward and"):
            load_hardware("mine", own)
    own.write_text(json.dumps({"mine": {**table["h100"], "matmul_share": 0.8, "exposed_share": 0}}))
    with pytest.raises(ValueError, match=r"has no 'h100'; it has mine"):
        load_hardware("h100", own)
    own.write_text(json.dumps({"mine": {"memory": 1}}))
    with pytest.raises(ValueError, match=r"'mine' of .*hardware.json\): .*'title', 'matmul_flops', .* are missing"):
        load_hardware("mine", own)
    own.write_text(json.dumps({"mine": 3}))
    with pytest.raises(ValueError, match=r"'mine' of .* expected an object with some of .*; got 3"):
        load_hardware("mine", own)
    own.write_text("[1")
    with pytest.raises(ValueError, match=r"own.json: expected JSON"):
        load_hardware("mine", own)
    for change, error in (({"memory": -1}, ValueError), ({"memory": "80 GB"}, TypeError), ({"title": 3}, TypeError)):
        with pytest.raises(error, match=r"Hardware: (memory|title) must be"):
            replace(H100, **change)


def test_copies_to_the_host_take_the_hosts_link() -> None:
    job = Job(4096)
    costs = Setting(LLAMA_8B, H100, job).costs
    assert costs.offload_bandwidth == costs.reload_bandwidth == pytest.approx(64e9 * 0.91 / 1e3)  # bytes per ms
    unknown = Setting(LLAMA_8B, replace(H100, host_bandwidth=None), job).costs
    assert unknown.offload_bandwidth is None
