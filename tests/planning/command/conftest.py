"""`zbkern plan` as tests of it run it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zbkern import __main__


@pytest.fixture
def run_plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs it in a wide terminal, and returns what it prints; where the status is 2, the error, and nothing else."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object, status: int = 0) -> str:
        try:
            found = __main__.main(["plan", *map(str, arguments)])
        except SystemExit as stop:  # of argparse
            found = stop.code
        printed = capsys.readouterr()
        assert found == status, printed.err
        assert not status or not printed.out
        return printed.err if status else printed.out

    return run
