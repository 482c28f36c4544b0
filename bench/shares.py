"""How much of a GPU's peaks programs get, fitted to runs that others have published (`bench.published_runs --fit`).

Every number is what the table has times a factor. The logarithms of the factors are found by least squares, one step of
Gauss and Newton from the table: of how far predicted speeds are from those measured, in units of `SCATTER`, and of how
far each number is from its anchor, in units of how well that is known. What no run tells is at its anchor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from zbkern.planning.cost_model.hardware import Hardware

SCATTER = 0.1  # of the speeds of frameworks that run the same
_STEP = 0.02  # of a factor, for derivatives


class Share(NamedTuple):
    """Numbers of a GPU, or of all of them, that have one factor. anchor: of the first of them, where it is known to
    `width` of itself, and by what."""

    fields: tuple[str, ...]
    anchor: float
    width: float
    why: str
    gpu: str = ""
    attention: str = ""
    software: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.gpu, self.attention, self.software, self.fields[0])))

    def of(self, gpu: Hardware) -> bool:
        """Whether this GPU has the factor, and what is not 0 to multiply by it."""
        same = (self.gpu, gpu.name), (self.attention, gpu.attention), (self.software, gpu.software)
        return all(mine in ("", its) for mine, its in same) and getattr(gpu, self.fields[0]) > 0


_CORE = ("attention_forward_share", "attention_backward_share")
SHARES = (
    Share(("matmul_share",), 0.7, 0.1, "0.8 in a benchmark of 8192, 0.6 to 0.7 at full power", "h100"),
    Share(("matmul_share",), 0.85, 0.1, "as benchmarks reach that draw less than its power", "a100"),
    Share(("matmul_share",), 0.61, 0.2, "clocks go with the root of the power, 500 of 700 W", "h100-500w"),
    Share(("matmul_share",), 0.7, 0.2, "an H100's", "b200"),
    Share(("matmul_share",), 0.7, 0.2, "an H100's", "gb200"),
    Share(("matmul_share",), 0.8, 0.2, "a GB200's and more power", "gb300"),
    Share(("matmul_share",), 0.72, 0.1, "what others reach", "h100", software="nemo-24"),
    Share(("matmul_share",), 0.72, 0.2, "what others reach, with compiled operations beside", "h200"),
    Share(("matmul_ramp",), 128, 0.5, "the width of a tile"),
    Share(("expert_share",), 0.7, 0.3, "groups fill their tiles less"),
    Share(_CORE, 0.35, 0.15, "0.3 to 0.4 in arXiv 2307.08691", "a100", "flash_attention_1"),
    Share(_CORE, 0.25, 0.3, "what an H100 has more than an A100 it does not use", "h100", "flash_attention_1"),
    Share(_CORE, 0.1, 0.5, "it moves its scores several times", "a100", "unfused"),
    Share(("attention_ramp",), 512, 0.5, "a few tiles"),
    Share(("memory_share",), 0.6, 0.4, "0.9 in a benchmark; copies and norms that are not fused count besides"),
    Share(("network_share",), 0.9, 0.05, "an adapter"),
    Share(("tensor_share",), 0.6, 0.3, "all-gathers of NCCL reach 0.8, and copies are beside them", software="torch"),
    Share(("tensor_share",), 0.6, 0.3, "the same", software="kempnerforge"),
    Share(("all_to_all_share",), 0.9, 0.1, "43 to 47 of 50 GB/s (DeepEP)"),
    Share(("exposed_share",), 0.5, 0.5, "between all and nothing"),
    Share(("hiding_share",), 0.5, 0.5, "between all and nothing"),
    Share(("pass_time",), 0.5e-3, 0.5, "0.6 to 0.8 ms in the tables of arXiv 2401.10241, and less today"),
    Share(("layer_time",), 0.05e-3, 0.5, "ten launches of 5 us"),
    Share(("expert_time",), 0.5e-3, 0.7, "routing and waiting for counts"),
    Share(("expert_time",), 5e-3, 2.0, "launches for every expert, of which nothing is known", software="nemo-25.04"),
    Share(("unfused_share",), 1.0, 0.5, "counted: a read or a write of gate and up for every operation"),
)

Predict = Callable[[int, Hardware], float]  # the logarithm of predicted over measured speed, of a run by its number


class Fit(NamedTuple):
    """factors: of what the table has, for each of SHARES. deviations: the standard ones of their logarithms. slopes: of
    every run's error by each factor's logarithm."""

    factors: list[float]
    deviations: list[float]
    errors: list[float]
    slopes: torch.Tensor


def scaled(gpu: Hardware, factors: Sequence[float]) -> Hardware:
    """With these factors, of which a share is at most 1."""
    for share, factor in zip(SHARES, factors, strict=True):
        for field in share.fields if share.of(gpu) else ():
            value = getattr(gpu, field) * factor
            gpu = replace(gpu, **{field: min(1.0, value) if field.endswith("_share") else value})
    return gpu


def fit(gpus: Sequence[Hardware], predict: Predict) -> Fit:
    """To the runs on these GPUs, as the table has them."""
    table = torch.zeros(len(SHARES), dtype=torch.float64)
    errors, slopes = _linear(gpus, predict, table)
    rows, sides = _equations(gpus, table, errors, slopes, range(len(gpus)))
    factors = torch.linalg.lstsq(rows, sides).solution.squeeze(1).exp().tolist()
    deviations = torch.linalg.inv(rows.T @ rows).diagonal().sqrt().tolist()
    return Fit(factors, deviations, [predict(run, scaled(gpu, factors)) for run, gpu in enumerate(gpus)], slopes)


def without(found: Fit, gpus: Sequence[Hardware], left_out: Sequence[int]) -> list[float]:
    """The factors of a fit to the other runs: one more step from that to all of them."""
    logs = torch.tensor(found.factors, dtype=torch.float64).log()
    errors = torch.tensor(found.errors, dtype=torch.float64)
    others = [run for run in range(len(gpus)) if run not in left_out]
    rows, sides = _equations(gpus, logs, errors, found.slopes, others)
    return torch.linalg.lstsq(rows, sides).solution.squeeze(1).exp().tolist()


def _linear(gpus: Sequence[Hardware], predict: Predict, logs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The errors of all runs, and their slopes."""
    here = [predict(run, scaled(gpu, logs.exp().tolist())) for run, gpu in enumerate(gpus)]
    slopes = torch.zeros(len(gpus), len(SHARES), dtype=torch.float64)
    for column, share in enumerate(SHARES):
        moved = logs.clone()
        moved[column] -= _STEP
        for run, gpu in enumerate(gpus):
            if share.of(gpu):
                slopes[run, column] = (here[run] - predict(run, scaled(gpu, moved.exp().tolist()))) / _STEP
    return torch.tensor(here, dtype=torch.float64), slopes


def _equations(
    gpus: Sequence[Hardware], logs: torch.Tensor, errors: torch.Tensor, slopes: torch.Tensor, runs: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides of what the logarithms should fulfil, by these runs and by the anchors, where errors are linear."""
    rows = [slopes[run] / SCATTER for run in runs]
    sides = [(slopes[run] @ logs - errors[run]) / SCATTER for run in runs]
    for column, share in enumerate(SHARES):
        table = next((getattr(gpu, share.fields[0]) for gpu in gpus if share.of(gpu)), share.anchor)
        row = torch.zeros(len(SHARES), dtype=torch.float64)
        row[column] = 1 / share.width
        rows.append(row)
        sides.append(torch.tensor(math.log(share.anchor / table) / share.width, dtype=torch.float64))
    return torch.stack(rows), torch.stack(sides).unsqueeze(1)
