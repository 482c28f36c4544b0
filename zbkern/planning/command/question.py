"""What `zbkern plan` is asked, as data: whoever asks, and not how it was spelt on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from zbkern.planning.cost_model.architecture import Architecture
from zbkern.planning.cost_model.hardware import Hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.costs.chunks import ChunkCosts, Costs, checked_speeds
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.planner.plan import EFFORT
from zbkern.planning.planner.request import PlanOptions, PlanRequest, Slices
from zbkern.planning.simulation import comparison
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import TIME_UNITS

SIZES = tuple(field.name for field in fields(Job))
"""What says how a model is trained: arguments of a `Job`, and options."""

BYTES = ("weight_bytes", "optimizer_bytes")
"""Those that every layout of a search has in common."""

LAYOUT_EFFORT = 2
"""Rounds of search for each of the best few layouts."""


class WrongArgument(ValueError):
    """Names the option of `zbkern plan`, and what to do about it."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument}: {message}")


def option(name: str) -> str:
    """The option that gives what has this name."""
    return "--" + name.replace("_", "-")


def spelt(sizes: Mapping[str, int]) -> list[str]:
    """The options that give these, without those that are not so."""
    return [
        option(name) if value is True else f"{option(name)} {value}"
        for name, value in sizes.items()
        if value is not False
    ]


class Measured(NamedTuple):
    """Costs as they are given, where a `Setting` computes them: of a model and a machine that are not known."""

    costs: Costs | ModelCosts = Costs()
    limit: float | None = None

    def tokens(self, microbatches: int) -> int:
        """Of a step; 0 where that is not known."""
        return 0

    def beside(self, stages: int) -> float:
        """Seconds of a step that no pass has."""
        return 0.0


@dataclass(frozen=True)
class Question:
    """Which schedule is best for so many stages and microbatches, in what memory, and for which costs.

    setting: where the costs come from, and what else is known of the model; name: of the model. chunks, placement,
    recompute, slices, speeds, effort: as for `plan`. schedule: a published one, and no search. memory: the most that a
    rank may hold, and whether that counts what one microbatch holds in the whole model; None for what the setting has.
    offload: GB/s, or memory per time of costs without units; 0 for what the costs have, None for none. compare: with
    published schedules.
    """

    stages: int
    microbatches: int
    setting: Measured | Setting = Measured()  # noqa: RUF009  # it is frozen
    name: str = ""
    chunks: int | None = None
    placement: str | tuple[int, ...] | None = None
    schedule: str | None = None
    slices: Slices = 1
    memory: tuple[float, bool] | None = None
    offload: float | None = None
    recompute: bool = False
    speeds: tuple[float, ...] | None = None
    effort: int = EFFORT
    compare: bool = False

    @cached_property
    def request(self) -> PlanRequest:
        """What a planner is asked, but for the limit, which may be relative to the costs. Raises ValueError for sizes
        that do not go together."""
        costs, rate = self.setting.costs, self.offload
        if self.speeds is not None:
            costs = replace(costs, speeds=checked_speeds("plan", self.speeds, self.stages))
        if rate:
            if costs.memory_unit == "bytes" and costs.time_unit is not None:
                rate *= 1e9 / TIME_UNITS[costs.time_unit]
            costs = replace(costs, offload_bandwidth=rate, reload_bandwidth=rate)
        return PlanRequest(
            costs=costs,
            stages=self.stages,
            microbatches=self.microbatches,
            chunks=self.chunks,
            placement=self.placement,
            memory_limit=None,
            effort=self.effort,
            offload=self.offload is not None,
            recompute=self.recompute,
            slices=self.slices,
            options=PlanOptions(),
            schedule=self.schedule,
        )

    @property
    def costs(self) -> Costs | ModelCosts:
        """As the ranks compute and copy. Raises ValueError where the setting has sizes that do not go together."""
        return self.request.costs

    @cached_property
    def parts(self) -> ChunkCosts | ModelCosts:
        """The costs of every layer, or of every chunk. Raises ValueError where they are of another number of chunks."""
        if isinstance(self.costs, ModelCosts):
            return self.costs
        if self.schedule is not None:
            return self.costs.per_chunk(len(self.named.placement))
        return self.costs.per_chunk(self.stages * self.request.chunks_per_rank)

    @cached_property
    def named(self) -> Schedule:
        """The published schedule that is asked for."""
        assert self.schedule is not None
        assert not isinstance(self.slices, str)
        return comparison.build(self.schedule, self.stages, self.microbatches, self.chunks, self.slices)

    @property
    def saves_memory(self) -> bool:
        """Whether the plan may offload or recompute."""
        return self.recompute or self.offload is not None

    @property
    def measure(self) -> float:
        """What one microbatch holds in the whole model; 0 where memory has model states in it."""
        return 0.0 if self._sum("static") else self._sum("activation")

    def _sum(self, name: str) -> float:
        if isinstance(self.parts, ModelCosts):
            return sum(getattr(layer, name) for layer in self.parts.layers)
        return sum(getattr(self.parts, name))

    @property
    def limit(self) -> float | None:
        """What a rank may hold, in the unit of the costs."""
        if self.memory is None:
            return self.setting.limit
        value, relative = self.memory
        return value * self._sum("activation") if relative else value

    @cached_property
    def beside(self) -> float:
        """Seconds of a step that no pass has. Raises ValueError as `Setting.beside`."""
        return self.setting.beside(self.stages)

    @property
    def tokens(self) -> int:
        """Of a step; 0 where that is not known."""
        return self.setting.tokens(self.microbatches)

    def speed(self, seconds: float) -> tuple[float, float]:
        """Tokens per second on each GPU in steps that take so long, and the share of its peak flops, in bf16."""
        assert isinstance(self.setting, Setting)
        model, gpu, job = self.setting
        rate = self.tokens / seconds / job.gpus(self.stages)
        return rate, rate * model.flops(job.sequence) / gpu.matmul_flops


class LayoutQuestion(NamedTuple):
    """How to train a model on so many GPUs with `batch` sequences per step.

    halves: stages may begin inside blocks. overlap: passes may run beside each other, as in `Job`. own: sizes of a
    layout to compare with. effort: as for `plan`, for the best few layouts.
    """

    architecture: Architecture
    hardware: Hardware
    gpus: int
    batch: int
    sequence: int = Job.sequence
    fp8: bool = False
    halves: bool = False
    overlap: bool = False
    own: Mapping[str, int] = {}
    effort: int = LAYOUT_EFFORT
    weight_bytes: float = Job.weight_bytes
    optimizer_bytes: float = Job.optimizer_bytes
