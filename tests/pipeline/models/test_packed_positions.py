"""Rows of several sequences that positions alone tell of, to models that ignore these or keep states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.chunks import one_rank
from tests.support.small_models import DECODER, config_of, transformers
from zbkern.pipeline import PipelineError, cut, schedules, token_loss, token_targets

SPACE = {"mamba_n_heads": 8, "mamba_d_head": 8}
HEADS = {f"linear_{which}": 2 for which in ("num_key_heads", "num_value_heads")}
IGNORANT: dict[str, tuple[str, dict[str, Any]]] = {  # of positions that begin anew
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "vocab_size": 61}),
    "mamba": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61, "state_size": 8}),
    "recurrent_gemma": ("RecurrentGemma", {**DECODER, "lru_width": 32, "head_dim": 8}),
    "jamba": ("Jamba", {**DECODER, "num_experts": 2, "mamba_d_state": 8}),
    "granite": ("GraniteMoeHybrid", {**DECODER, **SPACE, "layer_types": ["mamba", "attention"] * 2}),
    "qwen3_5": ("Qwen3_5Text", {**DECODER, **HEADS, "head_dim": 8}),
    "olmo_hybrid": ("OlmoHybrid", DECODER),
}


@pytest.mark.parametrize(
    "family", [*(pytest.param(each, marks=() if each == "bloom" else pytest.mark.slow) for each in IGNORANT)]
)
def test_packs_that_positions_alone_tell_of(family: str) -> None:
    """As collators of the transformers library make them. Positions of one sequence are no packs."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(*IGNORANT[family]))
    schedule, tokens = schedules.zb_h1(1, 1), torch.randint(3, 61, (1, 16))
    with one_rank(cut(model, schedule, rank=0), schedule, token_loss) as pipe:
        for lengths in ([16], [7, 5, 4]):
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            batch = [{"input_ids": tokens, "position_ids": positions}], token_targets([tokens], 1)
            if len(lengths) == 1:
                pipe.step(*batch)
                continue
            with pytest.raises(PipelineError, match="cannot take sequences packed into a row"):
                pipe.step(*batch)
