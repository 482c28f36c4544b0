"""How a model is trained: parallelism beside the pipeline's, and the size of a microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from zbkern.planning.costs.chunks import checked_number
from zbkern.schedules.actions import check_count


@dataclass(frozen=True)
class Job:
    """How a model is trained: parallelism beside the pipeline's, and the size of a microbatch.

    tensor_parallel: GPUs that share every layer. expert_parallel: GPUs among which the experts are, whole; with 1 every
    expert is split as other layers are. context_parallel: GPUs that share the tokens of every sequence, and send keys
    and values around. data_parallel: pipelines beside each other, which share the optimizer's state with those; 0 for
    as few as have room for the experts. fully_shard: they share weights and gradients, too (FSDP2, ZeRO-3), gathered
    for every F and B and reduced after every W: of pipelines of one stage. fp8: products of F and B are in FP8, W in
    bf16 (`recipe="fp8_blockwise"`). halves: chunks may begin inside blocks. overlap: passes may run beside each other
    while the all-to-alls of experts are in flight (`Schedule.beside`).
    sequence: tokens of a sequence; microbatch_size: sequences of a microbatch. weight_bytes, optimizer_bytes: of every
    parameter, its weight with its gradient, and what of it the pipelines share: 6 and 12 for bf16 weights with fp32
    gradients, two moments and an fp32 master; 8 and 8 for AdamW in fp32, 6 and 6 with moments of 8 bits, 12 more for an
    optimizer that can be undone by a snapshot. Raises TypeError or ValueError.
    """

    sequence: int = 4096
    microbatch_size: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    data_parallel: int = 0
    context_parallel: int = 1
    fp8: bool = False
    fully_shard: bool = False
    halves: bool = False
    overlap: bool = False
    weight_bytes: float = 6.0
    optimizer_bytes: float = 12.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith("_bytes"):
                checked_number("Job", name, value)
            elif name not in ("fp8", "fully_shard", "halves", "overlap"):
                check_count(f"Job: {name}", value, int(name != "data_parallel"))
        if self.tensor_parallel * self.replicas % self.expert_parallel:
            raise ValueError(
                f"Job: tensor_parallel * data_parallel must be a multiple of expert_parallel, whose GPUs they are; got "
                f"{self.tensor_parallel} * {self.replicas} and {self.expert_parallel}"
            )
        if self.sequence % self.context_parallel:
            raise ValueError(
                f"Job: context_parallel must divide the sequence of {self.sequence} tokens; got {self.context_parallel}"
            )

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.sequence * self.microbatch_size

    @property
    def rows(self) -> float:
        """Of a microbatch, those of the GPUs that share a layer."""
        return self.tokens / self.context_parallel

    @property
    def pipelines(self) -> int:
        """Beside each other."""
        shared = self.tensor_parallel * self.context_parallel
        return self.data_parallel or self.expert_parallel // gcd(self.expert_parallel, shared)

    @property
    def replicas(self) -> int:
        """GPUs that have the same weights, and share their optimizer's state."""
        return self.pipelines * self.context_parallel

    def gpus(self, stages: int) -> int:
        """Of all pipelines."""
        return stages * self.tensor_parallel * self.replicas
