"""What a model takes of time and memory on a GPU: as its layers keep it, and as the flops, bytes and shares say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.configurations import CONFIGURATIONS, H100, setting_of
from tests.support.cost_settings import GPT_OSS, IDEAL, LLAMA_8B, SMALL
from tests.support.llama_block import held_and_saved
from zbkern.pipeline import ModelCosts
from zbkern.planning.cost_model.architecture import architecture, load_architecture
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.layer_kinds import attention
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.cost_model.operations import rising_share


def test_memory_is_what_the_layers_keep() -> None:
    tokens = 64
    costs = Setting(architecture(SMALL), H100, Job(tokens)).costs
    held, saved = held_and_saved()
    assert costs.layers[1].held / 2 / tokens == pytest.approx(held, rel=0.01)
    assert costs.layers[1].activation / 2 / tokens == pytest.approx(saved, rel=0.01)


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
