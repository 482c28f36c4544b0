"""What the operations of a layer take on a GPU: seconds and bytes of one microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from zbkern.planning.cost_model.expert_traffic import reached
from zbkern.planning.cost_model.hardware import Hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.layer_kinds import Core, Experts, Part, Product
from zbkern.planning.cost_model.places import in_a_node
from zbkern.planning.costs.layers import LayerCosts

WIDTH = 2  # bytes of a bf16 number
WIDE = 4  # of an fp32 number: statistics, gradients
MS = 1e3
_SOME = 1 / 8  # of a sequence: from what so many rows take follows what does not shrink with them
_REDUCED = 2  # of a gradient that travels between pipelines
_QUANTISED = 3  # bytes read and written for a number that becomes FP8
_STEP = 30  # bytes that AdamW reads and writes per parameter: gradient, both moments, fp32 weight, and the bf16 one


class Operations:
    """Adds up those of one layer for one microbatch on one GPU: seconds, and bytes. features: of a token."""

    def __init__(self, name: str, features: int, hardware: Hardware, job: Job, tied: str | None = None) -> None:
        self.name, self.tied, self.features, self.hardware, self.job = name, tied, features, hardware, job
        self.forward = self.backward = self.weight = self.saving = 0.0
        self.gathered = self.reduced = self.stepped = self.whole = self.messages = self.waits = 0.0
        self.all_to_alls = self.collectives = 0.0  # of messages, the time of those; and how many they are
        self.network_forward = self.network_backward = 0.0
        self.activation = self.held = self.static = 0.0
        self.attention_forward = self.attention_backward = self.overhead = self.carried = 0.0

    def linear(
        self, rows: float, inputs: float, outputs: float, matrices: float = 1, replicas: float = 0, peak: float = 0
    ) -> None:
        """Products of so many rows in all with `matrices` weights [outputs, inputs], which this GPU has.

        replicas: as for `weights`. peak: that of F and B, 0 for that of bf16.
        """
        gpu = self.hardware
        share = gpu.matmul_share * (1.0 if matrices == 1 else gpu.expert_share)
        size = matrices * inputs * outputs
        wide, narrow = gpu.matmul_flops, peak or gpu.matmul_flops  # of W, of F and B

        def times(rows: float) -> tuple[float, float, float]:
            """Of F or B, of W, and of a W that is merged, which reads and writes the gradient once with others."""
            edges = gpu.steepness * gpu.matmul_ramp * (matrices / rows + 1 / inputs + 1 / outputs)
            product = (1 + edges) * 2 * rows * inputs * outputs / share
            moved = WIDTH * rows * (inputs + outputs)
            quantised = self.seconds(_QUANTISED * rows * inputs) if narrow != wide else 0.0
            kinds = ((gpu.forward_backward_share * narrow, WIDTH * size), (wide, 2 * WIDE * size), (wide, 0))
            through, alone, merged = (max(product / most, self.seconds(moved + more)) for most, more in kinds)
            return through + quantised, alone, merged

        (through, alone, merged), some = times(rows), times(_SOME * rows)
        self.forward += through
        self.backward += through
        self.weight += alone
        self.saving += alone - merged
        fixed = [(part - _SOME * whole) / (1 - _SOME) for part, whole in zip(some, (through, alone), strict=False)]
        self.overhead += (2 * fixed[0] + fixed[1]) / 3
        self.weights(size, replicas)

    def core(self, core: Core) -> None:
        """Two products forward, five backward, no weights; of short sequences less than its share.

        What short ones take longer is some keys more for every query, which is no part of the context.
        """
        gpu, job = self.hardware, self.job
        flops = job.rows * core.flops(job.sequence) / job.tensor_parallel / gpu.matmul_flops
        flops *= 1 + gpu.steepness * gpu.softmax_share * (128 / core.size - 1)
        more = 1 + gpu.steepness * gpu.attention_ramp / job.sequence
        rising = rising_share(1.0 if core.window is None else min(1.0, core.window / job.sequence))
        self.attention_forward += rising * flops / gpu.attention_forward_share
        self.attention_backward += rising * 2.5 * flops / gpu.attention_backward_share
        self.forward += more * flops / gpu.attention_forward_share
        self.backward += more * 2.5 * flops / gpu.attention_backward_share

    def part(self, part: Part) -> None:
        """Attention, an MLP or experts: products, core and the rest, for this GPU's share of them."""
        job = self.job
        part = part.of(job.tensor_parallel)
        rows = job.rows / job.tensor_parallel
        if part.experts is not None and job.expert_parallel > 1:
            self.dispatch_and_combine(rows, part.experts)
        else:
            self.gather_and_scatter()
        for product in part.products:
            self.product(product, part.experts)
        if part.core is not None:
            self.core(part.core)
            ranks = job.context_parallel  # keys and values go around the GPUs of a sequence
            gpu, neighbours = self.hardware, ranks * job.tensor_parallel
            self.exchange(rows * part.keys, ranks, neighbours, gpu.network_share, gpu.exposed_share)
        self.elementwise(rows, *part.moved)
        self.keep(rows, part.kept, part.held)
        self.weights(part.other / job.tensor_parallel)
        self.carried += WIDTH * rows * part.carried

    def product(self, product: Product, experts: Experts | None) -> None:
        """A row of the table."""
        job, inputs, outputs = self.job, product.inputs, product.outputs
        ranks, rows, matrices, replicas = job.tensor_parallel, job.rows, 1.0, 0.0
        if product.grouped and experts is not None:
            rows, matrices = rows * experts.chosen, experts.count / job.expert_parallel
        if product.divided == "tokens" or (product.grouped and job.expert_parallel > 1):
            rows /= ranks
        elif product.divided == "inputs":
            inputs /= ranks  # type: ignore[assignment]
        else:
            outputs /= ranks  # type: ignore[assignment]
        if product.grouped and job.expert_parallel > 1:  # as many rows come back from others as go there
            replicas = job.replicas * ranks / job.expert_parallel
        narrow = 0.0 if product.grouped or not job.fp8 else self.hardware.fp8_flops or 0.0
        self.static += 2 * inputs * outputs if narrow else 0.0  # in 8 bits, both ways round, while a step runs
        self.linear(rows, inputs, outputs, matrices, replicas, narrow)

    def elementwise(self, rows: float, forward: float, backward: float) -> None:
        """So many numbers read or written per row."""
        self.forward += self.seconds(WIDTH * rows * forward)
        self.backward += self.seconds(WIDTH * rows * backward)

    def keep(self, rows: float, activation: float, held: float) -> None:
        """So many numbers per row, from F to B and from B to W."""
        self.activation += WIDTH * rows * activation
        self.held += WIDTH * rows * held

    def weights(self, count: float, replicas: float = 0) -> None:
        """Parameters on this GPU, whose optimizer state so many replicas share; 0 for all pipelines."""
        copies = replicas or self.job.replicas
        shards = copies if self.job.fully_shard else 1
        self.static += count * (self.job.weight_bytes / shards + self.job.optimizer_bytes / copies)
        self.whole += count if shards > 1 else 0
        self.stepped += self.seconds(_STEP * count / copies)
        if copies > 1:
            gpu = self.hardware
            near = in_a_node(gpu.gpus_per_node, self.job.expert_parallel if replicas else self.job.tensor_parallel)
            links = gpu.links(int(min(copies, near)))
            bandwidth = links if copies <= near else min(near * gpu.network_bandwidth, gpu.link_bandwidth)
            time = count * (copies - 1) / copies / (bandwidth * gpu.network_share)
            self.gathered += WIDTH * time
            self.reduced += (WIDE if self.job.fully_shard else _REDUCED) * time

    def wait_for_shards(self) -> None:
        """What gathering weights for F and B and reducing gradients takes beyond the passes that hide it."""
        hidden = self.hardware.overlap_share
        self.forward += max(0.0, self.gathered - hidden * self.forward)
        self.backward += max(0.0, self.gathered + self.reduced - hidden * (self.backward + self.weight))

    def gather_and_scatter(self) -> None:
        """Tensor parallelism around attention or an MLP: an all-gather and a reduce-scatter, forward and backward."""
        gpu, ranks = self.hardware, self.job.tensor_parallel
        numbers = 2 * self.job.rows * self.features / ranks
        self.exchange(numbers, ranks, ranks, gpu.tensor_share, gpu.tensor_exposed_share)

    def exchange(self, numbers: float, ranks: int, neighbours: int, share: float, exposed: float) -> None:
        """Each of `ranks`, among so many neighbours, sends so many numbers to every other one; as for `_message`."""
        gpu = self.hardware
        if ranks > 1:
            bandwidth = gpu.links(ranks) if neighbours <= gpu.gpus_per_node else gpu.network_bandwidth
            self._message(WIDTH * numbers * (ranks - 1) / bandwidth, share, exposed)

    def dispatch_and_combine(self, tokens: float, experts: Experts) -> None:
        """Expert parallelism: tokens go to the GPUs of their experts and return, forward and backward.

        A token travels once to every node that has some of its experts, to the GPU with its own GPU's place there, and
        is handed on to every GPU there that has some while the next ones travel (arXiv 2412.19437, section 3.2.2). What
        goes to its own node or GPU takes no time.
        """
        gpu, ranks, size = self.hardware, self.job.expert_parallel, WIDTH * tokens * self.features
        if experts.count % ranks:
            raise ValueError(f"model_costs: expert_parallel must divide the {experts.count} experts; got {ranks}")
        inside, here = min(ranks, gpu.gpus_per_node), experts.count // ranks
        gpus = sum(reached(experts, (here,) * ranks))
        places = [here * min(inside, ranks - first) for first in range(0, ranks, inside)]
        nodes = sum(
            share * (1 - place / experts.count)
            for share, place in zip(reached(experts, tuple(places)), places, strict=True)
        )
        time = max(
            nodes * size / (gpu.network_bandwidth * gpu.all_to_all_share),
            gpus * size * (inside - 1) / inside / gpu.links(inside),
        )
        before = self.messages
        self._message(2 * time, gpu.network_share, gpu.exposed_share)
        if self.job.overlap and ranks > 1:
            self.all_to_alls += self.messages - before
            self.collectives += 2

    def seconds(self, moved: float) -> float:
        """For so many bytes of this GPU's memory."""
        return moved / (self.hardware.memory_bandwidth * self.hardware.memory_share)

    def costs(self) -> LayerCosts:
        output = WIDTH * self.job.rows * self.features / self.job.tensor_parallel
        networks = ("network_forward", "network_backward")
        same = ("forward", "backward", "weight", "attention_forward", "attention_backward", "overhead", *networks)
        times = {name: MS * getattr(self, name) for name in same}
        divided = times["backward"] - times["attention_backward"] + times["weight"]  # attention's core has no W
        apart = self.hardware.split_share * divided if self.backward else 0.0
        times |= {"backward": times["backward"] + apart, "split_overhead": apart}
        rest = {name: getattr(self, name) for name in ("activation", "held", "static", "carried", "collectives")}
        rest["carried_gradients"] = WIDE / WIDTH * self.carried
        return LayerCosts(self.name, **times, **rest, merge_saving=MS * self.saving, output=output, tied=self.tied)

    def _message(self, time: float, share: float, exposed: float) -> None:
        """Two messages that take so long together at the peak bandwidth, forward and again backward; share: what they
        get of it; exposed: what of their time is never hidden."""
        time = time / share + 2 * self.hardware.latency
        self.messages += time
        self.waits += exposed * time

    def wait_for_messages(self, *others: Operations) -> None:
        """What F and B take longer for their messages: what computing cannot hide, because it waits or is too short.

        others: the other half of a block, each of which hides messages of both.
        """
        gpu, layers = self.hardware, (self, *others)
        messages, waits = (sum(getattr(layer, name) for layer in layers) for name in ("messages", "waits"))
        for name in ("forward", "backward"):
            hidden = gpu.hiding_share * sum(getattr(layer, name) for layer in layers)
            exposed = max(waits, messages - hidden)
            for layer in layers if messages else ():
                setattr(layer, name, getattr(layer, name) + exposed * layer.messages / messages)
                setattr(layer, f"network_{name}", exposed * layer.all_to_alls / messages)  # what nothing hides yet

    def wait_for_unfused(self, parts: Sequence[Part]) -> None:
        """What no kernel joins is between a token's way to its experts and back, and hides neither."""
        rows = self.hardware.unfused_share * self.job.rows / self.job.tensor_parallel
        for part in parts:
            self.elementwise(rows, *part.unfused)


def rising_share(window: float) -> float:
    """The share of attention's time that grows with the length times all that came before, in slices of a sequence.

    A window w of the sequence gives a query the context min(x, w) at x. That is taken for a constant, which makes the
    time grow with the length, and a part that rises with x: the one with the least squares of the difference.
    """
    return window * (3 - 2 * window) / (2 - window)
