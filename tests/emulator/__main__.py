"""Runs compiled kernels in the emulator of PTX, a row for each case; returns 1 where one has a fault.

python -m tests.emulator --capability 80 90 --dtype bf16 fp32 --seeds 0 1 2 --only linear_wgrad
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections import Counter

os.environ["TRITON_INTERPRET"] = "0"

import torch

from tests.emulator.cases import DTYPES, cases, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th case from the i-th on")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    counts: Counter[tuple[int, str, str]] = Counter()
    part, parts = map(int, arguments.part.split("/"))
    for capability, dtype in itertools.product(arguments.capability, arguments.dtype):
        listed = [c for c in cases(capability, DTYPES[dtype]) if any(text in c.name for text in arguments.only)]
        for case in listed[part::parts]:
            found, launched, seconds = faults(case, capability, arguments.seeds)
            verdict = "; ".join(found) or "ok"
            counts[capability, dtype, "bad" if found else "ok"] += 1
            print(
                f"sm_{capability} {dtype} {case.name:<66} {launched:>4} launches {seconds:>7.2f} s  {verdict}",
                flush=True,
            )
            for kind, text in found.items():
                print(f"        {kind}: {text[:700]}", flush=True)
    for key, count in sorted(counts.items()):
        print(*key, count)
    return int(any(verdict == "bad" for *_, verdict in counts))


if __name__ == "__main__":
    sys.exit(main())
