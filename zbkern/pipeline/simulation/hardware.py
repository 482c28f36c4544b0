"""What a GPU can do according to its maker, and the share of it that programs get: hardware.json, or a file like it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from zbkern.pipeline.simulation.json_file import check_fields, parse_object

TABLE = Path(__file__).parent / "hardware.json"
_BANDWIDTH = "in bytes per second, such as 50e9 for 50 GB/s"
_UNITS = {
    "matmul_flops": "in flops per second, such as 989e12 for 989 TFLOPS",
    "memory": "in bytes, such as 80e9 for 80 GB",
    **{f"{name}_bandwidth": _BANDWIDTH for name in ("memory", "link", "network", "host")},
}
_LEAST = 1e6  # of these: smaller ones are in giga or tera of them


@dataclass(frozen=True)
class Hardware:
    """One GPU and its connections.

    matmul_flops: peak of dense matrix products in bf16, in 1/s. memory: bytes. memory_bandwidth: bytes/s.
    gpus_per_node: GPUs that link_bandwidth joins; network_bandwidth joins nodes, and host_bandwidth a GPU and the
    memory of its host, which offloading needs (None: not known); all in bytes/s per GPU and direction.

    The shares are what programs get of these peaks. They are assumptions, the same for every GPU, until somebody
    measures them; anchors on an H100: products of 8192 reach 0.8 of the peak, smaller ones less; FlashAttention 3
    reaches 0.67 forward and 0.58 backward (head size 128, causal, 8k tokens); a copy 0.9 of the memory's bandwidth.
    network_share: also of the links in a node and to the host. exposed_share: of the time of messages of tensor and
    expert parallelism that computing does not hide. latency: seconds that a message takes besides its bytes.

    Raises TypeError or ValueError for anything but positive numbers (exposed_share may be 0), shares above 1, and peaks
    so low that they must be in other units.
    """

    title: str
    matmul_flops: float
    memory: float
    memory_bandwidth: float
    gpus_per_node: int
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float | None = None
    source: str = ""
    matmul_share: float = 0.7
    attention_forward_share: float = 0.6
    attention_backward_share: float = 0.5
    memory_share: float = 0.85
    network_share: float = 0.8
    exposed_share: float = 1.0
    latency: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("title", "source"):
                if not isinstance(value, str):
                    raise TypeError(f"Hardware: {field.name} must be text; got {value!r}")
                continue
            if field.name == "host_bandwidth" and value is None:
                continue
            if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
                raise TypeError(f"Hardware: {field.name} must be a number; got {value!r}")
            if field.name == "gpus_per_node" and value % 1 != 0:  # infinity neither
                raise ValueError(f"Hardware: {field.name} must be a whole number; got {value!r}")
            most = 1.0 if field.name.endswith("_share") else 1e30
            fits = 0 <= value <= most if field.name == "exposed_share" else 0 < value <= most
            if not fits:  # NaN neither
                raise ValueError(f"Hardware: {field.name} must be above 0 and at most {most:g}; got {value!r}")
            unit = _UNITS.get(field.name)
            if unit is not None and value < _LEAST:
                raise ValueError(f"Hardware: {field.name} must be {unit}; got {value!r}")


def load_hardware(name: str, path: str | Path | None = None) -> Hardware:
    """The GPU of that name in a table of hardware, the one that comes with zbkern where path is None.

    Raises OSError, or ValueError for a file that is no such table and for a name that it does not have.
    """
    path = TABLE if path is None else Path(path)
    table = parse_object(f"load_hardware: {path}", path.read_text(encoding="utf-8"), TABLE.name)
    name = next((each for each in table if each.lower() == name.lower()), name)
    if name not in table:
        raise ValueError(
            f"load_hardware: {path} has no {name!r}; it has {', '.join(table)}: name one of them, or add it to a table"
        )
    check_fields(f"load_hardware: {name!r} of {path} (as those of {TABLE})", Hardware, table[name])
    return Hardware(**table[name])
