"""Takes one barrier, wait or fence after another out of compiled kernels: does the emulator notice?

    python -m tests.emulator.taken_out --capability 80 90 --most 4 --seeds 0 1

A barrier that orders nothing may go unnoticed; what is waited for must not.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("TRITON_INTERPRET", "0")

from tests.emulator import gpu
from tests.emulator.cases import BF16, FP32, PLAIN, Case, faults
from tests.support import attention_checks
from tests.support import launch_checks as checks

BARRIERS = {"bar.sync": r"^\s*bar\.sync[^;]*;"}
KINDS = {
    80: {
        **BARRIERS,
        "cp.async.wait_group": r"^\s*cp\.async\.wait_group[^;]*;",
        "cp.async.commit_group": r"^\s*cp\.async\.commit_group\s*;",
    },
    90: {
        **BARRIERS,
        "mbarrier wait": r"^\s*@!complete bra\.uni waitLoop;",
        "fence.proxy.async": r"^\s*fence\.proxy\.async[^;]*;",
        "wgmma.wait_group": r"^\s*wgmma\.wait_group[^;]*;",
        "wgmma.fence": r"^\s*wgmma\.fence[^;]*;",
        "cp.async.bulk.wait_group": r"^\s*cp\.async\.bulk\.wait_group[^;]*;",
        "expect_tx": r"^\s*@%p\d+ mbarrier\.arrive\.expect_tx[^;]*;",
    },
}
KINDS[100] = {kind: pattern for kind, pattern in KINDS[90].items() if "wgmma" not in kind} | {
    "tcgen05.wait": r"^\s*tcgen05\.wait::[^;]*;\s*bar\.sync\s+0;",
    "tcgen05.commit": r"^\s*@%p\d+ tcgen05\.commit[^;]*;",
}


class Tried(NamedTuple):
    """place: which of `count` instructions of that kind in the kernel that has most of them."""

    capability: int
    case: str
    kind: str
    place: int
    count: int
    found: list[str]


def cases() -> list[Case]:
    """A product, a sum of products, and attention."""

    def product(launches: ModuleType) -> None:
        checks.linear_fwd(launches, checks.Random(BF16, "cpu", scale=0.5), 130, 136, 328, bias=True)

    def products(launches: ModuleType) -> None:
        random = checks.Random(BF16, "cpu", scale=0.5)
        checks.linear_wgrad(launches, random, [200, 77], 136, 72, PLAIN, FP32, True, False)

    def attention(launches: ModuleType) -> None:
        attention_checks.attention(launches, BF16, [200], size=64)

    return [Case("linear_fwd", product), Case("linear_wgrad", products), Case("attention", attention)]


def tried(capability: int, case: Case, kind: str, most: int, seeds: Sequence[int]) -> Iterator[Tried]:
    """One after the other taken out, `most` of them, evenly over the kernel."""
    counts: list[int] = []

    def load(real: Callable[..., Any], number: int, name: str, code: bytes, *more: object) -> Any:
        text = code.decode()
        places = list(re.finditer(KINDS[capability][kind], text, re.MULTILINE))
        counts.append(len(places))
        at = number if len(places) <= most else number * (len(places) - 1) // (most - 1)
        if at < len(places):
            text = text[: places[at].start()] + text[places[at].end() :]
        return real(name, text.encode(), *more)

    utils = gpu.driver(capability).utils
    for number in range(most):
        counts.clear()
        gpu.forget()
        with mock.patch.object(utils, "load_binary", functools.partial(load, utils.load_binary, number)):
            found, *_ = faults(case, capability, seeds)
        gpu.forget()
        if number >= max(counts):
            return
        yield Tried(capability, case.name, kind, number, max(counts), sorted(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--most", type=int, default=4, help="of one kind in one kernel")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    counts: Counter[tuple[int, str, bool]] = Counter()
    for capability, case in itertools.product(arguments.capability, cases()):
        for kind in KINDS[capability]:
            for one in tried(capability, case, kind, arguments.most, arguments.seeds):
                counts[capability, kind, bool(one.found)] += 1
                what = f"without {kind} {one.place} of {one.count}"
                print(f"sm_{capability} {case.name:<13} {what:<44} {', '.join(one.found) or 'not noticed'}", flush=True)
    for capability, kind in dict.fromkeys((capability, kind) for capability, kind, _ in counts):
        noticed, unnoticed = counts[capability, kind, True], counts[capability, kind, False]
        print(f"sm_{capability} {kind:<26} {noticed} of {noticed + unnoticed} noticed")


if __name__ == "__main__":
    main()
