"""What layers compute, as rows of matrix products: a table with a row for every weight, and what is beside them.

Numbers are per token and of all GPUs that share a layer. Every kind keeps the inputs of its products for W; `kept` is
what zbkern's own layers hold from F to B, `moved` what their other operations read and write in F and in B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

_STATISTIC = 2  # bf16 numbers in an fp32 one: the log-sum-exp of each query and head
_CLAMPED = 11, 17  # times that bias, clamps and gate of gpt-oss's experts read or write gate and up, forward, backward
_DELTA_CHUNK = 64  # tokens that the gated delta rule's kernels work on at once


class Product(NamedTuple):
    """A weight [outputs, inputs]. divided: what tensor parallelism divides, "outputs" or "inputs"; "tokens" where every
    GPU has the whole weight, and computes its share of the tokens. grouped: one weight for every expert."""

    inputs: int
    outputs: int
    divided: str = "outputs"
    grouped: bool = False


class Core(NamedTuple):
    """What is computed without weights. width: multiply-adds for every pair of a token and one that it sees; window:
    tokens that each sees, None for all, in chunks one after another where `chunked`; state: multiply-adds of a token
    with a state of fixed size; heads: softmaxes of every pair."""

    width: int
    window: int | None = None
    chunked: bool = False
    state: int = 0
    heads: int = 0

    @property
    def size(self) -> float:
        """Of a head, mean of keys and values; 128 where there is no softmax."""
        return self.width / (2 * self.heads) if self.heads else 128

    def flops(self, sequence: int) -> float:
        """Forward, per token of a sequence, over what the mask and the window leave."""
        seen = sequence if self.window is None else min(self.window, sequence)
        pairs = (seen * (seen + 1) / 2 + (sequence - seen) * seen) / sequence  # keys per query, mean over the sequence
        return 2 * (self.width * ((seen + 1) / 2 if self.chunked else pairs) + self.state)


@dataclass(frozen=True)
class Experts:
    """`count` experts, of which every token takes `chosen`, of `chosen_groups` of the `groups` of neighbours that they
    are divided into."""

    count: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1


@dataclass(frozen=True)
class Part:
    """Attention, an MLP, or what is in the place of one.

    unheld: inputs and outputs of products that are counted twice, or not held for W. heads: what tensor parallelism
    must divide, 0 for anything.
    keys: of the first product's outputs those of keys and values, in so many key_heads, of which every GPU needs one.
    carried: numbers that stay for later slices of the sequence. other: parameters of no product. unfused: what is moved
    besides, forward and backward, by programs without a kernel that joins the operations between two products.
    """

    products: tuple[Product, ...]
    kept: float
    moved: tuple[float, float]
    core: Core | None = None
    unheld: int = 0
    heads: int = 0
    keys: int = 0
    key_heads: int = 1
    carried: int = 0
    experts: Experts | None = None
    other: int = 0
    unfused: tuple[float, float] = (0.0, 0.0)

    def of(self, ranks: int) -> Part:
        """With a head of keys for every GPU that shares the part. Raises ValueError for heads that do not divide."""
        must = None
        if self.heads % ranks:
            must = f"divide the {self.heads} heads"
        elif self.keys and self.key_heads % ranks and ranks % self.key_heads:
            must = f"divide the {self.key_heads} heads of keys, or be a multiple"
        if must is not None:
            raise ValueError(f"model_costs: tensor_parallel must {must}; got {ranks}")
        added = self.keys * max(0, ranks // self.key_heads - 1)
        if not added:
            return self
        first, *rest = self.products
        forward, backward = self.moved
        return replace(
            self,
            products=(first._replace(outputs=first.outputs + added), *rest),
            kept=self.kept + 1.5 * added,
            moved=(forward + added, backward + added),
            carried=self.carried + added,
        )

    @property
    def held(self) -> float:
        """From B to W: the inputs of products, and their outputs' gradients."""
        times = 1 if self.experts is None else self.experts.chosen
        held = sum((times if each.grouped else 1) * (each.inputs + each.outputs) for each in self.products)
        return held - self.unheld

    def parameters(self, active: bool = False) -> int:
        """All, or those that a token is computed with."""
        count = 0 if self.experts is None else self.experts.chosen if active else self.experts.count
        return self.other + sum((count if each.grouped else 1) * each.inputs * each.outputs for each in self.products)


def attention(
    features: int,
    heads: int,
    key_heads: int,
    size: int,
    window: int | None = None,
    chunked: bool = False,
    gate: int = 0,
) -> Part:
    """Grouped-query attention; gate: features of a gate on its output."""
    queries, keys = heads * size, key_heads * size
    return Part(
        (Product(features, queries + 2 * keys + gate), Product(queries, features, "inputs")),
        # the input; q, k and v before rotary, which v keeps alive; q and k after it; the core's output
        kept=features + 3 * queries + 3 * keys + 2 * gate + _STATISTIC * heads,
        moved=(2 * (queries + keys) + 3 * gate, 2 * (queries + keys) + 5 * gate),
        core=Core(2 * queries, window, chunked, heads=heads),
        heads=heads,
        keys=2 * keys,
        key_heads=key_heads,
        carried=2 * keys,
    )


def latent_attention(
    features: int, heads: int, query_rank: int, key_rank: int, content: int, rotary: int, value: int
) -> Part:
    """DeepSeek's multi-head latent attention (arXiv 2412.19437): queries, keys and values come from small vectors.

    query_rank: 0 where queries come from the input itself. content, rotary: of a head's queries and keys without and
    with positions; value: of its values.
    """
    size, small, values = heads * (content + rotary), query_rank + key_rank, heads * value
    down = (Product(features, query_rank, "tokens"),) if query_rank else ()
    return Part(
        (
            *down,
            Product(query_rank or features, size),
            Product(features, key_rank + rotary, "tokens"),
            Product(key_rank, heads * content + values),
            Product(values, features, "inputs"),
        ),
        # the input; both small vectors before and after their norms; q and k with positions; values, core's output
        kept=features + 2 * small + rotary + 2 * size + heads * content + 2 * values + _STATISTIC * heads,
        moved=(4 * size + 2 * small, 4 * size + 4 * small),
        core=Core(size + values, heads=heads),
        unheld=features,
        heads=heads,
        carried=size + values,
    )


def mlp(features: int, hidden: int, gated: bool = True, beside: bool = False) -> Part:
    """Gate, up and down, or up and down alone. beside: its input is that of a router, which keeps it."""
    inner = (1 + gated) * hidden
    return Part(
        (Product(features, inner), Product(hidden, features, "inputs")),
        kept=inner + (0 if beside else features),
        moved=(inner + hidden, 3 * inner),
        unheld=features if beside else 0,
    )


def routed_mlp(features: int, hidden: int, experts: Experts, gated: bool, clamped: bool) -> Part:
    """Router and experts, over rows that are sorted by expert, and sorted back with a weight each. clamped: gate and up
    have biases and limits."""
    inner = (1 + gated) * hidden
    row = 2 * features + inner + hidden  # input, gate and up, their product, output
    products = Product(features, experts.count, "tokens"), Product(features, inner, grouped=True)
    return Part(
        (*products, Product(hidden, features, "inputs", grouped=True)),
        kept=features + experts.chosen * row,
        moved=(experts.chosen * (4 * features + inner + hidden), experts.chosen * (4 * features + 3 * inner)),
        unheld=experts.count,
        experts=experts,
        unfused=(clamped * _CLAMPED[0] * experts.chosen * inner, clamped * _CLAMPED[1] * experts.chosen * inner),
    )


def state_space(features: int, heads: int, size: int, state: int, groups: int, kernel: int, chunk: int) -> Part:
    """Mamba-2 (arXiv 2405.21060): attention within a chunk, and a state [size, state] per head between chunks."""
    inner, mixed = heads * size, heads * size + 2 * groups * state
    return Part(
        (Product(features, inner + mixed + heads), Product(inner, features, "inputs")),
        kept=features + 3 * inner + 2 * mixed + heads,
        moved=(2 * mixed + 4 * inner, 4 * mixed + 8 * inner),
        core=Core(groups * state + inner, chunk, True, 2 * inner * state),
        heads=heads,
        other=(kernel + 1) * mixed + 3 * heads,
    )


def selective_scan(features: int, inner: int, state: int, rank: int, kernel: int) -> Part:
    """Mamba (arXiv 2312.00752): a scan that takes its bytes."""
    products = Product(features, 2 * inner), Product(inner, rank + 2 * state, "inputs"), Product(rank, inner)
    return Part(
        (*products, Product(inner, features, "inputs")),
        kept=features + 5 * inner + 2 * rank + 4 * state,
        moved=(6 * inner, 12 * inner),
        heads=inner,
        other=(state + kernel + 3) * inner,
    )


def delta_rule(features: int, key_heads: int, value_heads: int, key_size: int, value_size: int, kernel: int) -> Part:
    """The gated delta rule (arXiv 2412.06464), in chunks as in flash-linear-attention."""
    keys, values = key_heads * key_size, value_heads * value_size
    mixed = 2 * keys + values
    return Part(
        (Product(features, mixed + values + 2 * value_heads), Product(values, features, "inputs")),
        kept=features + 2 * mixed + 3 * values + 2 * value_heads,
        moved=(2 * mixed + 4 * values, 4 * mixed + 8 * values),
        core=Core(2 * value_heads * (key_size + value_size), _DELTA_CHUNK, True, 3 * values * key_size),
        heads=key_heads,
        other=kernel * mixed,
    )
