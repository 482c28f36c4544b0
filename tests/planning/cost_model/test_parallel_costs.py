"""Costs where several GPUs have a stage: what each of them keeps and computes, and what they send each other."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from tests.support.configurations import CONFIGURATIONS, H100
from tests.support.cost_settings import GPT_OSS, IDEAL, LLAMA_8B, SMALL
from zbkern.pipeline import plan
from zbkern.planning.cost_model.architecture import architecture, load_architecture
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.cost_model.software import under


def test_every_gpu_has_a_head_of_keys() -> None:
    model = {**SMALL, "num_attention_heads": 16, "num_key_value_heads": 2}
    each = [Setting(architecture(model), H100, Job(64, tensor_parallel=ranks)).costs.layers[1] for ranks in (2, 16)]
    head = 2 * SMALL["hidden_size"] * SMALL["hidden_size"] // 16  # weights of a head's keys and values
    rest = each[0].static / 18 - head
    assert each[1].static / 18 == pytest.approx(rest / 8 + head)
    with pytest.raises(ValueError, match="must divide the 6 heads of keys, or be a multiple; got 4"):
        _ = Setting(architecture({**model, "num_key_value_heads": 6}), H100, Job(64, tensor_parallel=4)).costs


def test_plans_hide_the_all_to_alls_of_experts_where_that_is_asked_for() -> None:
    job = Job(4096, expert_parallel=64, data_parallel=64)
    model = load_architecture(CONFIGURATIONS / "deepseek-v3.json")
    alone, hidden = (Setting(model, H100, replace(job, overlap=overlap)).costs for overlap in (False, True))
    assert [layer.forward for layer in alone.layers] == [layer.forward for layer in hidden.layers]
    assert not any(layer.network_forward or layer.network_backward for layer in alone.layers)
    dense, sparse = hidden.layers[1], hidden.layers[10]
    assert (dense.collectives, dense.network_forward, sparse.collectives) == (0, 0, 2)
    assert 0.1 < sparse.network_forward / sparse.forward < 0.5
    times = [plan(each, 4, 16, 2, "v", effort=0).timeline for each in (alone, hidden)]
    assert times[1].schedule.beside
    assert times[1].cost < 0.98 * times[0].cost


def test_groups_of_few_rows_take_longest() -> None:
    model = load_architecture(CONFIGURATIONS / "qwen3-235b.json")
    jobs = [Job(4096, tensor_parallel=2, expert_parallel=ranks, data_parallel=64) for ranks in (2, 128)]
    fewer, more = (Setting(model, H100, job).costs.layers[1] for job in jobs)  # rows for each of a GPU's experts
    assert fewer.weight > more.weight


def test_what_a_step_has_besides_its_passes() -> None:
    bare = replace(H100, overlap_share=0)
    alone, few, many = (Setting(LLAMA_8B, bare, Job(4096, data_parallel=ranks)).beside(1) for ranks in (1, 64, 512))
    adam = 30 * 8.03e9 / (H100.memory_bandwidth * H100.memory_share)
    assert alone == pytest.approx(adam, rel=1e-3)
    moved = 4 * 8.03e9 / (8 * H100.network_bandwidth * H100.network_share)  # all adapters of a node
    assert few == pytest.approx(moved * 63 / 64 + adam / 64, rel=1e-3)
    assert many == pytest.approx(moved * 511 / 512 + adam / 512, rel=1e-3)
    hidden = Setting(LLAMA_8B, H100, Job(8192, data_parallel=64)).beside(1)
    assert hidden == pytest.approx(adam / 64, rel=1e-3)


def test_sharded_weights_take_what_their_own_layer_does_not_hide() -> None:
    whole, shared = (Job(4096, data_parallel=16, fully_shard=shard) for shard in (False, True))
    block = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    head = 4096 * 128256
    logits = 2 * 1024 * 128256
    static = [
        sum(layer.static for layer in Setting(LLAMA_8B, H100, job).costs.layers) - logits for job in (whole, shared)
    ]
    assert static[0] == pytest.approx(8.03e9 * (6 + 12 / 16), rel=1e-3)
    assert static[1] == pytest.approx(8.03e9 * 18 / 16 + 2 * 6 * head, rel=1e-3)  # of two large layers
    for bandwidth in (50e9, 2e9):
        gpu = replace(H100, network_bandwidth=bandwidth, overlap_share=0.8, split_share=0)
        before, after = (Setting(LLAMA_8B, gpu, job).costs.layers[1] for job in (whole, shared))
        gathered = 2e3 * block * 15 / 16 / (8 * bandwidth * gpu.network_share)
        forward, backward = gathered - 0.8 * before.forward, 3 * gathered - 0.8 * (before.backward + before.weight)
        assert (forward > 0) == (backward > 0) == (bandwidth == 2e9)
        assert after.forward - before.forward == pytest.approx(max(0, forward))
        assert after.backward - before.backward == pytest.approx(max(0, backward))
        assert after.weight == before.weight
    slow = replace(H100, network_bandwidth=2e9)
    assert Setting(LLAMA_8B, slow, shared).beside(1) == pytest.approx(
        Setting(LLAMA_8B, H100, shared).beside(1)
    )  # it is in the passes
    assert Setting(LLAMA_8B, slow, shared).beside(1) < Setting(LLAMA_8B, slow, whole).beside(1)


def test_the_gpus_of_a_sequence_share_its_tokens_and_send_keys() -> None:
    free = replace(IDEAL, exposed_share=0.0)
    whole, half, sent = (
        Setting(LLAMA_8B, gpu, Job(8192, context_parallel=ranks, data_parallel=2)).costs.layers[1]
        for gpu, ranks in ((free, 1), (free, 2), (IDEAL, 2))
    )
    for name in ("forward", "backward", "weight", "activation", "held", "output"):
        assert getattr(half, name) == pytest.approx(getattr(whole, name) / 2)
    assert half.static < whole.static  # optimizer states are shared by twice as many
    keys = 2 * 1024 * 2 * 4096 / (H100.link_bandwidth * H100.network_share) + 2 * H100.latency
    assert sent.forward - half.forward == pytest.approx(1e3 * H100.exposed_share * keys)
    with pytest.raises(ValueError, match="context_parallel must divide the sequence of 64 tokens; got 3"):
        Job(64, context_parallel=3)


def test_computing_hides_no_more_of_a_message_than_a_share_of_its_own_time() -> None:
    sizes = {"split_share": 0, "tensor_exposed_share": 0.25}
    for rate, hidden in ((450e9, 0.4), (45e9, 0.4), (45e9, 0.0)):
        gpu = replace(H100, link_bandwidth=rate, hiding_share=hidden, **sizes)
        job = Job(8192, tensor_parallel=8)
        free = Setting(LLAMA_8B, replace(gpu, link_bandwidth=1e30, latency=1e-30), job).costs.layers[1]
        block = Setting(LLAMA_8B, gpu, job).costs.layers[1]
        message = 2 * 1e3 * (4 * 8192 * 4096 * 7 / 8 / (rate * gpu.tensor_share) + 2 * gpu.latency)
        assert block.forward - free.forward == pytest.approx(max(message / 4, message - hidden * free.forward))


def test_two_gpus_of_a_board_without_a_switch_have_their_link_alone() -> None:
    board = replace(H100, gpus_per_node=4)
    assert [board.links(ranks) for ranks in (2, 3, 4)] == pytest.approx([150e9, 300e9, 450e9])
    assert [replace(board, largest_mesh=0).links(2), H100.links(2), replace(H100, gpus_per_node=2).links(2)] == [
        450e9
    ] * 3
    assert load_hardware("mi300x").links(2) == pytest.approx(448e9 / 7)
    seconds = [Setting(LLAMA_8B, gpu, Job(8192, tensor_parallel=2)).costs.layers[1].forward for gpu in (board, H100)]
    message = 2 * 2 * 4096 * 8192 * 2 / 2 / H100.tensor_share  # an all-gather and a reduce-scatter of each part, bytes
    assert seconds[0] - seconds[1] == pytest.approx(1e3 * message * (1 / 150e9 - 1 / 450e9))


def test_tensor_parallelism_is_torchs_unless_the_software_overlaps_it() -> None:
    job = Job(8192, tensor_parallel=8)
    ours, theirs = (Setting(LLAMA_8B, gpu, job).costs.layers[1] for gpu in (H100, under(H100, "megatron")))
    assert ours.forward > 1.1 * theirs.forward
    assert ours.weight == theirs.weight
    whole = [Setting(LLAMA_8B, gpu, Job(8192)).costs for gpu in (H100, under(H100, "megatron"))]
    assert whole[0] == whole[1]
    experts = [Setting(GPT_OSS, gpu, Job(4096, expert_parallel=8)).costs for gpu in (H100, under(H100, "megatron"))]
    assert experts[0] == experts[1]


def sent_bytes(expert_parallel: int, gpus_per_node: int, kind: str = "network", **routing: int) -> float:
    """Per token and feature, that a block of DeepSeek-V3 sends in F beyond its GPU or node, there and back."""
    config = {**json.loads((CONFIGURATIONS / "deepseek-v3.json").read_text()), **routing}
    whole = {"network_share": 1.0, "all_to_all_share": 1.0, "exposed_share": 1.0}
    free = replace(H100, gpus_per_node=gpus_per_node, latency=1e-30, largest_mesh=0, **whole)
    job = Job(64, expert_parallel=expert_parallel)
    silent, slow = (
        Setting(architecture(config), replace(free, **links), job).costs.layers[-4]
        for links in (
            {f"{name}_bandwidth": rate if name == kind else 1e30 for name in ("network", "link")}
            for rate in (1e30, 1e6)
        )
    )
    return (slow.forward - silent.forward) / 1e3 * 1e6 / (64 * 7168)


def test_a_token_goes_once_to_every_node_that_has_some_of_its_experts() -> None:
    """DeepSeek-V3's routing on 8 nodes reaches nearly 4, of which one in eight is the token's own."""
    there_and_back = 2 * 2  # bytes
    assert sent_bytes(64, 8) == pytest.approx(there_and_back * 3.983 * 7 / 8, rel=1e-3)
    assert sent_bytes(64, 8, n_group=1, topk_group=1) == pytest.approx(there_and_back * 5.295 * 7 / 8, rel=1e-3)
    assert sent_bytes(8, 8) == pytest.approx(0, abs=1e-9)  # one node


def test_a_token_goes_once_to_every_gpu_that_has_some_of_its_experts() -> None:
    free = {"n_group": 1, "topk_group": 1}
    missed = math.comb(256 - 32, 8) / math.comb(256, 8)
    assert sent_bytes(8, 8, "link", **free) == pytest.approx(2 * 2 * 8 * (1 - missed) * 7 / 8)
    assert sent_bytes(8, 1, "link", **free) == pytest.approx(0, abs=1e-9)  # GPUs that nothing joins


def test_a_node_that_is_not_full() -> None:
    """16 GPUs in nodes of 12: one has 192 experts, of which eight are never all missed, the other 64."""
    full, part = (1 - math.comb(256 - count, 8) / math.comb(256, 8) for count in (192, 64))
    found = sent_bytes(16, 12, n_group=1, topk_group=1)
    assert found == pytest.approx(2 * 2 * (full * 64 + part * 192) / 256)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel must divide the 8 heads; got 3"),
        ({"expert_parallel": 2}, "expert_parallel must be 1 for a model without experts; got 2"),
        ({"tensor_parallel": 2, "expert_parallel": 4, "data_parallel": 1}, "must be a multiple of expert_parallel"),
        ({"sequence": 0}, "sequence must be at least 1; got 0"),
    ],
)
def test_parallelism_that_does_not_divide(job: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = Setting(architecture(SMALL), H100, Job(**{"sequence": 16, **job})).costs


@pytest.mark.parametrize(
    ("tensor", "expert", "data"), [(1, 8, 8), (4, 64, 16), (8, 4, 1), (3, 8, 8), (16, 24, 3), (1, 1, 1)]
)
def test_as_many_pipelines_as_experts_need(tensor: int, expert: int, data: int) -> None:
    assert Job(16, tensor_parallel=tensor, expert_parallel=expert).pipelines == data
    with pytest.raises(ValueError, match="tensor_parallel must be at least 1"):
        Job(16, tensor_parallel=0, expert_parallel=expert)


def test_experts_that_do_not_divide() -> None:
    model = load_architecture(CONFIGURATIONS / "gpt-oss-120b.json")
    with pytest.raises(ValueError, match="expert_parallel must divide the 128 experts; got 3"):
        _ = Setting(model, H100, Job(16, expert_parallel=3)).costs
