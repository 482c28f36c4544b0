"""Models and a GPU of which costs are known by hand."""

from __future__ import annotations

from dataclasses import replace

from bench.split_models import LLAMA
from tests.support.configurations import CONFIGURATIONS, H100
from zbkern.planning.cost_model.architecture import load_architecture

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
