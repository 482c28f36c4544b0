"""What the emulator and a GPU run: every launch in every layout, with tails, added or not, against the reference in
float64."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.emulator import library
from tests.emulator.gpu import gpu
from tests.support import attention_checks, every_launch, row_checks
from tests.support import launch_checks as checks
from zbkern.kernels import spec, tiles

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
PLAIN, PADDED, TRANSPOSED, ODD, STEP = ((layout,) * 3 for layout in checks.LAYOUTS)
MIXED = ("plain", "transposed", "plain")


class Case(NamedTuple):
    """run: checks the launches of an implementation. large: with the tiles of products of 4,096 rows and columns."""

    name: str
    run: Callable[[ModuleType], None]
    large: bool = False


class _Cases:
    def __init__(self, capability: int, dtype: torch.dtype, device: str) -> None:
        self.capability, self.dtype, self.device = capability, dtype, device
        self.found: list[Case] = []

    @property
    def single(self) -> bool:
        return self.dtype == FP32

    def add(
        self, name: str, check: Callable[..., object], *arguments: Any, large: bool = False, scale: float = 0.5,
        values: str = "normal", **more: Any,
    ) -> None:  # fmt: skip
        def run(launches: ModuleType) -> None:
            check(launches, checks.Random(self.dtype, self.device, scale=scale, kind=values), *arguments, **more)

        self.found.append(Case(f"{name}{' large tiles' * large}", run, large))

    def add_typed(self, name: str, check: Callable[..., object], *arguments: Any, **more: Any) -> None:
        """check takes the dtype where others take random tensors."""
        self.found.append(Case(name, lambda launches: check(launches, self.dtype, *arguments, **more)))

    def linear(self) -> None:
        for shape in ((1, 8, 8), (63, 129, 65), (255, 257, 127), (300, 264, 520)):
            self.add(f"linear_fwd {_x(shape)}", checks.linear_fwd, *shape, bias=True)
            self.add(f"linear_dgrad {_x(shape)}", checks.linear_dgrad, *shape)
        self.add("linear_fwd z without activation", checks.linear_fwd, 63, 129, 65, keep=True)
        for layouts in (PLAIN, PADDED, TRANSPOSED, ODD, STEP, MIXED):
            self._linear_in((200, 136, 264), layouts, False)
            if layouts not in (PADDED, STEP):
                self._linear_in((260, 520, 328), layouts, True)
        for kind in checks.KINDS[1:]:
            if not (self.single and kind == "denormal"):
                self.add_typed(f"adversarial {kind}", checks.adversarial_linear, self.device, kind, 65, 63, 129)

    def _linear_in(self, shape: tuple[int, int, int], layouts: Sequence[str], large: bool) -> None:
        m, n, k = shape
        at = f"{_x(shape)} {'mixed' if layouts == MIXED else layouts[0]}"
        more: dict[str, Any] = {"bias": True, "activation": "silu", "keep": True}
        self.add(f"linear_fwd act {at}", checks.linear_fwd, *shape, layouts, large=large, **more)
        self.add(f"linear_dgrad {at}", checks.linear_dgrad, *shape, layouts, large=large)
        self.add(f"linear_dgrad_sum {at}", checks.linear_dgrad_sum, m, [n, 8, n], k, layouts, large=large)
        for out, add, bias in itertools.product(dict.fromkeys((FP32, self.dtype)), (False, True), (False, True)):
            name = f"{at} to {str(out)[6:]}{' add' * add}{' bias' * bias}"
            for rows in ([m], [m, 0, 77, m]):
                given = (rows, n, k, layouts, out, add, bias)
                self.add(f"linear_wgrad {len(rows)} seg {name}", checks.linear_wgrad, *given, large=large)

    def gated(self) -> None:
        for activation in spec.ACTIVATIONS:
            self.add(f"linear_fwd {activation}", checks.linear_fwd, 130, 136, 72, activation=activation)
            given = {"activation": activation, "scale": 0.3}
            self.add(f"gated_linear {activation}", checks.gated_linear, 130, 136, 72, 272, **given)
        for layouts in (PLAIN, ODD, TRANSPOSED):
            name = f"gated_linear {layouts[0]}"
            self.add(f"{name} bias", checks.gated_linear, 100, 129, 65, 264, layouts, bias=True, scale=0.2)
            self.add(name, checks.gated_linear, 260, 264, 136, 520, layouts, large=True, scale=0.2)

    def merged(self) -> None:
        several = [(256, 128), (136, 264), (8, 8), (127, 65)]
        for segments, add in itertools.product((1, 3), (False, True)):
            name = f"linear_wgrads {segments} seg{' add' * add}"
            layers = [(n, k, [150] * segments) for n, k in several]
            self.add(name, checks.linear_wgrads, layers, accumulate=add, scale=1)
            layers = [(n, k, [i * 50] * segments) for i, (n, k) in enumerate(several)]
            self.add(f"{name} ragged", checks.linear_wgrads, layers, accumulate=add, bias=False, scale=1)
        given: dict[str, Any] = {"accumulate": True, "large": True, "scale": 1}
        self.add("linear_wgrads 8 aligned", checks.linear_wgrads, [(264, 264, [200])] * 8, bias=False, **given)
        layers = [(264, 264, [200, 64, 0, 130])] * 2
        self.add("linear_wgrads 2x4 aligned bias", checks.linear_wgrads, layers, bias=True, **given)

    def grouped(self) -> None:
        counts = [[100, 0, 33, 64, 1], [0, 0, 0, 0, 129], [7] * 5]
        for n, k in ((256, 128), (136, 264), (65, 127)):
            odd = n == 136
            given = (counts, n, k, PLAIN, FP32, odd)
            more = {"transposed": not odd, "spare": 50 if odd else 0}
            self.add(f"grouped_linear {n}x{k}", checks.grouped_linear, *given, **more)
        name, size = "grouped_linear 264x264", (264, 264, PLAIN)
        self.add(f"{name} add", checks.grouped_linear, counts, *size, FP32, True, True, large=True)
        self.add(f"{name} bias", checks.grouped_linear, counts[:1], *size, None, False, True, large=True)
        for interleaved, hidden in itertools.product((False, True), (256, 136)):
            options = (
                spec.GateOptions("silu", interleaved, 1.0, 1.702, 1.0) if interleaved else spec.GateOptions("gelu")
            )
            name = f"grouped_gated {hidden}{' interleaved' * interleaved}"
            given, more = (counts[0], 136, 72, hidden, options), {"transposed": interleaved, "spare": 50}
            self.add(name, checks.grouped_gated, *given, scale=0.3, **more)

    def rows(self) -> None:
        layouts = ("plain", "odd", "transposed")
        for name, activation, layout in itertools.product(row_checks.ELEMENTWISE, spec.ACTIVATIONS, layouts):
            given = (name, activation, 130, 1025, layout)
            self.add(f"{name} {activation} {layout}", row_checks.elementwise, *given, scale=1)
        sizes = ((1, 1), (3, 63), (77, 1024), (41, 4096), (5, 20000))
        weights = ((True, False), (False, False), (True, True))
        for centered, layout, size, (weighted, added) in itertools.product((False, True), layouts, sizes, weights):
            kind = f"{'layer' if centered else 'rms'} {_x(size)} {layout}{' weighted' * weighted}{' added' * added}"
            self.add(f"norm {kind}", row_checks.norm, *size, centered, weighted, layout, added, scale=1)
        shapes = (((2, 50, 4, 128), 64), ((1, 3, 1, 1), 0), ((3, 65, 7, 80), 20), ((1, 9, 40, 256), 32))
        for layout, interleaved, (shape, half) in itertools.product(layouts, (False, True), shapes):
            name = f"rotary {_x(shape)} {half} {layout}{' interleaved' * interleaved}"
            self.add(name, row_checks.rotary, shape, half, interleaved, half != 20, layout, scale=1)
        tables = (([1], 1, 1), ([0], 5, 64), ([400, 100, 400], 100, 768), ([513], 5025, 130))
        for table, add, padding in itertools.product(tables, (False, True), (None, 0)):
            name = f"embedding {' '.join(map(str, table))}{' add' * add} {padding}"
            self.add(name, row_checks.embedding, *table, add, padding, scale=1)
        for kind in ("large", "special"):
            self.add_typed(f"adversarial rows {kind}", row_checks.adversarial, self.device, kind, 60, 120)

    def float8(self) -> None:
        if self.capability < 89:  # has no instruction that rounds once
            return
        sizes = ((1, 1), (3, 63), (77, 1030), (5, 20000), (40, 700))
        kinds = torch.float8_e4m3fn, torch.float8_e5m2
        for size, kind, parts, layout in itertools.product(sizes, kinds, (0, 1, 7), ("plain", "odd", "transposed")):
            name = f"float8 {_x(size)} {str(kind)[6:]} {layout}{f' {parts} parts' * (parts > 0)}"
            self.add(name, row_checks.float8, *size, kind, layout == "odd", parts, layout, scale=1)
        for values, parts, power in itertools.product(checks.KINDS[1:], (0, 7), (False, True)):
            name = f"float8 {values}{' parts' * (parts > 0)}{' power of 2' * power}"
            self.add(name, row_checks.float8, 60, 120, kinds[0], power, parts, scale=1, values=values)
        for kind in kinds:
            self.add(f"float8 edges {str(kind)[6:]}", row_checks.float8, 500, 5, kind, True, edges=True, scale=1)

    def loss(self) -> None:
        smooth = spec.CrossEntropyOptions(ignore_index=3, label_smoothing=0.1, z_loss=1e-3, chunk=100, softcap=2.0)
        heads = (([5], 7, 16, True), ([130, 0, 29], 500, 72, False), ([57], 8001, 64, True))
        for options, (rows, *size, bias) in itertools.product((spec.CrossEntropyOptions(), smooth), heads):
            name = f"cross_entropy {rows} {_x(size)} smoothing {options.label_smoothing}{' bias' * bias}"
            self.add(name, row_checks.cross_entropy, rows, *size, options, bias, accumulate=bias, scale=0.2)

    def attention(self) -> None:
        masks: dict[str, dict[str, Any]] = {
            "causal": {"queries": [300]},
            "packed heads": {"queries": [133, 1, 0, 240], "heads": (4, 2)},
            "cross": {"queries": [100, 65], "keys": [200, 129]},
            "full cross": {"queries": [129, 100], "keys": [200, 30], "causal": False},
            "window": {"queries": [300], "window": 100},
            "full": {"queries": [257], "causal": False},
            "softcap sinks": {"queries": [150, 43], "softcap": 30.0, "sinks": True},
            "device ends": {"queries": [150, 43], "beyond": 30},
            "one key": {"queries": [36], "keys": [1], "heads": (4, 2)},
            "short window softcap sinks": {
                "queries": [70],
                "heads": (2, 1),
                "window": 20,
                "softcap": 5.0,
                "sinks": True,
            },
        }
        edges: tuple[dict[str, Any], ...] = (
            {"queries": [133, 133], "keys": [64, 64], "heads": (2, 1)},  # the first queries see nothing
            {"queries": [65, 3], "keys": [40, 33], "window": 7, "beyond": 1, "softcap": 1.5},
            {"queries": [40], "window": 1},
            {"queries": [1, 0, 33, 16, 0], "keys": [20, 3, 0, 18, 2], "causal": False, "beyond": 40},
            {"queries": [0, 0], "beyond": 5, "sinks": True},
            {"queries": [33], "scale": -0.3},
            {"queries": [18], "scale": 0.0},
            {"queries": [20], "size": 1},
            {"queries": [17, 17], "keys": [50, 50], "size": 16, "value_size": 40},
        )
        for given in edges:
            self._attention(f"{given}", **{"size": 64, **given})
        for size in (16, 40, 64, 96, 128) if self.single else (16, 40, 64, 96, 128, 256):
            for name, given in masks.items():
                self._attention(f"{size} {name}", **given, size=size)
        if not self.single:
            narrow = {"size": 192, "value_size": 128}
            self._attention("192/128", queries=[200], **narrow)
            self._attention("192/128 packed", queries=[133, 67], **narrow)
            for layout in attention_checks.LAYOUTS:
                self._attention(f"layout {layout}", queries=[150], layouts=(layout,) * 3, size=128)
        self.add_typed("attention nan", attention_checks.nan_stays_in_its_sequence, (0, 200, 500), self.device)
        self.add_typed("attention large scores", attention_checks.large_scores_do_not_overflow, self.device)

    def _attention(self, name: str, **given: Any) -> None:
        self.add_typed(f"attention {name}", attention_checks.attention, **given, device=self.device)

    def repeats(self) -> None:
        names = {name for names in spec.OPS.values() for name in names} - {"norm_partials"}
        if self.capability < 89:
            names -= set(spec.OPS["float8"])
        for name in sorted(names):
            self.add(f"repeats {name}", _repeat, name, scale=0.3)


def _repeat(launches: ModuleType, random: checks.Random, name: str) -> None:
    every_launch.cases(launches, random, 150, 136, 72)[name].check_repeats()


def _x(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def cases(capability: int, dtype: torch.dtype, device: str = "cpu") -> list[Case]:
    """All that a GPU of that capability launches with tensors of that dtype."""
    made = _Cases(capability, dtype, device)
    for part in (
        *(made.linear, made.gated, made.merged, made.grouped),
        *(made.rows, made.float8, made.loss, made.attention, made.repeats),
    ):
        part()
    return made.found


def faults(
    case: Case,
    capability: int,
    seeds: Sequence[int],
    launches: ModuleType | None = None,
    processors: int | None = None,
) -> tuple[dict[str, str], int, float]:
    """What is wrong, by its kind; how many launches there were, and how long they took in seconds. launches: whose, of
    Triton's kernels when not given. processors: as for `gpu`."""
    found: dict[str, str] = {}
    launched, seconds = 0, 0.0
    for seed in seeds:
        with gpu(capability, seed, processors=processors), _tiles_of(case):
            from zbkern.kernels.triton import kernels

            torch.manual_seed(0)
            try:
                case.run(kernels if launches is None else launches)
            except Exception as error:
                kind = "wrong" if isinstance(error, AssertionError) else type(error).__name__
                text = str(error).strip() or traceback.format_exc(limit=-2)
                found.setdefault(f"{kind} (seed {seed})", text.splitlines()[0])
        for finding in library.findings():
            found.setdefault(finding.kind, f"{finding.kernel}: {finding.text}")
        done = library.launches()
        launched, seconds = launched + len(done), seconds + sum(each.seconds for each in done)
    return found, launched, seconds


def faults_at(capability: int, dtype: str, index: int, seeds: Sequence[int]) -> tuple[dict[str, str], int, float]:
    """faults() of a case by its place, for another process."""
    return faults(cases(capability, DTYPES[dtype])[index], capability, seeds)


@contextlib.contextmanager
def _tiles_of(case: Case) -> Iterator[None]:
    """Inside, kernels have that case's tiles."""
    real = tiles.choose

    def choose(op: str, p: int, q: int, r: int, dtype: str, capability: int, sms: int, *more: object) -> tiles.Tile:
        return real(op, max(p, 4096), max(q, 4096), r, dtype, capability, 132, *more)

    with mock.patch.object(tiles, "choose", choose if case.large else real):
        yield
