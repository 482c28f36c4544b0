"""The stages on one GPU without a GPU: all schedules run, are checked, and are simulated."""

from __future__ import annotations

import pytest
import torch

from bench import virtual_stages


def runner() -> virtual_stages.Runner:
    torch.manual_seed(0)
    model = [virtual_stages.Block(8) for _ in range(2 * virtual_stages.STAGES)]
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    virtual_stages.plain_gradients(model, x, target, 8)
    return virtual_stages.Runner(model, x, target, [])


def test_every_schedule_runs_and_is_simulated() -> None:
    costs, rows = virtual_stages.compare(runner(), microbatches=8, rounds=1)
    assert [len(each.forward) for each in costs.values()] == [4, 8]
    assert len(rows) == 7
    assert all(row.measured.cost > 0 and row.simulated > 0 for row in rows)
    assert virtual_stages.show(rows).count("\n") == len(rows) + 1


def test_a_wrong_gradient_is_no_figure() -> None:
    wrong = runner()
    wrong.model[5].up.weight.grad[0, 0] += 1
    with pytest.raises(AssertionError, match=r"1F1B.*up\.weight: gradients differ"):
        wrong.run({"1F1B": (virtual_stages.schedules.one_f_one_b(4, 8), "planned")}, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture) -> None:
    assert virtual_stages.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().out
