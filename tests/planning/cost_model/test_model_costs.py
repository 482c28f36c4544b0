"""Costs from a configuration: parameters as published, memory as zbkern's layers keep it, times as the flops say."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.split_models import LLAMA
from tests.support.configurations import setting_of
from tests.support.llama_block import held_and_saved
from zbkern.pipeline import ModelCosts, layers_of, plan
from zbkern.planning.cost_model.architecture import Architecture, architecture, load_architecture
from zbkern.planning.cost_model.configuration import FAMILIES
from zbkern.planning.cost_model.hardware import TABLE, load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.layer_kinds import attention, mlp
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.cost_model.operations import rising_share
from zbkern.planning.cost_model.software import under

CONFIGURATIONS = Path(__file__).parents[3] / "bench" / "configurations"
H100 = load_hardware("h100")
GPT_OSS = load_architecture(CONFIGURATIONS / "gpt-oss-120b.json")
LLAMA_8B = load_architecture(CONFIGURATIONS / "llama-3-8b.json")
IDEAL = replace(H100, matmul_ramp=0, pass_time=0, layer_time=0, expert_time=0, split_share=0)
"""On which small products are as fast as large ones, and nothing takes time besides flops, bytes and messages."""
SMALL = {
    "model_type": "llama",
    "hidden_size": LLAMA["width"],
    "intermediate_size": LLAMA["hidden"],
    "num_hidden_layers": 2,
    "num_attention_heads": LLAMA["heads"],
    "num_key_value_heads": LLAMA["key_heads"],
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("name", "total", "active"),  # in billions, from the models' cards
    [
        ("llama-3-8b", 8.03, 8.03),
        ("llama-3-70b", 70.6, 70.6),
        ("llama-3-405b", 406, 406),
        ("qwen3-235b", 235, 22),
        ("deepseek-v3", 671, 37),
        ("gpt-oss-120b", 117, 5.7),  # its card leaves the embedding out of the active ones: 5.1
        ("gemma-2-9b", 9.24, 9.24),
    ],
)
def test_parameters_are_those_that_are_published(name: str, total: float, active: float) -> None:
    model = load_architecture(CONFIGURATIONS / f"{name}.json")
    assert (model.parameters(), model.parameters(active=True)) == (
        pytest.approx(total * 1e9, rel=0.005),
        pytest.approx(active * 1e9, rel=0.02),
    )


def test_flops_of_a_token_are_six_per_parameter_and_those_of_attention() -> None:
    model = load_architecture(CONFIGURATIONS / "llama-3-405b.json")
    assert model.flops(8192) * 15.6e12 == pytest.approx(3.8e25, rel=0.05)  # arXiv 2407.21783, section 3


def test_memory_is_what_the_layers_keep() -> None:
    tokens = 64
    costs = Setting(architecture(SMALL), H100, Job(tokens)).costs
    held, saved = held_and_saved()
    assert costs.layers[1].held / 2 / tokens == pytest.approx(held, rel=0.01)
    assert costs.layers[1].activation / 2 / tokens == pytest.approx(saved, rel=0.01)


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


def test_layers_in_model_order_and_what_is_always_there() -> None:
    model = load_architecture(CONFIGURATIONS / "deepseek-v3.json")
    costs = Setting(model, H100, Job(4096, tensor_parallel=4, expert_parallel=64, data_parallel=64)).costs
    names = [layer.name for layer in costs.layers]
    assert names[:2] == ["model.embed_tokens", "model.layers.0"]
    assert names[-4:] == ["model.layers.60", "model.norm", "model.layers.61", "model.layers.61.shared_head"]
    assert [layer.tied for layer in costs.layers[-3:]] == ["head", None, "head"]
    dense, sparse = costs.layers[1], costs.layers[10]
    mlp, router = 3 * 7168 * 2048, 7168 * 256
    experts = 256 / 64 * mlp * (6 + 12 / 4)  # their optimizer state is shared by the four GPUs that have the same ones
    assert sparse.static - dense.static == pytest.approx(experts + (router + mlp / 4 - 9 * mlp / 4) * (6 + 12 / 64))
    assert dense.forward < sparse.forward
    assert ModelCosts.from_json(costs.to_json()) == costs
    tied = Setting(load_architecture(CONFIGURATIONS / "gemma-2-9b.json"), H100, Job(4096)).costs
    assert tied.layers[0].tied == tied.layers[-1].tied == "embedding"
    table, logits = 18 * 3584 * 256000, 2 * 1024 * 256000
    assert tied.chunk_costs([0, 1, 43]).static[::2] == (table, table + logits)  # logits where the head is alone
    assert tied.chunk_costs([0, 1, 43], [0, 1, 0]).static[::2] == (table, logits)


def test_time_is_that_of_the_flops_where_they_are_many() -> None:
    block = Setting(LLAMA_8B, IDEAL, Job(8192)).costs.layers[1]
    matrices = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    product = 2 * 8192 * matrices / (H100.matmul_flops * H100.matmul_share) * 1e3
    assert block.weight == pytest.approx(product)
    assert product / H100.forward_backward_share < block.forward < 1.4 * product / H100.forward_backward_share
    few = Setting(LLAMA_8B, IDEAL, Job(64)).costs.layers[1]
    read_and_written = 8 * matrices / (H100.memory_bandwidth * H100.memory_share) * 1e3
    assert few.weight == pytest.approx(read_and_written, rel=0.1)
    assert 0.5 < few.merge_saving / few.weight < 1
    halves = Setting(LLAMA_8B, IDEAL, Job(8192, tensor_parallel=2)).costs.layers[1]
    assert halves.weight == pytest.approx(block.weight / 2)
    assert halves.activation == pytest.approx(block.activation / 2)
    assert halves.forward > block.forward / 2  # messages


def test_weights_products_take_the_share_of_a_pass_that_was_measured() -> None:
    """Two blocks of a GPT on an A100: T_F, T_B and T_W of the 28.3B model in arXiv 2401.10241, Table 9."""
    sizes = {"n_layer": 62, "n_head": 48, "n_embd": 6144, "n_inner": 4 * 6144, "vocab_size": 50304}
    model = architecture({"model_type": "gpt2", "n_positions": 1024, **sizes})
    block = Setting(model, load_hardware("a100"), Job(1024)).costs.layers[1]
    measured = (10.419 + 10.207) / 7.715
    assert (block.forward + block.backward) / block.weight == pytest.approx(measured, rel=0.1)


def test_small_products_and_many_layers_take_longer_than_their_flops() -> None:
    ideal, found = (Setting(LLAMA_8B, each, Job(8192)).costs for each in (IDEAL, H100))
    shapes = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
    peak = H100.matmul_flops * H100.matmul_share
    ramps = [2 * 8192 * a * b / peak * H100.matmul_ramp * (1 / 8192 + 1 / a + 1 / b) for a, b in shapes]
    expected = 1e3 * (sum(ramps) + H100.layer_time)
    assert found.layers[1].weight - ideal.layers[1].weight == pytest.approx(expected)
    assert found.pass_overhead == pytest.approx(0.315)
    one, two = (found.chunk_costs(starts) for starts in ([0], [0, 17]))
    for name, times in (("forward", 1), ("backward", 1), ("weight", 1), ("split_overhead", 1)):
        assert sum(getattr(two, name)) - sum(getattr(one, name)) == pytest.approx(times * 0.315)


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


def test_fp8_halves_products_of_forward_and_input_gradients_alone() -> None:
    wide, narrow = (Setting(LLAMA_8B, IDEAL, Job(8192, fp8=fp8)).costs.layers for fp8 in (False, True))
    assert narrow[0] == wide[0]
    assert narrow[-1] == wide[-1]
    share = H100.matmul_share * H100.forward_backward_share
    products = 2 * 8192 * 4096 * (6144 + 4096 + 3 * 14336) / (H100.matmul_flops * share)
    quantised = 3 * 8192 * (3 * 4096 + 14336) / (H100.memory_bandwidth * H100.memory_share)
    gained = 1e3 * (products / 2 - quantised)
    assert wide[1].forward - narrow[1].forward == pytest.approx(gained, rel=1e-3)
    assert wide[1].backward - narrow[1].backward == pytest.approx(gained, rel=1e-3)
    assert narrow[1].weight == wide[1].weight
    kept = 2 * 4096 * (6144 + 4096 + 3 * 14336)
    assert narrow[1].static - wide[1].static == pytest.approx(kept)
    a100 = load_hardware("a100")
    assert Setting(LLAMA_8B, a100, Job(64, fp8=True)).costs == Setting(LLAMA_8B, a100, Job(64)).costs


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("jamba", [(0, None)] * 4 + [(8192, None)] + [(0, None)] * 3),
        ("llama4_text", [(10240, 8192)] * 3 + [(10240, None)]),
        ("qwen3_next", [(16384, 64)] * 3 + [(8192, None)]),
        ("mamba2", [(8192 + 8 * 128, 256)] * 4),
        ("falcon", [(2 * 4544, None)] * 4),
        ("cohere2", [(16384, 4096)] * 3 + [(16384, None)]),
    ],
)
def test_layers_of_several_kinds_are_in_the_librarys_order(kind: str, wanted: list[tuple[int, int | None]]) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="kinds are those of version 5")
    config = json.loads(transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    cores = [block.parts[0].core for block in architecture(config).blocks[: len(wanted)]]
    assert [(core.width, core.window) if core else (0, None) for core in cores] == wanted


def test_gpt2_has_other_names_and_two_products() -> None:
    found = architecture({"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 50257})
    assert found.blocks[0].parts == (attention(1600, 25, 25, 64), mlp(1600, 6400, gated=False))
    assert found.names[1] == "transformer.h"
    assert found.tied
    assert found.parameters() == pytest.approx(1.558e9, rel=2e-3)  # less biases and positions


def windows(model: Architecture) -> list[int | None]:
    return [block.parts[0].core.window for block in model.blocks]


def test_a_window_leaves_less_to_compute() -> None:
    windowed, full = Setting(GPT_OSS, H100, Job(8192)).costs.layers[1:3]
    assert windowed.backward < full.backward


def test_the_context_in_a_window_rises_by_the_line_of_the_least_squares() -> None:
    place = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    line = torch.stack((torch.ones_like(place), place), 1)
    for window in (0.1, 0.5, 1.0):
        seen = place.clamp(max=window)
        risen = torch.linalg.lstsq(line, seen[:, None]).solution[1] * place
        assert rising_share(window) == pytest.approx((risen.sum() / seen.sum()).item(), rel=1e-6)


def test_what_a_file_leaves_out_is_the_librarys_default() -> None:
    """As in google/gemma-3-4b-pt, whose file has no heads and no vocabulary."""
    pytest.importorskip("transformers", minversion="5.0", reason="defaults are those of version 5")
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    vision = {"vision_config": {"hidden_size": 1152}, "quantization_config": {}}
    found = architecture({"model_type": "gemma3", **vision, "text_config": {**text, "sliding_window": 1024}})
    assert found.blocks[0].parts[0] == attention(2560, 8, 4, 256, 1024)
    assert (found.vocabulary, found.tied, len(found.blocks)) == (262208, True, 34)
    assert found.left_out == ("vision_config",)
    untied = {"model_type": "gemma3", "tie_word_embeddings": False, "text_config": text}
    assert not architecture(untied).tied


def test_without_the_library_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert architecture({**SMALL, "tie_word_embeddings": True}).tied
    for types in ({}, {"layer_types": None}):
        with pytest.raises(ValueError, match=r"layer_types is not in the file, .* install transformers"):
            architecture({**SMALL, "sliding_window": 8, **types})
    with pytest.raises(ValueError, match="vocab_size must be a whole number"):
        architecture({name: value for name, value in SMALL.items() if name != "vocab_size"})
    with pytest.raises(ValueError, match=r"tie_word_embeddings is not in the file, .* install transformers"):
        architecture({**SMALL, "model_type": "gemma"})


@pytest.mark.parametrize(
    "kind", ["gemma2", "gemma3_text", "gpt_oss", "olmo3", "exaone4", "cohere2", "mistral", "phi3", "qwen2", "qwen3_moe"]
)
@pytest.mark.parametrize("use", [None, True])
def test_windows_are_those_of_the_library(kind: str, use: bool | None) -> None:
    """The library names the kind of every layer, which files of earlier versions do not have."""
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="kinds are those of version 5")
    told = {"use_sliding_window": use} if use and kind.startswith("qwen") else {}
    library = transformers.CONFIG_MAPPING[kind](sliding_window=16, num_hidden_layers=30, **told)
    config = json.loads(library.to_json_string(use_diff=False))
    config["sliding_window"] = 16  # which the library clears where it is not used
    expected = config.pop("layer_types", None)
    if expected is None:
        expected = ["full_attention" if kind.startswith("qwen") and not told else "sliding_attention"] * 30
    assert windows(architecture(config)) == [16 if each == "sliding_attention" else None for each in expected]


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


def test_a_row_of_software_replaces_shares_of_every_gpu_and_of_some() -> None:
    older = under(H100, "nemo-24")
    assert (older.matmul_share, older.tensor_share, older.software) == (0.8, 0.91, "nemo-24")
    assert under(older, "nemo-24") is older
    assert under(load_hardware("gb200"), "nemo-24").matmul_share == load_hardware("gb200").matmul_share
    assert under(H100, "megatron-bridge").expert_time == 0
    with pytest.raises(ValueError, match=r"software: it must be one of torch, .*; got 'megatorn'"):
        under(H100, "megatorn")


def test_what_no_kernel_joins_is_moved_and_hides_no_messages() -> None:
    """gpt-oss: 28 times gate and up of 4 experts, 2,880 each, of which 11 in F."""
    sizes = {"hiding_share": 1.0, "exposed_share": 0.0, "split_share": 0.0}
    for ranks, halves in ((1, False), (64, False), (64, True)):
        job = Job(4096, expert_parallel=ranks, halves=halves)
        joined, apart = (
            Setting(GPT_OSS, replace(H100, unfused_share=share, **sizes), job).costs.layers[2 if halves else 1]
            for share in (0.0, 1.0)
        )
        moved = 4096 * 4 * 2 * 2880 * 2 / (H100.memory_bandwidth * H100.memory_share) * 1e3
        assert apart.forward - joined.forward == pytest.approx(11 * moved)
        assert apart.backward - joined.backward == pytest.approx(17 * moved)
    qwen = load_architecture(CONFIGURATIONS / "qwen3-235b.json")
    costs = [Setting(qwen, replace(H100, unfused_share=share), Job(4096)).costs for share in (0.0, 1.0)]
    assert costs[0] == costs[1]


def test_small_heads_and_fast_gpus_wait_for_exponentials() -> None:
    small, large = (attention(4096, 4096 // size, 4096 // size, size).core for size in (64, 128))
    assert (small.size, large.size) == (64, 128)
    assert small.flops(8192) == large.flops(8192)
    for gpu, slower in ((H100, 1.3), (load_hardware("a100"), 1 + 0.3 * 312 / 989.4)):
        times = []
        for heads in (64, 32):
            config = {**SMALL, "hidden_size": 4096, "num_attention_heads": heads, "num_key_value_heads": heads}
            times.append(Setting(architecture(config), gpu, Job(8192)).costs.layers[1].attention_forward)
        assert times[0] / times[1] == pytest.approx(slower)


def test_a_rank_holds_less_the_more_groups_it_is_in() -> None:
    one, three = H100.usable(1), H100.usable(3)
    assert one - three == pytest.approx(2 * H100.group_memory)
    assert 0.9 < three / H100.memory < one / H100.memory < 0.95


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
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type must be .* that is known; got 'mamba', known are llama, .*--costs"),
        ({"hidden_size": None}, "hidden_size must be a whole number, at least 1 and at most 100,000,000; got None"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a whole number, at least 1 .*; got 2.5"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be .*, at least 1 and at most 10,000; got 1"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers must be .* at most 10,000; got 1000000000"),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, "num_local_experts must be .* at most 10,000; got 1"),
        ({"hidden_size": 10**400}, "hidden_size must be .*, at least 1 and at most 100,000,000; got 1000"),
        ({"vocab_size": -(10**400)}, "vocab_size must be a whole number, at least 1 .*; got -1000"),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, "layer_types must name 2 layers"),
        ({"sliding_window": 4, "layer_types": 3}, "layer_types must be a list; got 3"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 1}, "mlp_only_layers must be a list; got 1"),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok must be at most the number of experts, 4; got 5",
        ),
        (
            {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": -1},
            "attn_layer_offset must be a whole number, at least 0 and at most 100,000,000; got -1",
        ),
        ({"model_type": "bert"}, "model_type must be that of a decoder that is known; got 'bert'"),
    ],
)
def test_a_configuration_that_cannot_be_read(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        architecture({**SMALL, **change})


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


DIFFERENT = {"llama", "gpt2", "gemma3_text", "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_next", "nemotron_h"}
DIFFERENT |= {"mamba2", "bamba", "cohere", "falcon", "phi3", "glm4_moe"}  # the others are like one of these


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind not in DIFFERENT))
        for kind in FAMILIES
        if kind != "kimi_k2" and "_vl_" not in kind  # not models of their own
    ],
)
def test_parameters_are_those_of_the_librarys_models(kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="kinds are those of version 5")
    sizes = {"num_hidden_layers": 4, **({"num_experts_per_tok": 6} if kind == "deepseek_v2" else {})}
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    made = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        model = (made[0] if isinstance(made, tuple) else made)(config)
    found = architecture(json.loads(config.to_json_string(use_diff=False)))
    expected = sum(p.numel() for p in model.parameters())
    assert found.parameters() == pytest.approx(expected, rel=2e-3 if kind == "gpt2" else 1e-3)  # biases
    for place, name in enumerate(found.names):
        assert model.get_submodule(f"{name}.1" if place == 1 else name) is not None
    block = model.get_submodule(f"{found.names[1]}.1")
    norms = [name for name, _ in block.named_children() if "norm" in name.lower() or name.startswith("ln_")]
    assert found.blocks[1].norms == len(norms)
    costs = Setting(found, H100, Job(4096, halves=True)).costs
    names = [layer.name for layer in costs.layers]
    assert names[: names.index(found.names[2])] == [
        layer.name for layer in layers_of(model, halves=True) if layer.kind in ("embedding", "block")
    ]


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "gemma-2-9b", "gpt-oss-120b"])
def test_halves_are_together_what_a_block_is(name: str) -> None:
    model = load_architecture(CONFIGURATIONS / f"{name}.json")
    job = Job(8192, tensor_parallel=2, expert_parallel=1 if model.experts is None else 32)
    whole, parts = (Setting(model, H100, replace(job, halves=halves)).costs.layers for halves in (False, True))
    assert len(parts) == len(whole) + len(model.blocks)
    for number in (1, len(model.blocks)):
        block, (first, second) = whole[number], parts[2 * number - 1 : 2 * number + 1]
        assert (first.name, second.name) == (f"{block.name}:attention", f"{block.name}:mlp")
        for field in ("forward", "backward", "weight", "activation", "held", "static", "overhead", "carried"):
            assert getattr(first, field) + getattr(second, field) == pytest.approx(getattr(block, field)), field
        assert first.merge_saving + second.merge_saving == pytest.approx(block.merge_saving)
        assert first.attention_forward == block.attention_forward
        assert second.attention_backward == second.carried == 0
        assert first.output == second.output == block.output


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("falcon", {"parallel_attn": False}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("stablelm", {"use_parallel_residual": True}),
    ],
)
def test_a_switch_for_parallel_blocks_keeps_them_whole(kind: str, more: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="kinds are those of version 5")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    config = transformers.CONFIG_MAPPING[kind](**sizes, **more)
    model = architecture(json.loads(config.to_json_string(use_diff=False)))
    costs = Setting(model, H100, Job(4096, halves=True)).costs
    names = [layer.name for layer in layers_of(config, halves=True)]
    assert [layer.name for layer in costs.layers[:-1]] == names[: len(costs.layers) - 1]
    assert (len(names) > 5) == ("parallel_attn" in more)


def test_layers_of_nemotron_h_by_their_letters() -> None:
    sizes = {"hidden_size": 64, "vocab_size": 100, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
    sizes |= {"conv_kernel": 4, "chunk_size": 16, "model_type": "nemotron_h", "tie_word_embeddings": False}
    found = architecture({**sizes, "hybrid_override_pattern": "M-M*-"})
    assert [[part.parameters() for part in block.parts] for block in found.blocks[1:]] == [
        [2 * 64 * 96],
        [part.parameters() for part in found.blocks[0].parts],
        [64 * 16 * (2 * 4 + 2 * 2)],
        [2 * 64 * 96],
    ]
    assert found.names[2] == "model.norm_f"
    assert Setting(found, H100, Job(64)).costs.layers[1].name == "model.layers.0"
    with pytest.raises(ValueError, match=r"nemotron_h with layers of 'moe' \(or a moe_latent_size\) is not known"):
        architecture({**sizes, "hybrid_override_pattern": "ME", "moe_latent_size": 8})


def test_a_folder_and_capitals_will_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert load_architecture(tmp_path) == architecture(SMALL)
    assert load_hardware("H100") == H100


def test_bytes_per_parameter_are_those_that_are_given() -> None:
    """AdamW in fp32, and in 8 bits; three of four bytes of what four pipelines share are with the others."""
    usual = setting_of("llama-3-8b", data_parallel=4)
    parameters = usual.architecture.blocks[0].parts
    count = sum(part.parameters() for part in parameters)
    block = usual.costs.layers[1].static
    for weight, optimizer in ((8.0, 8.0), (6.0, 6.0), (2.0, 0.0)):
        job = replace(usual.job, weight_bytes=weight, optimizer_bytes=optimizer)
        less = (6 - weight) + (12 - optimizer) / 4
        assert block - usual._replace(job=job).costs.layers[1].static == pytest.approx(count * less, rel=1e-3)
