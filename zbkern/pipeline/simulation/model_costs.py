"""Costs of a model on a GPU, from flops and bytes alone: for planning before there is a machine to measure on.

A model, and no measurement. It assumes:
- a matrix product takes as long as its flops or its bytes, whichever is longer, at the shares of the peaks that
  `Hardware` names, a small one longer; attention, at shares of its own, computes what its mask leaves; other
  operations take their bytes; every layer and every pass takes some time of its own;
- bf16, and zbkern's own layers: B and W apart cost nothing, the gated MLP and FlashAttention recompute what they can,
  logits never exist as a whole, W accumulates in fp32 in place, and nothing else is recomputed or offloaded;
- what is between the layers of tensor parallelism is split among its GPUs, too (sequence parallelism); of its messages
  and those of experts `Hardware.exposed_share` takes time; every expert gets as many tokens as the others, and a
  token is sent once to every GPU that has some of its experts (`zbkern.nn.ExpertParallel` sends it once per expert);
- of a sequence in slices keys and values of all heads stay, also where their layer has a window or makes them from
  small vectors, as caches of the transformers library have them;
- 18 bytes per parameter: bf16 weight, fp32 gradient, and 12 of AdamW, which data-parallel ranks share.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from math import gcd

from zbkern.pipeline.simulation.architecture import Architecture, Attention, Block, Experts, LatentAttention
from zbkern.pipeline.simulation.costs import COPY_SIZE
from zbkern.pipeline.simulation.expert_traffic import reached
from zbkern.pipeline.simulation.hardware import Hardware
from zbkern.pipeline.simulation.layers import LayerCosts, ModelCosts

_WIDTH = 2  # bytes of a bf16 number
_WIDE = 4  # of an fp32 number: statistics, gradients
_MS = 1e3
_SOME = 1 / 8  # of a sequence: from what so many rows take follows what does not shrink with them
_REDUCED = 2  # of a gradient that travels between pipelines
_STEP = 30  # bytes that AdamW reads and writes per parameter: gradient, both moments, fp32 weight, and the bf16 one
_OPTIMIZER = 12  # bytes per parameter: two moments and the fp32 weight


@dataclass(frozen=True)
class Job:
    """How a model is trained: parallelism beside the pipeline's, and the size of a microbatch.

    tensor_parallel: GPUs that share every layer. expert_parallel: GPUs among which the experts are, whole; with 1 every
    expert is split as other layers are. data_parallel: pipelines beside each other, which share the optimizer's state.
    0 for as few as have room for the experts. sequence: tokens of a sequence; microbatch: sequences of a
    microbatch. Raises TypeError or ValueError.
    """

    sequence: int
    microbatch: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    data_parallel: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Job: {name} must be an int; got {value!r}")
            if value < (name != "data_parallel"):
                raise ValueError(f"Job: {name} must be at least 1; got {value}")
        if not self.data_parallel:
            least = self.expert_parallel // gcd(self.expert_parallel, self.tensor_parallel)
            object.__setattr__(self, "data_parallel", least)
        if self.tensor_parallel * self.data_parallel % self.expert_parallel:
            raise ValueError(
                f"Job: tensor_parallel * data_parallel must be a multiple of expert_parallel, whose GPUs they are; got "
                f"{self.tensor_parallel} * {self.data_parallel} and {self.expert_parallel}"
            )

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.sequence * self.microbatch


def model_costs(architecture: Architecture, hardware: Hardware, job: Job) -> ModelCosts:
    """Costs of every layer for one GPU, in ms and bytes: embedding, blocks, norm with head and loss, then predictors.

    Their names are those that `cut` counts; norm and head are one, named as the norm, and predictors, which the
    transformers library does not build, are named as in DeepSeek's checkpoints.

    See the module for what is assumed. Raises ValueError where heads, experts or features cannot be divided so.
    """
    layers = tuple(layer.costs() for layer in _layers(architecture, hardware, job))
    bandwidth = hardware.network_bandwidth * hardware.network_share / _MS
    copies = None if hardware.host_bandwidth is None else hardware.host_bandwidth * hardware.network_share / _MS
    computed = ModelCosts(
        layers,
        hardware.latency * _MS,
        bandwidth,
        "ms",
        "bytes",
        copies,
        copies,
        copy_size=COPY_SIZE,
        pass_overhead=hardware.pass_time * _MS,
        tokens=job.sequence,
    )
    return hardware.calibration.applied(computed) if hardware.calibration.source else computed


def outside(architecture: Architecture, hardware: Hardware, job: Job, stages: int) -> float:
    """Seconds of a step that no pass has, on a rank with its share of the layers: what is not hidden of the traffic
    between pipelines, weights gathered and gradients reduced behind one microbatch's passes, and the optimizer's step.
    """
    layers = _layers(architecture, hardware, job)
    behind = hardware.overlap_share * sum(layer.forward + layer.backward + layer.weight for layer in layers)
    traffic, step = (sum(each) for each in zip(*((layer.reduced, layer.stepped) for layer in layers), strict=True))
    return hardware.calibration.rest * (max(0.0, traffic - behind) + step) / stages


def _layers(architecture: Architecture, hardware: Hardware, job: Job) -> list[_Layer]:
    """In model order."""
    _check(architecture, job)
    equal = {block: _block("", block, architecture, hardware, job) for block in set(architecture.blocks)}
    found = [_embedding(architecture, hardware, job)]
    for number, block in enumerate(architecture.blocks):
        found.append(copy(equal[block]))
        found[-1].name = f"model.layers.{number}"
    found.append(_head("model.norm", architecture, hardware, job))
    for name in predictors(architecture):
        found.append(_block(name, architecture.blocks[-1], architecture, hardware, job, joined=True))
        found.append(_head(f"{name}.shared_head", architecture, hardware, job))
    return found


def predictors(architecture: Architecture) -> list[str]:
    """The names of the layers that predict further tokens."""
    blocks = len(architecture.blocks)
    return [f"model.layers.{number}" for number in range(blocks, blocks + architecture.predictors)]


def parameters(architecture: Architecture) -> tuple[int, int]:
    """All parameters of a model without its predictors, and those that a token is computed with."""
    table = architecture.vocabulary * architecture.features
    total = active = table * (1 if architecture.tied else 2)
    for block in architecture.blocks:
        attention = sum(a * b for a, b in _projections(block.attention, architecture.features))
        if isinstance(block.mlp, int):
            found = used = (2 + block.gated) * architecture.features * block.mlp
        else:
            experts, each = block.mlp, 3 * architecture.features * block.mlp.hidden
            common = 3 * architecture.features * experts.shared + architecture.features * experts.count
            found, used = experts.count * each + common, experts.chosen * each + common
        total, active = total + attention + found, active + attention + used
    return total, active


def flops(architecture: Architecture, sequence: int) -> float:
    """Of a training step per token: forward and twice that backward, attention as its mask leaves it, nothing twice."""
    _, active = parameters(architecture)
    core = sum(_core_flops(block.attention, sequence) for block in architecture.blocks)
    lookup = 0 if architecture.tied else architecture.vocabulary * architecture.features
    return 3 * (2 * (active - lookup) + core)


class _Layer:
    """Adds up the operations of one layer for one microbatch on one GPU: seconds, and bytes."""

    def __init__(self, name: str, features: int, hardware: Hardware, job: Job, tied: str | None = None) -> None:
        self.name, self.features, self.tied = name, features, tied
        self.hardware, self.job = hardware, job
        self.forward = self.backward = self.weight = self.saving = 0.0
        self.reduced = self.stepped = 0.0
        self.activation = self.held = self.static = 0.0
        self.attention_forward = self.attention_backward = self.overhead = self.carried = 0.0
        self.window = 1.0

    def linear(self, rows: float, inputs: float, outputs: float, matrices: float = 1, replicas: float = 0) -> None:
        """Products of so many rows in all with `matrices` weights [outputs, inputs], which this GPU has."""
        share = self.hardware.matmul_share * (1.0 if matrices == 1 else self.hardware.expert_share)
        size = matrices * inputs * outputs

        def times(rows: float) -> tuple[float, float, float]:
            """Of F or B, of W, and of a W that is merged, which reads and writes the gradient once with others."""
            edges = self.hardware.matmul_ramp * (matrices / rows + 1 / inputs + 1 / outputs)
            product = (1 + edges) * 2 * rows * inputs * outputs / (self.hardware.matmul_flops * share)
            moved = _WIDTH * rows * (inputs + outputs)
            return tuple(max(product, self.seconds(moved + more)) for more in (_WIDTH * size, 2 * _WIDE * size, 0))  # type: ignore[return-value]

        (through, alone, merged), some = times(rows), times(_SOME * rows)
        self.forward += through
        self.backward += through
        self.weight += alone
        self.saving += alone - merged
        fixed = [(part - _SOME * whole) / (1 - _SOME) for part, whole in zip(some, (through, alone), strict=False)]
        self.overhead += (2 * fixed[0] + fixed[1]) / 3
        self.weights(size, replicas)

    def attention(self, flops: float, window: int | None) -> None:
        """The core: two products forward, five backward, no weights; of short sequences less than its share.

        What short ones take longer is some keys more for every query, which is no part of the context.
        """
        gpu = self.hardware
        self.attention_forward += flops / (gpu.matmul_flops * gpu.attention_forward_share)
        self.attention_backward += 2.5 * flops / (gpu.matmul_flops * gpu.attention_backward_share)
        self.forward += (1 + gpu.attention_ramp / self.job.sequence) * self.attention_forward
        self.backward += (1 + gpu.attention_ramp / self.job.sequence) * self.attention_backward
        self.window = 1.0 if window is None else min(1.0, window / self.job.sequence)

    def carry(self, rows: float, numbers: float) -> None:
        """So many numbers per row stay for later slices of the sequence."""
        self.carried += _WIDTH * rows * numbers

    def elementwise(self, rows: float, forward: float, backward: float) -> None:
        """So many numbers read or written per row."""
        self.forward += self.seconds(_WIDTH * rows * forward)
        self.backward += self.seconds(_WIDTH * rows * backward)

    def keep(self, rows: float, activation: float, held: float) -> None:
        """So many numbers per row, from F to B and from B to W."""
        self.activation += _WIDTH * rows * activation
        self.held += _WIDTH * rows * held

    def weights(self, count: float, replicas: float = 0) -> None:
        """Parameters on this GPU, whose optimizer state so many replicas share; 0 for all pipelines."""
        copies = replicas or self.job.data_parallel
        self.static += count * (_WIDTH + _WIDE + _OPTIMIZER / copies)
        self.stepped += self.seconds(_STEP * count / copies)
        if copies > 1:
            gpu = self.hardware
            near = max(1.0, gpu.gpus_per_node / (self.job.expert_parallel if replicas else self.job.tensor_parallel))
            bandwidth = gpu.link_bandwidth if copies <= near else min(near * gpu.network_bandwidth, gpu.link_bandwidth)
            moved = count * (_WIDTH + _REDUCED) * (copies - 1) / copies
            self.reduced += moved / (bandwidth * gpu.network_share)

    def launches(self, seconds: float) -> None:
        """What each of F, B and W takes however few tokens there are."""
        self.forward += seconds
        self.backward += seconds
        self.weight += seconds
        self.overhead += seconds

    def gather_and_scatter(self, features: int) -> None:
        """Tensor parallelism around attention or an MLP: an all-gather and a reduce-scatter, forward and backward."""
        ranks = self.job.tensor_parallel
        if ranks > 1:
            inside = ranks <= self.hardware.gpus_per_node
            bandwidth = self.hardware.link_bandwidth if inside else self.hardware.network_bandwidth
            self._message(2 * _WIDTH * self.job.tokens * features * (ranks - 1) / ranks / bandwidth)

    def dispatch_and_combine(self, tokens: float, experts: Experts, features: int) -> None:
        """Expert parallelism: tokens go to the GPUs of their experts and return, forward and backward.

        A token travels once to every node that has some of its experts, to the GPU with its own GPU's place there, and
        is handed on to every GPU there that has some while the next ones travel (arXiv 2412.19437, section 3.2.2). What
        goes to its own node or GPU takes no time.
        """
        ranks, size = self.job.expert_parallel, _WIDTH * tokens * features
        inside, here = int(min(ranks, self.hardware.gpus_per_node)), experts.count // ranks
        gpus = sum(reached(experts, (here,) * ranks))
        places = [here * min(inside, ranks - first) for first in range(0, ranks, inside)]
        nodes = sum(
            share * (1 - place / experts.count)
            for share, place in zip(reached(experts, tuple(places)), places, strict=True)
        )
        time = max(
            nodes * size / self.hardware.network_bandwidth,
            gpus * size * (inside - 1) / inside / self.hardware.link_bandwidth,
        )
        self._message(2 * time)

    def seconds(self, moved: float) -> float:
        """For so many bytes of this GPU's memory."""
        return moved / (self.hardware.memory_bandwidth * self.hardware.memory_share)

    def costs(self) -> LayerCosts:
        output = _WIDTH * self.job.tokens * self.features / self.job.tensor_parallel
        same = ("forward", "backward", "weight", "attention_forward", "attention_backward", "overhead")
        times = {name: _MS * getattr(self, name) for name in same}
        memory = {name: getattr(self, name) for name in ("activation", "held", "static", "carried")}
        saving = _MS * self.saving
        return LayerCosts(
            self.name, **times, **memory, merge_saving=saving, output=output, window=self.window, tied=self.tied
        )

    def _message(self, time: float) -> None:
        """Two messages that take so long together at the peak bandwidth, forward and again backward."""
        exposed = (time / self.hardware.network_share + 2 * self.hardware.latency) * self.hardware.exposed_share
        self.forward += exposed
        self.backward += exposed


def _embedding(architecture: Architecture, hardware: Hardware, job: Job) -> _Layer:
    features, ranks = architecture.features, job.tensor_parallel
    layer = _Layer("model.embed_tokens", features, hardware, job, "embedding" if architecture.tied else None)
    rows = job.tokens / ranks
    layer.elementwise(rows, 2 * features, 0)
    layer.weight += layer.seconds(rows * features * (_WIDTH + 2 * _WIDE))  # its whole backward is W
    layer.keep(rows, 0, features)
    layer.weights(architecture.vocabulary * features / ranks)
    return layer


def _head(name: str, architecture: Architecture, hardware: Hardware, job: Job) -> _Layer:
    """The last norm, and the head with its loss: F computes the logits and the input's gradient, W the logits again."""
    features, ranks = architecture.features, job.tensor_parallel
    layer = _Layer(name, features, hardware, job, "embedding" if architecture.tied else "head")
    layer.elementwise(job.tokens / ranks, 2 * features, 4 * features)
    layer.linear(job.tokens, features, architecture.vocabulary / ranks)
    twice = layer.backward - layer.seconds(_WIDTH * job.tokens / ranks * 4 * features)
    layer.forward, layer.backward, layer.weight = layer.forward + twice, layer.backward - twice, layer.weight + twice
    layer.gather_and_scatter(features)
    layer.keep(job.tokens / ranks, 3 * features, features)  # input, its norm, and its gradient
    return layer


def _block(
    name: str, block: Block, architecture: Architecture, hardware: Hardware, job: Job, joined: bool = False
) -> _Layer:
    """joined: with the product in front that joins a predictor's two inputs."""
    features, ranks = architecture.features, job.tensor_parallel
    layer = _Layer(name, features, hardware, job)
    layer.launches(hardware.layer_time + (hardware.expert_time if isinstance(block.mlp, Experts) else 0.0))
    rows = job.tokens / ranks  # outside of the layers that are split
    layer.elementwise(rows, block.norms * 2 * features + 2 * features, block.norms * 4 * features)
    layer.keep(rows, block.norms * features, 0)  # the inputs of the norms
    if joined:
        layer.linear(rows, 2 * features, features)
        layer.keep(rows, 2 * features, 3 * features)
    _add_attention(layer, block.attention, features)
    if isinstance(block.mlp, int):
        _add_mlp(layer, block.mlp, features, block.gated)
    else:
        _add_experts(layer, block.mlp, features)
    return layer


def _add_attention(layer: _Layer, attention: Attention | LatentAttention, features: int) -> None:
    job, ranks = layer.job, layer.job.tensor_parallel
    if isinstance(attention, Attention):  # every GPU needs one head of keys at least
        attention = replace(attention, key_heads=max(attention.key_heads, ranks))
    rows = job.tokens / ranks
    layer.gather_and_scatter(features)
    window = attention.window if isinstance(attention, Attention) else None
    layer.attention(job.tokens * _core_flops(attention, job.sequence) / ranks, window)
    *inner, last = _projections(attention, features)
    whole = _shared_projections(attention)
    for index, (inputs, outputs) in enumerate(inner):
        if index in whole:  # small: every GPU computes its tokens, with all of the weight
            layer.linear(rows, inputs, outputs)
        else:
            layer.linear(job.tokens, inputs, outputs / ranks)
    layer.linear(job.tokens, last[0] / ranks, last[1])
    held = sum(inputs + outputs for inputs, outputs in [*inner, last])
    if isinstance(attention, Attention):
        queries, keys = attention.heads * attention.head_size, attention.key_heads * attention.head_size
        # the input; q, k and v before rotary, which v keeps alive; q and k after it; the core's output
        activation = features + (queries + 2 * keys) + (queries + keys) + queries
        layer.carry(rows, 2 * keys)
        layer.elementwise(rows, 2 * (queries + keys), 2 * (queries + keys))
    else:
        size = attention.heads * (attention.content_size + attention.rotary_size)
        held -= features  # the input of two products
        small = attention.query_rank + attention.key_rank
        content = attention.heads * (attention.content_size + attention.value_size)
        # the input; both small vectors before and after their norms; q and k with positions; values, core's output
        activation = features + 2 * small + attention.rotary_size + 2 * size + content
        activation += attention.heads * attention.value_size
        layer.carry(rows, size + attention.heads * attention.value_size)
        layer.elementwise(rows, 4 * size + 2 * small, 4 * size + 4 * small)
    layer.keep(rows, activation + attention.heads * _WIDE / _WIDTH, held)


def _add_mlp(layer: _Layer, hidden: int, features: int, gated: bool = True) -> None:
    job, ranks, inner = layer.job, layer.job.tensor_parallel, (1 + gated) * hidden
    layer.gather_and_scatter(features)
    layer.linear(job.tokens, features, inner / ranks)
    layer.linear(job.tokens, hidden / ranks, features)
    layer.elementwise(job.tokens / ranks, inner + hidden, 3 * inner)
    # F leaves the input, gate and up; B leaves the input, the gradients and the product of gate and up
    layer.keep(job.tokens / ranks, features + inner, 2 * features + inner + hidden)


def _add_experts(layer: _Layer, experts: Experts, features: int) -> None:
    """Router, experts over rows that are sorted by expert, and the MLP that all tokens take."""
    job, ranks = layer.job, layer.job.tensor_parallel
    rows = job.tokens / ranks * experts.chosen  # of this GPU's tokens; as many come back from others
    layer.linear(job.tokens / ranks, features, experts.count)
    layer.elementwise(rows, 4 * features, 4 * features)  # sort by expert, and back with a weight each
    hidden = experts.hidden
    if job.expert_parallel > 1:
        here = experts.count / job.expert_parallel
        layer.dispatch_and_combine(job.tokens / ranks, experts, features)
        replicas = job.data_parallel * ranks / job.expert_parallel
        layer.linear(rows, features, 2 * hidden, here, replicas)
        layer.linear(rows, hidden, features, here, replicas)
    else:
        layer.gather_and_scatter(features)
        layer.linear(rows * ranks, features, 2 * hidden / ranks, experts.count)
        layer.linear(rows * ranks, hidden / ranks, features, experts.count)
    layer.elementwise(rows, 3 * hidden, 6 * hidden)
    # of a sorted row: input, gate and up, their product, output; then the input, three gradients and the product
    layer.keep(rows, 2 * features + 3 * hidden, 2 * features + 3 * hidden)
    layer.keep(job.tokens / ranks, features, features)
    if experts.shared:
        _add_mlp(layer, experts.shared, features)
        layer.keep(job.tokens / ranks, -features, -features)  # the router's input is its input, too


def _projections(attention: Attention | LatentAttention, features: int) -> list[tuple[int, int]]:
    """Inputs and outputs of the products around the core; the output's is the last."""
    heads = attention.heads
    if isinstance(attention, Attention):
        size = attention.head_size
        return [(features, (heads + 2 * attention.key_heads) * size), (heads * size, features)]
    query = attention.content_size + attention.rotary_size
    down = [(features, attention.query_rank)] if attention.query_rank else []
    return [
        *down,
        (attention.query_rank or features, heads * query),
        (features, attention.key_rank + attention.rotary_size),
        (attention.key_rank, heads * (attention.content_size + attention.value_size)),
        (heads * attention.value_size, features),
    ]


def _shared_projections(attention: Attention | LatentAttention) -> tuple[int, ...]:
    """Those of `_projections` whose weight every tensor-parallel GPU has as a whole: down to a small vector."""
    if isinstance(attention, Attention):
        return ()
    return (0, 2) if attention.query_rank else (1,)


def _core_flops(attention: Attention | LatentAttention, sequence: int) -> float:
    """Forward, per token of a sequence: q k^T and p v, over what the causal mask and the window leave."""
    if isinstance(attention, Attention):
        sizes = 2 * attention.head_size
    else:
        sizes = attention.content_size + attention.rotary_size + attention.value_size
    seen = sequence if attention.window is None else min(attention.window, sequence)
    pairs = (seen * (seen + 1) / 2 + (sequence - seen) * seen) / sequence  # keys per query, mean over the sequence
    return 2 * attention.heads * sizes * pairs


def _check(architecture: Architecture, job: Job) -> None:
    ranks = job.tensor_parallel
    for block in architecture.blocks:
        if block.attention.heads % ranks:
            raise ValueError(f"model_costs: tensor_parallel must divide the {block.attention.heads} heads; got {ranks}")
        keys = block.attention.key_heads if isinstance(block.attention, Attention) else ranks
        if keys % ranks and ranks % keys:
            raise ValueError(
                f"model_costs: tensor_parallel must divide the {keys} heads of keys, or be a multiple; got {ranks}"
            )
        if isinstance(block.mlp, Experts) and block.mlp.count % job.expert_parallel:
            raise ValueError(
                f"model_costs: expert_parallel must divide the {block.mlp.count} experts; got {job.expert_parallel}"
            )
    if job.expert_parallel > 1 and not any(isinstance(block.mlp, Experts) for block in architecture.blocks):
        raise ValueError(
            f"model_costs: expert_parallel must be 1 for a model without experts; got {job.expert_parallel}"
        )
