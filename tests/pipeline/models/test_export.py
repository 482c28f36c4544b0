"""Exports: files that from_pretrained reads, a folder that has a whole model at any time, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.small_models import make, small, tensors, transformers
from zbkern.pipeline import PipelineError, cut, export, schedules

safetensors = pytest.importorskip("safetensors", reason="needs safetensors: pip install safetensors")

ALONE = schedules.one_f_one_b(1, 2)


def export_with_one_rank(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    groups = [torch.distributed.new_group([each]) for each in range(2)]
    if rank == 0:
        export(folder, cut(small(), ALONE, [0], rank=0), group=groups[0], timeout=60)
    else:
        torch.distributed.barrier()
    with pytest.raises(PipelineError, match=r"^export: rank 1 did not come to 'chunks listed' in 0\.2 s"):
        export(folder, cut(small(), ALONE, [0], rank=0), timeout=0.2)
    if rank == 0:
        torch.distributed.barrier()


@pytest.mark.dist
def test_an_export_waits_for_the_ranks_of_its_group_so_long(two_ranks: Any, tmp_path: Path) -> None:
    two_ranks.run(export_with_one_rank, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_export_refuses_other_modules(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="chunks must be those that cut has made"):
        export(tmp_path, nn.Linear(2, 2))


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, names = safetensors.torch.save_file, []

    def fills_the_disk(tensors: Any, path: Path, **more: Any) -> None:
        save(tensors, path, **more)
        names.append(path.name)
        if len(names) == 2:
            raise OSError("no space left on device")

    export(tmp_path, cut(make("llama").float(), ALONE))
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(safetensors.torch, "save_file", fills_the_disk)
    with pytest.raises(OSError, match="no space left"):
        export(tmp_path, cut(make("llama").float(), ALONE), max_shard_bytes=10_000)
    assert len(names) == 2
    assert sorted(tmp_path.iterdir()) == before


class Adapted(nn.Module):
    """A linear with an adapter beside it, as LoRA has."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a = base, nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)


def test_export_refuses_names_that_the_model_does_not_have(tmp_path: Path) -> None:
    (chunk,) = cut(make("llama").float(), ALONE)
    attention = chunk.get_submodule("model.layers.1.self_attn")
    base = attention.q_proj
    attention.q_proj = Adapted(base)
    expected = r"got 'model.layers.1.self_attn.q_proj.a.weight', .*b.weight', .* lack '.*q_proj.weight': merge adapters"
    with pytest.raises(ValueError, match=expected):
        export(tmp_path / "export", [chunk])
    assert not (tmp_path / "export").exists()
    attention.q_proj = base
    export(tmp_path / "export", [zbkern.convert(chunk)])

    adapted = nn.Sequential(nn.Linear(4, 4), Adapted(nn.Linear(4, 4)))  # before the cut: these are the model's names
    export(tmp_path / "adapted", cut(adapted, ALONE, [0]))


def test_an_export_deletes_older_exports_alone(tmp_path: Path) -> None:
    others = {"model_best.safetensors", "model-ema.safetensors", "modelling.safetensors", "adapter_model.safetensors"}
    for name in (*others, "model-00001-of-00009.safetensors"):
        (tmp_path / name).write_text("mine")
    export(tmp_path, cut(small(), ALONE, [0]))
    assert {path.name for path in tmp_path.iterdir()} == {*others, "model.safetensors"}


@pytest.mark.parametrize(("before", "after"), [(50, 50), (50, 1 << 20), (1 << 20, 50), (1 << 20, 1 << 20)])
def test_at_any_time_the_folder_has_a_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    """Killed after any of the changes, it is the old one or the new one, for us and for the transformers library."""
    old, new = small(), small()

    def sums() -> set[float]:
        with torch.device("meta"):
            model = small()
        found = {tensors(cut(model, ALONE, [0], weights=tmp_path))["0.weight"].sum().item()}
        single = tmp_path / "model.safetensors"  # the library takes it before an index
        if single.exists():
            found.add(safetensors.torch.load_file(single)["0.weight"].sum().item())
        return found

    expected = {model[0].weight.sum().item() for model in (old, new)}
    export(tmp_path, cut(old, ALONE, [0]), max_shard_bytes=before)
    seen = []

    def watched(real: Any) -> Any:
        def change(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            seen.append(sums())
            return result

        return change

    monkeypatch.setattr(os, "replace", watched(os.replace))
    monkeypatch.setattr(Path, "unlink", watched(Path.unlink))
    export(tmp_path, cut(new, ALONE, [0]), max_shard_bytes=after)
    assert seen
    assert all(found <= expected for found in seen)
    assert sums() == {new[0].weight.sum().item()}
    assert len(list(tmp_path.iterdir())) == (1 if after > 50 else 4)


@pytest.mark.slow
def test_an_export_imports_what_it_needs(tmp_path: Path) -> None:
    program = f"""
from torch import nn
from zbkern.pipeline import cut, export, schedules
export({str(tmp_path)!r}, cut(nn.Sequential(nn.Linear(2, 2)), schedules.one_f_one_b(1, 2), [0]))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_configuration_has_the_dtype_of_the_files(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make("llama").to(torch.float16)
    model.config.dtype = torch.float16
    export(tmp_path, [chunk.to(dtype) for chunk in cut(model, ALONE)])
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype == dtype
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == dtype
    assert model.config.dtype == torch.float16


def test_export_refuses_adapters_that_were_there_before_the_cut(tmp_path: Path) -> None:
    model = make("llama").float()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM of its configuration does not have: merge adapters"):
        export(tmp_path / "export", cut(model, ALONE))
    assert not (tmp_path / "export").exists()
