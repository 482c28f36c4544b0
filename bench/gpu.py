"""Our kernels on a GPU beside torch's and other libraries': rates, and ratios in the same run.

    python -m bench.gpu [--impl triton] [--rows W] [--seconds 360]

The time of a row is shared by its shapes; a shape that no time is left for is named, not dropped. No figure is printed
without a check, which needs no other library: a peer that fails costs its own ratio only. Ratios are medians over
rounds of the peer's time over ours, so above 1 we are faster. --out FOLDER keeps gpu.json, after each figure.

After an illegal access no call of a process reaches the GPU any more, and a row may hang: the process then ends, and
the rows that it has not begun are named. --continue measures those.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench import ahead, gpu_peers, gpu_rows, report
from bench.gpu_case import Bench, Case, Row, Sizes
from zbkern import testing
from zbkern.kernels import dispatch
from zbkern.reporting import markdown_table

HEADER = ("row", "shape", "ours", "time of a peer over ours", "floor / target", "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--impl", default="triton", help="whose kernels: triton, cuda, torch, or auto per op")
    parser.add_argument("--rows", nargs="*", default=[""], help="rows whose name contains one of these")
    parser.add_argument("--seconds", type=float, default=360.0, help="for everything, compilation included")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: a test of this program, not a measurement")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="with rows that --out has not yet")
    report.add_out(parser)
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("cannot run: no CUDA device (--device cpu --impl torch --tiny tries the program without one)")
        return 2
    sizes = Sizes.tiny() if arguments.tiny else Sizes()
    bench = Bench(device, getattr(torch, arguments.dtype), arguments.impl, sizes)
    rows = [row for row in gpu_rows.ROWS if any(part.lower() in row.name.lower() for part in arguments.rows)]
    if not rows:
        print(f"no row matches {arguments.rows!r}; there are: {', '.join(row.name for row in gpu_rows.ROWS)}")
        return 2
    figures = found_before(arguments.out) if arguments.goes_on else []
    rows = [row for row in rows if row.name not in {figure["row"] for figure in figures}]
    result: dict[str, Any] = {"impl": arguments.impl, "dtype": arguments.dtype, "versions": gpu_peers.versions()}
    result |= {"rows": figures, "running": None, "left": [row.name for row in rows]}
    report.write_json("gpu", result, arguments.out)
    end = time.perf_counter() + arguments.seconds
    compilers = ahead.Compilers()

    def begins(row: Row) -> None:
        share = max(end - time.perf_counter(), 0.0) / len(result["left"])
        result.update(running=row.name, left=result["left"][1:])
        report.write_json("gpu", result, arguments.out)
        faulthandler.dump_traceback_later(60 + 2 * share, exit=True, file=sys.__stderr__)
        if bench.impl != "torch":
            compilers.compile(ours(row, bench))

    try:
        for figure in measure(rows, bench, arguments.seconds, begins):
            figures.append(figure)
            print(" | ".join(cells(figure)), flush=True)
            report.write_json("gpu", result, arguments.out)
    finally:
        faulthandler.cancel_dump_traceback_later()
        compilers.close()
    result["running"] = None
    print("\n" + markdown_table(HEADER, [cells(figure) for figure in figures]))
    if result["left"]:
        print(f"not begun, as this process has lost the GPU: {', '.join(result['left'])} (--continue measures them)")
    print("\n" + report.write_json("gpu", result, arguments.out))
    return 1 if any("wrong" in figure for figure in figures) else 0


def found_before(folder: Path | None) -> list[dict[str, Any]]:
    """The figures in FOLDER/gpu.json, and the row in which the process that wrote it ended."""
    if folder is None or not (folder / "gpu.json").exists():
        return []
    found = json.loads((folder / "gpu.json").read_text())["figures"]
    ended = [] if found["running"] is None else [{"row": found["running"], "wrong": "the process ended in it"}]
    return found["rows"] + ended


def ours(row: Row, bench: Bench) -> Iterator[Callable[[], object]]:
    """Everything in it that runs kernels of ours."""
    with contextlib.suppress(Exception):  # `measure` will meet it, too
        for case in row.cases(bench):
            yield case.ours
            yield from (run for name, run in case.peers.items() if "our" in name)


def measure(
    rows: list[Row], bench: Bench, seconds: float, begins: Callable[[Row], None] = lambda row: None
) -> Iterator[dict[str, Any]]:
    """A figure for every shape of every row: measured, or why not; up to a row after which the GPU does not answer.
    begins: is told of each row before anything in it runs."""
    end = time.perf_counter() + seconds
    for index, row in enumerate(rows):
        begins(row)
        begin = time.perf_counter()
        share = (end - begin) / (len(rows) - index)
        lost = False
        try:
            for case in row.cases(bench):
                spent = time.perf_counter() - begin
                figure: dict[str, Any] = {"row": row.name, "shape": case.label, "unit": row.unit, "goal": row.goal}
                figure |= {"floor": case.floor, "target": case.target}
                if spent > share:
                    yield figure | {"why not": "the row's time was up"}
                    continue
                found = one(row, case, bench, min(share - spent, max(share / 6, 0.1)))
                lost = ("rate" not in found or "missing" in found) and not answers(bench.device)
                yield figure | found
                if lost:
                    break
        except dispatch.UnavailableError as error:
            yield {"row": row.name, "why not": str(error)}
        except torch.OutOfMemoryError as error:
            yield {"row": row.name, "why not": f"out of memory: {str(error).partition('.')[0]}"}
        except Exception as error:  # the other rows still count
            lost = isinstance(error, torch.AcceleratorError) or not answers(bench.device)
            yield {"row": row.name, "wrong": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        if lost:
            return


def answers(device: torch.device) -> bool:
    """Whether this process still reaches the GPU."""
    try:
        torch.zeros(1, device=device).item()
    except Exception:
        return False
    return True


def one(row: Row, case: Case, bench: Bench, seconds: float) -> dict[str, Any]:
    """One shape: runs everything once, checks, then times in turn for about so many seconds."""
    begin = time.perf_counter()
    case.ours()
    candidates, missing = {"ours": case.ours}, {}
    for name, peer in case.peers.items():
        try:
            peer()
            candidates[name] = peer
        except Exception as error:  # another library's kernel: it may refuse this GPU, dtype or shape
            missing[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    result: dict[str, Any] = {"missing": missing} if missing else {}
    try:
        case.check()
    except AssertionError as error:
        return result | {"wrong": str(error)}
    except Exception as error:
        return result | {"why not": f"its check failed: {type(error).__name__}: {str(error)[:200]}"}
    left = seconds - (time.perf_counter() - begin)
    if row.unit == "us":
        times = {name: testing.Timing(tuple(run() for _ in range(10))) for name, run in candidates.items()}
    else:
        prepared = {name: lambda run=run: [run] for name, run in candidates.items()}
        begin = time.perf_counter()
        testing.measure(prepared, rounds=1, warmup=1, device=bench.device)
        one_round = (time.perf_counter() - begin) / 2
        rounds = int(max(5, min(50, left / max(one_round, 1e-6))))
        times = testing.measure(prepared, rounds=rounds, warmup=1, device=bench.device)
    ours = times.pop("ours")
    result["rate"] = row.rate(case, ours.median)
    result["seconds"] = ours.median
    result["spread"] = statistics.pstdev(ours.seconds) / ours.median
    result["peers"] = {
        name: {"ratio": t.ratio(ours), "rate": row.rate(case, t.median), "seconds": t.median}
        for name, t in times.items()
    }
    return result | {"goal met": goal_met(row, case, result) if bench.device.type == "cuda" else ""}


def goal_met(row: Row, case: Case, result: dict[str, Any]) -> str:
    """Which of the goals is met: "target", "floor" or "below"; "" where there are none, or no peer to compare with."""
    if case.floor is None or case.target is None:
        return ""
    value = result["rate"]
    if row.goal == "ratio":
        baseline = case.baseline or next(iter(case.peers))
        if baseline not in result["peers"]:
            return ""
        value = result["peers"][baseline]["ratio"]
    better = -1 if row.unit == "us" else 1
    for name, goal in (("target", case.target), ("floor", case.floor)):
        if better * value >= better * goal:
            return name
    return "below"


def cells(figure: dict[str, Any]) -> list[str]:
    """A row of the table."""
    label = [figure["row"], figure.get("shape", "")]
    for key in ("why not", "wrong"):
        if key in figure:
            return [*label, "not measured" if key == "why not" else "WRONG", figure[key], "", ""]
    ratios = [f"{name} {peer['ratio']:.2f}" for name, peer in figure["peers"].items()]
    ratios += [f"{name} failed" for name in figure.get("missing", {})]
    goals = ""
    if figure["floor"] is not None:
        form = ".2f" if figure["goal"] == "ratio" else ".3g"
        goals = f"{figure['floor']:{form}} / {figure['target']:{form}}"
    return [*label, f"{figure['rate']:.3g} {figure['unit']}", ", ".join(ratios), goals, figure["goal met"]]


if __name__ == "__main__":
    sys.exit(main())
