"""All tests that need a GPU, on as many processes as there are cores: what `make test-gpu` runs.

    python tests/gpu/run.py [--out FOLDER] [--shards 16] [--seconds 500]

What fails is printed as it comes. FOLDER/log.txt has what every process printed, each line after the name of its
process, and FOLDER/summary.txt, rewritten all the time, what failed and which launches no test has reached: whoever
ends this early has what was found. First the tests that want the GPU to themselves, one after the other; then the rest
in shards, each in a process.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

_RESULT = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


class Results:
    """What became of each test, filled by a thread for each process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, str] = {}
        self._lock = threading.Lock()
        (folder / "log.txt").unlink(missing_ok=True)

    def read(self, name: str, lines: Iterable[str]) -> None:
        """Takes in pytest's lines as they come: into the log, and tests that fail onto the screen."""
        with (self.folder / "log.txt").open("a", buffering=1) as log:
            for line in lines:
                log.write(f"{name}| {line}")
                match = _RESULT.match(line)
                if match is None:
                    continue
                with self._lock:
                    self.found[match[1]] = match[2]
                    if match[2] in ("FAILED", "ERROR"):
                        print(f"{match[2]} {match[1]}   ({name})", flush=True)

    def counts(self) -> str:
        with self._lock:
            return ", ".join(f"{n} {kind.lower()}" for kind, n in sorted(Counter(self.found.values()).items()))

    def summary(self) -> str:
        """Counts, what failed, and which launches no test has reached; in FOLDER/summary.txt, too."""
        lines = [f"{self.counts() or 'no test has run'}; what was printed is in {self.folder / 'log.txt'}"]
        lines += [f"FAILED {test}" for test in self.failed()]
        lines.append("launches that no test has reached: " + (", ".join(unreached(self.ran())) or "none"))
        text = "\n".join(lines) + "\n"
        beside = self.folder / "summary.txt.new"
        beside.write_text(text)
        beside.replace(self.folder / "summary.txt")
        return text

    def failed(self) -> list[str]:
        with self._lock:
            return sorted(test for test, result in self.found.items() if result in ("FAILED", "ERROR"))

    def ran(self) -> set[str]:
        """Tests that did something."""
        with self._lock:
            return {test for test, result in self.found.items() if result != "SKIPPED"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "gpu", help="where the logs go")
    parser.add_argument("--shards", type=int, default=os.cpu_count() or 4)
    parser.add_argument(
        "--seconds", type=float, default=500.0, help="for everything; what has not run by then is named"
    )
    parser.add_argument("--tests", default="tests/gpu", help="the tests to run")
    arguments = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available() and arguments.tests == "tests/gpu":
        print("cannot run: torch sees no CUDA device")
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds
    results = Results(arguments.out)
    alone = {"alone": ["-m", "gpu and alone"]}
    shards = {
        f"shard-{i}": ["-m", "gpu and not alone", "--shard", f"{i}/{arguments.shards}"]
        for i in range(1, arguments.shards + 1)
    }
    codes = run(alone, arguments.tests, end, results) + run(shards, arguments.tests, end, results)
    print("\n" + results.summary(), end="")
    return 1 if results.failed() or any(code not in (0, 5) for code in codes) else 0  # 5: a shard without tests


def run(selections: dict[str, Sequence[str]], tests: str, end: float, results: Results) -> list[int]:
    """Runs pytest once for each selection, all at a time, until `end`; returns their exit codes."""
    left = end - time.monotonic()
    if left <= 0:
        return [1]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1", "COLUMNS": "500"}
    processes, threads = [], []
    for name, options in selections.items():
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options, "--seconds", f"{left:.0f}"]
        process = subprocess.Popen(
            [*command, tests], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        threads.append(threading.Thread(target=results.read, args=(name, process.stdout), daemon=True))
        threads[-1].start()
        processes.append(process)
    said = time.monotonic()
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end + 5:  # a test that began in time may hang
            for process in processes:
                process.kill()
        if time.monotonic() > said + 10:
            said = time.monotonic()
            print(f"{end - said:.0f} s left: {results.counts()}", flush=True)
            results.summary()
        time.sleep(0.1)
    for thread in threads:
        thread.join(timeout=5)
    return [process.wait() for process in processes]


def unreached(ran: Iterable[str]) -> list[str]:
    """The launches whose names are in none of these tests of every launch."""
    from zbkern.kernels import spec

    names = [name for name in spec.KERNELS if name != "norm_partials"]
    reached = {word for test in ran if "every_launch" in test for word in re.split(r"[\[\]-]", test)}
    return [name for name in names if name not in reached]


if __name__ == "__main__":
    sys.exit(main())
