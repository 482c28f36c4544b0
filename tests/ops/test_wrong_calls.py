"""Wrong calls of the public API, a line for each check of ours: which error they raise, and what its message says."""

# ruff: noqa: F401  (the calls are text, which ruff does not read)

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from zbkern import WGradQueue, reporting, testing
from zbkern import functional as Z
from zbkern import nn as N
from zbkern.data_parallel import ShardedReduction
from zbkern.kernels.dispatch import UnavailableError
from zbkern.pipeline import (
    Action,
    Costs,
    LayerCosts,
    ModelCosts,
    Optimizer,
    Pipeline,
    PipelineError,
    PlannedBatches,
    PlanOptions,
    ProfileOptions,
    Schedule,
    ScheduleError,
    StepOptions,
    add_loss,
    checkpoint,
    draw,
    layout_to_partition,
    partition_to_layout,
    plan,
    profile,
    simulate,
)
from zbkern.pipeline import schedules as S
from zbkern.pipeline.transport.local import LocalTransport

INDICES = torch.tensor([[0, 3, 3], [2, 0, 6]])
TARGET = torch.tensor([1, 4, -100, 0, 4, 8, 2])
Q, X, V = torch.zeros(1, 2, 3, 4), torch.zeros(7, 5), torch.zeros(9, 5)
HEAD = Z.CrossEntropyOptions
FOLDER = "never"  # nothing may be written to it
C = Costs()
OFFLOADS, RECOMPUTES = (
    Schedule.build([[Action.parse(cell) for cell in row.split()]], [0], 1)
    for row in ("0F0 0O0 0L0 0BW0", "0F0 0R0 0B0 0W0")
)
mse = nn.functional.mse_loss


def t(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


def layer() -> nn.Module:
    return nn.Linear(2, 2)


def parameter() -> nn.Parameter:
    found = nn.Parameter(torch.ones(2))
    found.grad = torch.ones(2)
    return found


def experts() -> nn.Module:
    return N.Experts(4, 3, 2)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(layer().parameters(), 0.1)


def one() -> LocalTransport:
    return LocalTransport.ring(1)[0]


def pipe(modules: Any = None, schedule: Any = None, loss_fn: Any = mse, **options: Any) -> Pipeline:
    modules = [layer()] if modules is None else modules
    return Pipeline(modules, S.zb_h1(1, 2) if schedule is None else schedule, loss_fn, one(), **options)


def open_pipe(method: str, *arguments: Any) -> Any:
    with pipe() as opened:
        return operator.attrgetter(method)(opened)(*arguments)


def first_batch(dataset: Any, sequences: int = 1, **options: Any) -> Any:
    return next(iter(PlannedBatches(dataset, Costs(tokens=8), 2, sequences=sequences, **options)))


class Twice(zbkern.SeparableFunction):
    """Has nothing of what it needs."""


class Bad(zbkern.SeparableFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def dgrad(ctx: Any, dy: Tensor) -> Any:
        return (dy, dy), (dy,)


# fmt: off
CALLS: list[tuple[str, type[BaseException], str]] = [
    # queue and conversion
    ("zbkern.convert(layer(), impl='magic')", ValueError, "convert: impl must be one of ('auto', "),
    ("zbkern.nothing", AttributeError, "module 'zbkern' has no attribute 'nothing'"),
    ("Twice.apply(t(2), weights=[t(2)])", NotImplementedError, "SeparableFunction: a subclass needs forward(ctx"),
    ("Twice.apply(1, weights=[t(2)])", TypeError, "Twice.apply: the first input must be a torch.Tensor; got (1,)"),
    ("Twice.apply(weights=[])", TypeError, "Twice.apply: the first input must be a torch.Tensor; got ()"),
    ("Twice.apply(t(2), weights=t(2))", TypeError, "Twice.apply: weights must be a list of tensors or None; got"),
    ("Twice.apply(t(2), weights=[1])", TypeError, "Twice.apply: weights must be a list of tensors or None; got (1,)"),
    ("Bad.apply(t(2), weights=[nn.Parameter(t(2))]).sum().backward()", ValueError, "Bad.dgrad must return (gradients"),
    # functions
    ("Z.linear([1.0], t(4, 5))", TypeError, "linear: x must be a torch.Tensor; got list"),
    ("Z.linear(t(2, 3), t(4, 5))", ValueError, "weight must be [N, K] with K=3 like x [2, 3]; got [4, 5]"),
    ("Z.linear(t(), t(4, 5))", ValueError, "linear: x must be [..., K]; got []"),
    ("Z.linear(t(2, 5), t(4, 5), t(3))", ValueError, "linear: bias must be [N] with N=4 like weight [4, 5]; got [3]"),
    ("Z.linear(t(2, 5), t(4, 5), 1.0)", TypeError, "linear: bias must be a torch.Tensor; got float"),
    ("Z.linear(t(2, 5), t(4, 5), activation='tanh')", ValueError, "linear: activation must be one of (None, 'gelu'"),
    ("Z.linear(t(2, 5), t(4, 5).double())", TypeError, "linear: x is torch.float32 and a weight or bias"),
    ("Z.linear(t(2, 5), t(4, 5, device='meta'))", ValueError, "linear: weight is on meta and x on cpu; move one with"),
    ("Z.linear(t(2, 5), t(4, 5), impl='magic')", UnavailableError, "linear: impl='magic' cannot run on cpu: there is"),
    ("Z.linear(t(2, 5), t(4, 5), transposed=True)", ValueError, "linear: weight must be [K, N] with K=5 like x [2,"),
    ("Z.linear(t(2, 5, dtype=torch.cfloat), t(4, 5, dtype=torch.cfloat))", TypeError, "linear: x must be real"),
    ("Z.gated_mlp(t(2, 5), t(4, 5), t(3, 5), t(5, 4))", ValueError, "up must be [H, K] with H=4 like gate [4, 5], K=5"),
    ("Z.gated_mlp(t(2, 5), t(4, 5), t(4, 5), t(5, 3))", ValueError, "gated_mlp: down must be [N, H] with H=4 like gat"),
    ("Z.gated_mlp(t(2, 5), t(4, 5), t(4, 5), t(5, 4), activation='tanh')", ValueError, "gated_mlp: activation must be"),
    ("Z.gated_mlp(t(2, 5), t(4, 5), t(4, 5), t(5, 4), t(3))", ValueError, "gated_mlp: gate_bias must be [H] with H=4"),
    ("Z.gated_mlp(t(2, 5), t(4, 5), t(4, 5), t(5, 4), down_bias=t(3))", ValueError, "gated_mlp: down_bias must be [N]"),
    ("Z.grouped_linear(t(5, 4), t(1, 2, 4), [5.5])", TypeError, "grouped_linear: counts must be integers; got [5.5]"),
    ("Z.grouped_linear(t(5, 4), t(3, 2, 4), [2, 2, 2])", ValueError, "grouped_linear: counts must be 3 numbers >= 0"),
    ("Z.grouped_linear(t(5, 4), t(3, 2, 4), [-1, 3, 3])", ValueError, "grouped_linear: counts must be 3 numbers >= 0"),
    ("Z.grouped_linear(t(5, 4), t(2, 4), [5])", ValueError, "grouped_linear: weight must be [E, N, K] with K=4"),
    ("Z.grouped_linear(t(5, 4), t(1, 2, 4), [5], t(2))", ValueError, "bias must be [E, N] with E=1 like weight [1, 2,"),
    ("Z.grouped_linear(t(5, 4), t(1, 2, 4), [5], offsets=torch.tensor([5]))", ValueError, "pass one of them"),
    ("Z.grouped_linear(t(5, 4), t(1, 2, 4))", ValueError, "pass one of them"),
    ("Z.grouped_linear(t(5, 4), t(1, 2, 4), offsets=torch.tensor([6]))", ValueError, "offsets must be 1 numbers that"),
    ("Z.grouped_linear(t(5, 4), t(2, 2, 4), offsets=torch.tensor([3, 2]))", ValueError, "that rise from 0 or more"),
    ("Z.grouped_linear(t(5, 4), t(1, 2, 4), offsets=t(1))", TypeError, "grouped_linear: offsets must be integers"),
    ("Z.grouped_linear(t(5, 4), t(1, 2, 4), [5], transposed=True)", ValueError, "weight must be [E, K, N] with K=4"),
    ("Z.grouped_mlp(t(5, 4), t(1, 6, 4), t(1, 4, 2), [5])", ValueError, "as down has inputs; got 6 and 2"),
    ("Z.grouped_mlp(t(5, 4), t(1, 6, 4), t(1, 4, 3), [5], (t(6), None))", ValueError, "gate_up_bias must be [E, 2H]"),
    ("Z.grouped_mlp(t(5, 4), t(1, 6, 4), t(1, 4, 3), [5], (None, t(4)))", ValueError, "down_bias must be [E, N] with"),
    ("Z.grouped_mlp(t(5, 4), t(1, 6, 4), t(1, 4, 3), [5], gate=Z.GateOptions(None))", ValueError, "activation must"),
    ("Z.grouped_mlp(t(5, 4), t(1, 6, 4), t(1, 4, 3), [5], gate=Z.GateOptions(limit=0))", ValueError, "alpha and"),
    ("Z.embedding(t(3), t(7, 4))", TypeError, "embedding: indices must be [...] of integers, int64 or int32; got torc"),
    ("Z.embedding([0, 1], t(7, 4))", TypeError, "embedding: indices must be a torch.Tensor; got list"),
    ("Z.embedding(INDICES, t(7))", ValueError, "embedding: weight must be [V, K]; got [7]"),
    ("Z.embedding(INDICES, t(7, 4), 7)", ValueError, "embedding: padding_idx must be within the 7 rows; got 7"),
    ("Z.rms_norm(t(2, 5), t(4))", ValueError, "rms_norm: weight must be [K] with K=5 like x [2, 5]; got [4]"),
    ("Z.rms_norm(t(2, 5).int())", TypeError, "rms_norm: x must be [..., K] of a floating dtype; got torch.int32"),
    ("Z.layer_norm(t(2, 5), None, t(5))", ValueError, "layer_norm: bias without weight is not supported; pass weight"),
    ("Z.layer_norm(t(2, 5), t(5), t(4))", ValueError, "layer_norm: bias must be [K] with K=5 like x [2, 5]; got [4]"),
    ("Z.layer_norm(t(2, 5), residual=t(5))", ValueError, "layer_norm: residual must be [..., K] with K=5 like x"),
    ("Z.attention(t(2, 5), t(2, 5), t(2, 5))", ValueError, "attention: q must be [batch, tokens, heads, D]; got"),
    ("Z.attention(t(1, 2, 3, 4), t(1, 2, 2, 4), t(1, 2, 2, 4))", ValueError, "heads that divides q's; got 2 and 3"),
    ("Z.attention(t(1, 2, 3, 0), t(1, 2, 3, 0), t(1, 2, 3, 4))", ValueError, "attention: q and k must have a head"),
    ("Z.attention(Q, Q, Q, options=Z.AttentionOptions(window=2))", ValueError, "attention: window must be at"),
    ("Z.attention(t(5, 3, 4), t(5, 3, 4), t(5, 3, 4), cu_seqlens=[0, 3])", ValueError, "attention: cu_seqlens must ri"),
    ("Z.rotary(t(5, 4), t(5, 2), t(5, 2))", ValueError, "rotary: x must be [..., T, H, D]; got [5, 4]"),
    ("Z.rotary(t(5, 2, 4), t(4, 2), t(5, 2))", ValueError, "rotary: cos must be [T, R/2] with T=5 like x [5, 2, 4]"),
    ("Z.rotary(t(5, 2, 4), t(5, 2), t(5, 1))", ValueError, "sin must be [T, R/2] with T=5 like x [5, 2, 4], R/2=2"),
    ("Z.rotary(t(5, 2, 4), t(5, 2), t(5, 2).requires_grad_())", TypeError, "rotary: cos and sin must be numbers"),
    ("Z.linear_cross_entropy(t(7, 5), t(9, 5), TARGET, options=HEAD(softcap=0))", ValueError, "softcap more than 0"),
    ("Z.linear_cross_entropy(t(7, 5), t(9, 5), TARGET, options=HEAD(chunk=0))", ValueError, "linear_cross_entropy: la"),
    ("Z.grouped_linear(t(5, 4), t(1, 2, 4), [True])", TypeError, "grouped_linear: counts must be integers; got [True]"),
    ("Z.attention(t(1, 2, 3, 4), t(2, 2, 3, 4), t(2, 2, 3, 4))", ValueError, "attention: k must be [batch, keys,"),
    ("Z.attention(t(1, 2, 3, 4), t(1, 2, 3, 4), t(1, 2, 3, 4).double())", TypeError, "attention: q, k and v must have"),
    ("Z.rotary(t(5, 2, 4), t(5, 2).int(), t(5, 2))", TypeError, "rotary: cos must be [T, R/2] of a floating dtype; go"),
    ("Z.linear_cross_entropy(t(7, 5), t(9, 5), TARGET > 0)", TypeError, "linear_cross_entropy: target must be"),
    ("Z.linear_cross_entropy(t(7, 5), t(9, 4), TARGET)", ValueError, "linear_cross_entropy: weight must be [V, K]"),
    ("Z.linear_cross_entropy(t(7, 5), t(9, 5), TARGET, t(3))", ValueError, "linear_cross_entropy: bias must be [V]"),
    ("Z.attention(Q, Q, Q, True, Z.AttentionOptions(0))", ValueError, "attention: window must be at least 1 and needs"),
    ("Z.attention(Q.int(), Q.int(), Q.int())", TypeError, "attention: q, k and v must have one floating dtype; got"),
    ("Z.attention(Q, Q, Q, cu_seqlens_k=[0, 2])", ValueError, "attention: cu_seqlens_k needs cu_seqlens, the ends"),
    ("Z.linear_cross_entropy(X, V, TARGET, reduction='max')", ValueError, "reduction must be one of ('mean', 'sum', '"),
    ("Z.linear_cross_entropy(X, V, TARGET, options=HEAD(label_smoothing=2))", ValueError, "label_smoothing must be wi"),
    ("Z.linear_log_probs(X, V, TARGET, options=HEAD(z_loss=0.1))", ValueError, "z_loss must be 0; got 0.0 and 0.1"),
    ("Z.linear_log_probs(X, V, TARGET, options=HEAD(chunk=0))", ValueError, "linear_log_probs: label_smoothing must"),
    ("Z.linear_log_probs(t(7, 5), t(9, 4), TARGET)", ValueError, "linear_log_probs: weight must be [V, K]"),
    # modules
    ("Z.attention(Q, Q, Q, True, 2)", TypeError, "options must be a zbkern.functional.AttentionOptions; got 2"),
    ("Z.attention(Q, t(1, 2, 0, 4), t(1, 2, 0, 4))", ValueError, "a number of heads that divides q's; got 0 and 3"),
    ("Z.attention(Q, Q, Q, options=Z.AttentionOptions(softcap=0))", ValueError, "softcap must be a number above 0"),
    ("Z.attention(Q, Q, Q, sinks=t(4))", ValueError, "sinks must be [heads] with heads=3 like q [1, 2, 3, 4]; got [4]"),
    ("Z.attention(*[t(5, 3, 4)] * 3, cu_seqlens=torch.tensor([0, 6]))", ValueError, "must rise from 0 to at most 5 t"),
    ("Z.attention(*[t(5, 3, 4)] * 3, cu_seqlens=t(2))", ValueError, "int32 or int64; got torch.float32 [2]"),
    ("Z.attention(*[t(5, 3, 4)] * 3, cu_seqlens=torch.tensor([0, 5]), cu_seqlens_k=[0, 5])", TypeError, "a tensor on"),
    ("Z.attention(*[t(5, 3, 4)] * 3, cu_seqlens=[0, 5], cu_seqlens_k=[0, 2, 5])", ValueError, "as cu_seqlens; got 3 a"),
    ("Z.rotary(t(5, 2, 4), t(5, 3), t(5, 3))", ValueError, "rotary: cos must be [T, R/2] with R <= 4 like x; got [5,"),
    ("N.Attention(4, 3)", ValueError, "Attention: num_heads must divide dim when head_dim is None; got 3, 4"),
    ("N.Attention(4, 4, num_kv_heads=3)", ValueError, "Attention: num_heads must be a multiple of"),
    # experts over ranks
    ("N.ExpertParallel(experts(), top_k=0)", ValueError, "top_k must be"),
    ("N.ExpertParallel(experts(), group=3)", ValueError, "DeviceMesh of one dimension"),
    ("N.ExpertParallel(experts())(t(3, 4))", ValueError, "without a router"),
    ("N.ExpertParallel(experts())(t(3, 4), (t(2, 2).long(), t(2, 2)))", ValueError, "both [3, 'top_k']"),
    ("N.ExpertParallel(experts())(t(3, 4), (t(3, 2).long() + 9, t(3, 2)))", ValueError, "must choose experts 0 to"),
    ("N.ExpertParallel(experts())(t(3, 4), (t(3, 2).long() - 1, t(3, 2)))", ValueError, "each; got -1 to -1"),
    ("N.ExpertParallel(experts(), nn.Linear(4, 3))(t(3, 4))", ValueError, "router must give one score per expert"),
    ("N.ExpertParallel(experts(), nn.Linear(4, 2), top_k=9)(t(3, 4))", ValueError, "top_k be at most as many"),
    # testing
    ("testing.assert_close(t(2), t(3))", AssertionError, "value: shape [2], expected [3]"),
    ("testing.assert_close(t(2), torch.ones(2))", AssertionError, "value: differs by 1.000e+00 where the largest"),
    ("testing.assert_close(t(2).int(), t(2).int())", TypeError, "assert_close: torch.int32 has no tolerance of its ow"),
    ("reporting.markdown_table(('a', 'b', 'c'), [('x', 1)])", ValueError, "a row must have 3 cells"),
    ("testing.measure({'a': list}, rounds=0)", ValueError, "measure: rounds must be at least 1 and warmup at"),
    # schedules
    ("S.gpipe(0, 2)", ScheduleError, "gpipe: stages must be at least 1; got 0"),
    ("S.gpipe('a', 2)", TypeError, "gpipe: stages must be an int; got str 'a'"),
    ("S.one_f_one_b(2, 0)", ScheduleError, "one_f_one_b: microbatches must be at least 1; got 0"),
    ("S.zb_h1(2, 1.5)", TypeError, "zb_h1: microbatches must be an int; got float 1.5"),
    ("S.zb_h1(True, 2)", TypeError, "zb_h1: stages must be an int; got bool True"),
    ("S.interleaved(2, 4, chunks=0)", ScheduleError, "interleaved: chunks must be at least 1; got 0"),
    ("S.interleaved(2, 4, chunks='2')", TypeError, "interleaved: chunks must be an int; got str '2'"),
    ("Schedule.from_csv('nonsense')", ScheduleError, "from_csv: expected an action of torch.distributed.pipelining"),
    ("Schedule.build([[Action('F', 0, 0)]], [0], 1).validate()", ScheduleError, "Schedule custom: rank 0: 0B0 is"),
    ("Action.parse('nonsense')", ScheduleError, "Action.parse: expected chunk, kind and unit such as '0F3'"),
    # costs, simulation, drawing
    ("Costs(forward=-1)", ValueError, "Costs: forward must be from 0 to 1e+100, in whatever unit makes it so; got -1"),
    ("Costs(forward='1')", TypeError, "Costs: forward must be a number or one number per chunk; got str '1'"),
    ("Costs(forward=True)", TypeError, "Costs: forward must be a number or one number per chunk; got bool True"),
    ("Costs(forward=float('nan'))", ValueError, "Costs: forward must be from 0 to 1e+100"),
    ("Costs(forward=[1, 'a'])", TypeError, "Costs: forward[1] must be a number or one number per chunk; got str 'a'"),
    ("Costs(forward=[1, 2, 3]).per_chunk(2)", ValueError, "Costs: forward has 3 entries and the schedule 2 chunks"),
    ("Costs(split_overhead=9).per_chunk(2)", ValueError, "Costs: split_overhead of chunk 0 must be at most its"),
    ("Costs(merge_saving=9).per_chunk(2)", ValueError, "Costs: merge_saving of chunk 0 must be at most its weight, 1"),
    ("Costs().per_chunk('a')", TypeError, "Costs.per_chunk: chunks must be an int; got str 'a'"),
    ("Costs.from_json('nonsense')", ValueError, "Costs.from_json: expected JSON; got 'nonsense': Expecting value:"),
    ("Costs.from_json('3')", ValueError, 'Costs.from_json: expected an object such as {"forward": 1.0}; got '),
    ("simulate(S.zb_h1(2, 2), jitter=-1)", ValueError, "simulate: jitter must be at least 0; got -1"),
    ("simulate(S.zb_h1(2, 2), jitter='a')", TypeError, "simulate: jitter must be a number; got str 'a'"),
    ("simulate(S.zb_h1(2, 2), memory_limit='a')", ValueError, "simulate: memory_limit belongs to"),
    ("simulate(S.zb_h1(2, 2), fill='eager', memory_limit=-1)", ValueError, "simulate: memory_limit must be at least"),
    ("simulate(S.zb_h1(2, 2)).save('x.doc')", ValueError, "draw.save: path must end in .svg, .html or .json"),
    ("draw.save([], 'x.svg')", ValueError, "draw: timelines is empty; give at least one"),
    ("draw.save([simulate(S.zb_h1(2, 2))], 'x')", ValueError, "draw.save: path must end in .svg, .html or .json"),
    # costs of chunks and layers, slices, copies, layouts
    ("Costs(weight=[1, float('inf')])", ValueError, "weight[1] must be from 0 to"),
    ("Costs(communication=[1] * 4).per_chunk(4)", ValueError, "communication has 4 entries and the schedule 3 edges"),
    ("Costs.from_json('[' * 100_000)", ValueError, "expected JSON of at most a few levels"),
    ("Costs.from_json('{\"fwd\": 1}')", ValueError, "unknown fields"),
    ("Costs(1.0, 1.0, 1.0, attention_forward=2.0).per_chunk(1)", ValueError, "attention_forward of chunk 0 must be at"),
    ("Costs(carried=2.0).per_chunk(1)", ValueError, "carried of chunk 0 must be at most its activation"),
    ("Costs(tokens=0)", ValueError, "tokens must be those of a sequence"),
    ("Costs(offload_bandwidth=0)", ValueError, "must be above 0"),
    ("LayerCosts('block', -1, 1, 1)", ValueError, "layer 'block'"),
    ("ModelCosts([LayerCosts('a', 1, 1, 1)], latency=-1)", ValueError, "ModelCosts: latency must be from 0"),
    ("ModelCosts([LayerCosts('a', 1, 1, 1)], bandwidth=[1])", TypeError, "ModelCosts: bandwidth must be a number; got"),
    ("ModelCosts([LayerCosts('a', 1, 1, 1)], bandwidth=0)", ValueError, "bandwidth must be above 0"),
    ("ModelCosts.from_json('{\"layers\": [{\"name\": \"a\", \"forward\": 1}]}')", ValueError, "are missing"),
    ("ModelCosts.from_json('{\"layers\": [{\"speed\": 1}]}')", ValueError, "expected an object with some of"),
    ("simulate(S.zb_h1(2, 2), fill='lazy')", ValueError, "fill must be one of"),
    ("simulate(S.zb_h1(2, 2), fill='eager', memory_limit=[1, 2, 3])", ValueError, "one number or one per rank (2)"),
    ("simulate(OFFLOADS, Costs(offload_bandwidth=1))", ValueError, "offload_bandwidth and reload_bandwidth must be"),
    ("simulate(RECOMPUTES)", ValueError, "checkpoint must be given for a schedule that recomputes"),
    ("simulate(RECOMPUTES, Costs(checkpoint=0), fill='eager')", ValueError, 'fill="eager" moves W'),
    ("Schedule.build([[Action('F', 0, 0)]], [0], 1.0)", TypeError, "microbatches must be an int; got float"),
    ("S.zb_h1(2, 2, slices=[2, 0])", ScheduleError, "zb_h1: slices must be"),
    ("S.zb_h1(2, 2, slices=1.5)", TypeError, "zb_h1: slices must be"),
    ("partition_to_layout('Et', 'EttL')", TypeError, "first layer of every chunk"),
    ("layout_to_partition('tt', 'xy')", ValueError, "a letter of 'EtmL'"),
    # planner
    ("plan(C, 0, 2)", ValueError, "plan: stages must be at least 1; got 0"),
    ("plan(C, '2', 2)", TypeError, "plan: stages must be an int; got str '2'"),
    ("plan(C, 2, 2, chunks=0)", ValueError, "plan: chunks must be at least 1; got 0"),
    ("plan(Costs([1, 1, 1, 1]), 2, 2)", ValueError, "4 entries and the schedule 2 chunks; give one number, or 2, or p"),
    ("plan(C, 2, 2, placement=[0, 0])", ValueError, "plan: placement must name every rank below 2 1 times, once per"),
    ("plan(C, 2, 2, memory_limit=0.1)", ScheduleError, "plan: no schedule fits memory_limit=0.1 on rank 0: one"),
    ("plan(C, 2, 2, memory_limit='a')", TypeError, "plan: memory_limit must be one number or one per rank; got str"),
    ("plan(C, 2, 2, effort=-1)", ValueError, "plan: effort must be at least 0; got -1"),
    ("plan(C, 2, 2, effort='a')", TypeError, "plan: effort must be an int; got str 'a'"),
    # Pipeline
    ("pipe(modules=[layer(), layer()])", ValueError, "Pipeline: rank 0 holds chunks [0] of this schedule and needs 1"),
    ("pipe(schedule=S.zb_h1(2, 2))", ScheduleError, "Pipeline: the schedule has 2 ranks and the group 1; build"),
    ("pipe(loss_fn=None)", TypeError, "Pipeline: loss_fn must be callable on rank 0, which holds the last chunk; got"),
    ("pipe(fill='lazy')", ValueError, "Pipeline: fill must be one of ('planned', 'eager'); got 'lazy'"),
    ("StepOptions(max_wgrad_bytes=-1)", ValueError, "StepOptions: max_wgrad_bytes must be at least 0; got -1"),
    ("StepOptions(max_wgrad_bytes=True)", TypeError, "StepOptions: max_wgrad_bytes must be an int; got bool True"),
    ("pipe(tied={'w': 3})", TypeError, 'Pipeline: tied must be {name: parameter}, as in {"embedding": weight}; got'),
    ("pipe(tied={1: layer().weight})", TypeError, 'Pipeline: tied must be {name: parameter}, as in {"embedding":'),
    ("pipe(timeout=0)", ValueError, "Pipeline: timeout must be a number of seconds above 0 and at most 31536000 ("),
    ("pipe(timeout=float('nan'))", ValueError, "Pipeline: timeout must be a number of seconds above 0 and at most"),
    ("pipe(timeout=1e300)", ValueError, "Pipeline: timeout must be a number of seconds above 0 and at most 31536000 ("),
    ("pipe(modules=layer().forward)", TypeError, "Pipeline: modules must be a torch.nn.Module or several in model or"),
    ("pipe(modules=[torch.tanh])", TypeError, "Pipeline: modules must be a torch.nn.Module or several in model order"),
    ("pipe(schedule='zb_v')", TypeError, "Pipeline: schedule must be a Schedule, such as schedules.zb_v(stages, mic"),
    ("pipe(schedule=plan(C, 1, 2, effort=0))", TypeError, "Pipeline: schedule must be a Schedule, such as schedules."),
    ("pipe(schedule=RECOMPUTES, fill='eager')", ValueError, "with a schedule that offloads or recomputes (R, O, L)"),
    ("pipe(schedule=OFFLOADS, options=StepOptions(max_wgrad_bytes=5))", ValueError, "counted in its own order; got "),
    ("StepOptions(recompute='*norm*')", TypeError, "StepOptions: recompute must be a list of names of parts, such as"),
    ("add_loss((t(3),), t())", TypeError, "add_loss: activation must be a tensor of floating-point numbers; got tuple"),
    ("add_loss(t(3), 0.0)", TypeError, "add_loss: value must be a floating-point tensor with its graph; got float"),
    ("add_loss(t(3), t(3))", ValueError, "add_loss: value must be one number, such as .mean() gives; got shape [3]"),
    ("PlannedBatches([[1]], C, 2)", ValueError, "PlannedBatches: one of sequences and tokens must be at least 1; got"),
    ("PlannedBatches([[1]], C, 2, sequences=2, tokens=3)", ValueError, "PlannedBatches: one of sequences and tokens"),
    ("PlannedBatches([[1]], C, 2, sequences=2, replica=2, replicas=2)", ValueError, "replica must be from 0 to 1; go"),
    ("first_batch([[1, 2]], sequences=2, replicas=2)", ValueError, "a sequence for each of the 2 replicas; got 1"),
    ("first_batch([[]])", ValueError, "PlannedBatches: sequence 0 must be a list of at least one token, with labels a"),
    ("first_batch([[[1, 2]]])", ValueError, "PlannedBatches: sequence 0 must be a list of at least one token, with "),
    ("first_batch([[1.5, 2.0]])", ValueError, "PlannedBatches: sequence 0 must be a list of at least one token, wit"),
    ("first_batch([{'input_ids': [1, 2], 'labels': [1]}])", ValueError, "PlannedBatches: sequence 0 must be a list of"),
    ("open_pipe('attach', 3)", TypeError, "Pipeline.attach: optimizer must be a zbkern.pipeline.Optimizer; got int"),
    ("open_pipe('last.drift', 3)", TypeError, "in_seconds: costs must be a zbkern.pipeline.Costs in milliseconds, as"),
    ("open_pipe('step')", ValueError, "Pipeline.step: inputs must be given on this rank; got None"),
    ("open_pipe('step', t(4, 2))", ValueError, "Pipeline.step: targets must be given on this rank; got None"),
    ("open_pipe('step', t(3, 2), t(3, 2))", ValueError, "Pipeline.step: dimension 0 of inputs must be a multiple of"),
    ("open_pipe('step', t(4, 2), t(3, 2))", ValueError, "Pipeline.step: dimension 0 of targets must be a multiple of"),
    ("open_pipe('step', [t(2, 2)], t(4, 2))", ValueError, "Pipeline.step: inputs is a list of 1 microbatches and the"),
    ("open_pipe('step', HEAD(), t(4, 2))", TypeError, "register its class, torch.export.register_dataclass(CrossEntro"),
    ("open_pipe('step', 'a', t(4, 2))", TypeError, "Pipeline.step: inputs must hold tensors with a batch dimension"),
    ("open_pipe('step', t(), t(4, 2))", TypeError, "Pipeline.step: inputs must hold tensors with a batch dimension"),
    ("open_pipe('step', torch.nested.nested_tensor([t(2)] * 4), t(4, 2))", TypeError, "Pipeline.step: inputs must"),
    ("open_pipe('step', t(4, 3), t(4, 2))", PipelineError, "rank 0, action 0F0: RuntimeError: mat1 and mat2 shapes"),
    # Optimizer and norms
    ("Optimizer(3)", TypeError, "Optimizer: optimizer must be a torch.optim.Optimizer, not one within an Optimizer"),
    ("Optimizer(Optimizer(sgd(), pipe()), pipe())", TypeError, "Optimizer: optimizer must be a torch.optim.Optimizer"),
    ("Optimizer(sgd(), 3)", ValueError, "Pipeline: torch.distributed is not initialised; call"),
    ("Optimizer(sgd(), pipe(), max_norm=0)", ValueError, "Optimizer: max_norm must be above 0; got 0; pass math.inf t"),
    ("Optimizer(sgd(), pipe(), max_norm='1')", TypeError, "Optimizer: max_norm must be a number above 0; got '1'"),
    ("Optimizer(sgd(), pipe(), tied={'a': 3})", TypeError, "Optimizer: tied must be {name: parameter}, as in"),
    ("Optimizer(sgd(), pipe(), undo='x')", ValueError, "Optimizer: undo must be one of ('snapshot', 'inverse', None)"),
    ("Optimizer(sgd(), pipe()).load_state_dict({})", ValueError, "Optimizer.load_state_dict: state must be what"),
    # checkpoints
    ("checkpoint.save(FOLDER, -1, layer())", ValueError, "checkpoint: step must be at least 0; got -1"),
    ("checkpoint.save(FOLDER, '1', layer())", TypeError, "checkpoint: step must be an int; got str '1'"),
    ("checkpoint.save(FOLDER, 1, layer(), extra=lambda: 1)", TypeError, "checkpoint.save: extra must be a number, a"),
    ("checkpoint.save(FOLDER, 1, layer(), keep=0)", ValueError, "checkpoint: keep must be at least 1; got 0"),
    ("checkpoint.save(FOLDER, 1, layer(), keep='2')", TypeError, "checkpoint: keep must be an int; got str '2'"),
    ("checkpoint.save(FOLDER, 1, layer(), 3)", TypeError, "checkpoint: optimizer must be an Optimizer, a torch optimi"),
    ("checkpoint.load(FOLDER, layer(), 3)", TypeError, "checkpoint: optimizer must be an Optimizer, a torch optimizer"),
    ("checkpoint.save(FOLDER, 1, layer(), rename=lambda *_: 3)", TypeError, "checkpoint: rename must return a string"),
    ("checkpoint.load(FOLDER, layer(), step=3)", ValueError, "checkpoint.load: never has no checkpoint of step 3"),
    ("checkpoint.load(FOLDER, layer(), step='a')", TypeError, "checkpoint: step must be an int; got str 'a'"),
    # profile, FSDP2
    ("profile([layer()], [0, 0], mse, t(8,2), t(8,2), group=one())", ValueError, "Pipeline: rank 0 holds chunks [0"),
    ("profile([layer()], [0], mse, t(8,2), t(8,2), group=one(), microbatches=0)", ValueError, "profile: microbatches"),
    ("ProfileOptions(repeats='a')", TypeError, "ProfileOptions: repeats must be an int; got str 'a'"),
    ("ProfileOptions(repeats=0)", ValueError, "ProfileOptions: repeats must be at least 1; got 0"),
    ("profile([layer()], [0], None, t(8,2), t(8,2), group=one())", TypeError, "Pipeline: loss_fn must be callable on"),
    ("ShardedReduction(layer(), WGradQueue())", TypeError, "ShardedReduction: model must have been through"),
    # costs, schedules, plans and pictures
    ("Costs(10**400)", ValueError, "Costs: forward must be from 0 to 1e+100, in whatever unit makes it so; got inf"),
    ("Costs().per_chunk(0)", ValueError, "Costs.per_chunk: chunks must be at least 1; got 0"),
    ("Costs(time_unit='minutes')", ValueError, "Costs: time_unit must be 's' or 'ms' or 'us', or None; got 'minutes'"),
    ("Costs(memory_unit=1)", ValueError, "Costs: memory_unit must be 'bytes', or None; got 1"),
    ("S.zb_h1(2, 2).chunks_of(5)", ScheduleError, "Schedule zb_h1: chunks_of: rank must be from 0 to 1; got 5"),
    ("PlanOptions(seed='a')", TypeError, "PlanOptions: seed must be an int; got str 'a'"),
    ("PlanOptions(seed=-1)", ValueError, "PlanOptions: seed must be at least 0; got -1"),
    ("draw.save('a', 'x.svg')", TypeError, "draw: timelines must be a list of Timelines, such as [simulate(schedule)]"),
    ("draw.save([simulate(S.zb_h1(2, 2))], 'x.svg', costs=C)", TypeError, "draw: costs must be a list with the Costs"),
    ("draw.save('a', 'x.json')", TypeError, "draw: timelines must be a list of Timelines, such as [simulate("),
    ("draw.save([], 'x.json')", ValueError, "draw: timelines is empty; give at least one"),
]
# fmt: on


@pytest.mark.parametrize(("call", "error", "words"), CALLS, ids=[call for call, _, _ in CALLS])
def test_a_wrong_call_says_what_is_wrong(call: str, error: type[BaseException], words: str) -> None:
    with pytest.raises(error) as raised:
        eval(call)
    assert words in str(raised.value)
    assert not Path(FOLDER).exists()
