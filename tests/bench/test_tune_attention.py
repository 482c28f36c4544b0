"""The search for tiles of attention: what it tries, and that a wrong candidate never wins."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from bench import tune_attention
from zbkern.kernels import tiles
from zbkern.kernels.tiles import AttentionTile

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_the_rules_choice_is_a_candidate(size: int, capability: int) -> None:
    for kernel in tune_attention.KERNELS:
        candidates = tune_attention.candidates(kernel, size, capability)
        assert len(set(candidates)) == len(candidates) > 4
        for packed in (False, True):
            assert tiles.attention(kernel, size, "bfloat16", capability, packed) in candidates


@pytest.mark.parametrize("kernel", tune_attention.KERNELS)
def test_a_wrong_candidate_never_wins(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tune_attention.Problem(kernel, 16, True, 40, "cpu")
    right, wrong = AttentionTile(64, 64, 4, 1), AttentionTile(64, 64, 4, 4)
    assert problem.rules not in (right, wrong)
    monkeypatch.setattr(tune_attention, "candidates", lambda *_: [right, wrong])
    check = tune_attention.testing.assert_close

    def fail_with_the_wrong_one(got: object, wanted: object) -> None:
        check(got, wanted)
        tile = tiles.attention(kernel, 16, "bfloat16", 90, True)
        assert tile != wrong

    monkeypatch.setattr(tune_attention.testing, "assert_close", fail_with_the_wrong_one)
    seconds = {right: 1.0, wrong: 0.5, problem.rules: 2.0}

    class Timing:
        @property
        def median(self) -> float:
            return seconds[tiles.attention(kernel, 16, "bfloat16", 90, True)]

    monkeypatch.setattr(tune_attention.testing, "measure", lambda *_, **__: {"tile": Timing()})
    best, rules, times = tune_attention.search(problem, 100.0)
    assert (best, rules) == (right, problem.rules)
    assert times == {right: 1.0, problem.rules: 2.0}
