"""What a GPU can do according to its maker, and the share of it that programs get: hardware.json, or a file like it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from zbkern.planning.cost_model.calibration import Calibration
from zbkern.planning.costs.chunks import checked_number
from zbkern.planning.costs.json_file import check_fields, parse_object, read_text

TABLE = Path(__file__).parent / "hardware.json"
_BANDWIDTH = "in bytes per second, such as 50e9 for 50 GB/s"
_UNITS = {
    **dict.fromkeys(("matmul_flops", "fp8_flops"), "in flops per second, such as 989e12 for 989 TFLOPS"),
    "memory": "in bytes, such as 80e9 for 80 GB",
    **{f"{name}_bandwidth": _BANDWIDTH for name in ("memory", "link", "network", "host")},
}
_MAY_BE_ZERO = (
    *("exposed_share", "hiding_share", "overlap_share", "softmax_share", "split_share", "fragmented_share"),
    *("tensor_exposed_share", "unfused_share", "largest_mesh"),
    *("matmul_ramp", "attention_ramp", "pass_time", "layer_time", "expert_time", "context_memory", "group_memory"),
)
_H100 = 989.4e12  # peak flops of the GPU for which ramps are given
_ATTENTION = ("attention_forward_share", "attention_backward_share")
_LEAST = 1e6  # of these: smaller ones are in giga or tera of them


@dataclass(frozen=True)
class Hardware:
    """One GPU and its connections.

    matmul_flops: peak of dense matrix products in bf16, in 1/s, fp8_flops of those in FP8 (None: it has none). memory:
    bytes. memory_bandwidth: bytes/s.
    gpus_per_node: GPUs that link_bandwidth joins; network_bandwidth joins nodes, and host_bandwidth a GPU and the
    memory of its host, which offloading needs (None: not known); all in bytes/s per GPU and direction. name: in the
    table that comes with zbkern. attention: the kernel whose shares are taken. software: what runs, by software.json.
    largest_mesh: no switch joins so many GPUs in a node, or fewer: two of them have their part of link_bandwidth alone.

    The rest is what programs get of these peaks, fitted to the runs of bench/published_runs.json (bench/shares.py says
    from which anchors); `errors.json` has what is left.
    matmul_share: of a large product, in W. forward_backward_share: of matmul_share, in F and B, where other operations
    are between the products; fitted to the times of F, B and W of arXiv 2401.10241, Table 9, alone. matmul_ramp: a
    product of [rows, inputs] and [inputs, outputs] takes 1 + this * (1/rows + 1/inputs + 1/outputs) times as long as
    that, on an H100; its edges take as long on every GPU, so that a faster one loses more. expert_share: of
    matmul_share, where products are grouped by expert, in groups of unlike sizes. attention_*_share: of a long sequence
    with heads of 128, by the kernel that is named; one of n tokens takes 1 + attention_ramp/n times as long, a head of
    size d 1 + softmax_share * (128/d - 1) times (64 for 128 costs FlashAttention 3 a fourth, arXiv 2407.08608, fig. 5),
    both on an H100: exponentials are no faster on a faster GPU. memory_share: of the bandwidth, with norms, activations
    and copies that frameworks do not fuse. network_share: also of the links in a node and to the host; all_to_all_share
    of that, of all-to-alls between nodes. exposed_share: of the time of messages of expert and context parallelism that
    computing never hides; it hides at most hiding_share of its own time. tensor_share, tensor_exposed_share: the same
    for collectives of tensor parallelism: what they reach of the links, and what of their time is never hidden.
    overlap_share: of one microbatch's passes, what traffic between pipelines hides behind. split_share: what B and W
    take longer apart than in one piece, of both; the gains in Table 4 of arXiv 2401.10241 fit with 0.02, eight H800s in
    an issue of its repository (21) with 0.06.
    latency: seconds that a message takes besides its bytes. pass_time: seconds of each F, B and W of a chunk (the
    engine); layer_time, expert_time: of each in a layer, and in one with experts besides that, however few tokens there
    are (launches, routing, waiting for the counts). unfused_share: of the bytes that bias, clamp and gate of gpt-oss's
    experts move without a kernel that joins them. context_memory, group_memory: bytes that the CUDA context with its
    libraries, and every group of ranks that communicates, take of a GPU; fragmented_share: of its memory that the
    allocator cannot use. These three are assumptions.

    Raises TypeError or ValueError for anything but positive numbers (ramps, times, exposed_share and overlap_share may
    be 0), shares above 1, and peaks so low that they must be in other units.
    """

    title: str
    matmul_flops: float
    memory: float
    memory_bandwidth: float
    gpus_per_node: int
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float | None = None
    fp8_flops: float | None = None
    source: str = ""
    name: str = ""
    attention: str = ""
    software: str = "torch"
    matmul_share: float = 0.72
    forward_backward_share: float = 0.73
    matmul_ramp: float = 124.0
    expert_share: float = 0.62
    attention_forward_share: float = 0.67
    attention_backward_share: float = 0.55
    attention_ramp: float = 450.0
    softmax_share: float = 0.3
    memory_share: float = 0.41
    network_share: float = 0.91
    tensor_share: float = 0.5
    tensor_exposed_share: float = 1.0
    largest_mesh: int = 4
    all_to_all_share: float = 0.85
    exposed_share: float = 0.375
    hiding_share: float = 0.41
    overlap_share: float = 1.0
    split_share: float = 0.03
    unfused_share: float = 0.0
    latency: float = 1e-5
    pass_time: float = 0.315e-3
    layer_time: float = 0.05e-3
    expert_time: float = 0.62e-3
    context_memory: float = 1.5e9
    group_memory: float = 0.5e9
    fragmented_share: float = 0.04
    calibration: Calibration = Calibration()  # noqa: RUF009  # it is frozen

    def links(self, ranks: int) -> float:
        """Bytes per second between a GPU and the others of a group of so many in its node."""
        if self.gpus_per_node > self.largest_mesh or ranks < 2:
            return self.link_bandwidth
        return self.link_bandwidth * min(1.0, (ranks - 1) / (self.gpus_per_node - 1))

    def usable(self, groups: int) -> float:
        """Bytes for what a rank holds, where it is in so many groups of ranks."""
        return (1 - self.fragmented_share) * self.memory - self.context_memory - groups * self.group_memory

    @property
    def steepness(self) -> float:
        """How much more of a product's time its edges take than on an H100: they take as long, the rest is faster."""
        return self.matmul_flops / _H100

    def __post_init__(self) -> None:
        if not isinstance(self.calibration, Calibration):
            raise TypeError(f"Hardware: calibration is for zbkern plan --calibrate; got {self.calibration!r}")
        for name in (field.name for field in fields(self) if field.name != "calibration"):
            value = getattr(self, name)
            if name in ("title", "source", "name", "attention", "software"):
                if not isinstance(value, str):
                    raise TypeError(f"Hardware: {name} must be text; got {value!r}")
                continue
            if name in ("host_bandwidth", "fp8_flops") and value is None:
                continue
            checked_number("Hardware", name, value, most=1.0 if name.endswith("_share") else 1e30)
            if name in ("gpus_per_node", "largest_mesh") and value % 1 != 0:
                raise ValueError(f"Hardware: {name} must be a whole number; got {value!r}")
            if not (value or name in _MAY_BE_ZERO):
                raise ValueError(f"Hardware: {name} must be above 0; got {value!r}")
            if name in _UNITS and value < _LEAST:
                raise ValueError(f"Hardware: {name} must be {_UNITS[name]}; got {value!r}")
        object.__setattr__(self, "gpus_per_node", int(self.gpus_per_node))  # 8.0 in a table


def load_hardware(name: str, path: str | Path | None = None, attention: str | None = None) -> Hardware:
    """The GPU of that name in a table of hardware, the one that comes with zbkern where path is None.

    attention: the kernel that computes it, by default the first, the fastest, of those that the table has. A row with
    "like": "h100" has everything else as that GPU of the table that comes with zbkern.
    Raises OSError, or ValueError for a file that is no such table and for a name that it does not have.
    """
    shipped = parse_object("load_hardware", read_text(TABLE), TABLE.name)
    table = shipped if path is None else parse_object(f"load_hardware: {path}", read_text(path), TABLE.name)
    own, path = path is None, TABLE if path is None else Path(path)
    name = next((each for each in table if each.lower() == name.lower()), name)
    if name not in table:
        raise ValueError(
            f"load_hardware: {path} has no {name!r}; it has {', '.join(table)}: name one of them, or add it to a table"
        )
    row = table[name]
    while isinstance(row, dict) and "like" in row:
        if row["like"] not in [*shipped]:
            raise ValueError(f"load_hardware: like of {name} must be one of {', '.join(shipped)}; got {row['like']!r}")
        row = {**shipped[row["like"]], **{field: value for field, value in row.items() if field != "like"}}
    check_fields(f"load_hardware: {name!r} of {path} (as those of {TABLE})", Hardware, row)
    kernels = row.get("attention") or {}
    if not isinstance(kernels, dict) or not all(isinstance(pair, list) and len(pair) == 2 for pair in kernels.values()):
        example = '{"cudnn": [0.57, 0.475]}'
        raise ValueError(
            f"load_hardware: attention of {name} must have the shares of each kernel, forward and backward, such as "
            f"{example}; got {kernels!r:.80}"
        )
    if kernels or attention is not None:
        attention = attention or next(iter(kernels))
        if attention not in kernels:
            known = ", ".join(kernels or ("those of a table that names some",))
            raise ValueError(f"load_hardware: attention of {name} must be one of {known}; got {attention!r}")
        row = {**row, "attention": attention, **dict(zip(_ATTENTION, kernels[attention], strict=True))}
    return Hardware(**({**row, "name": name} if own else row))
