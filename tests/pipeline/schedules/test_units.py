"""Numbers and names as people read them, with the units that are known."""

from __future__ import annotations

import pytest

from zbkern.pipeline.schedules.units import amount, duration, number, some


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (0, "0 bytes"), (999, "999 bytes"), (1e3, "1 kB"), (512e6, "512 MB"), (2.45e10, "24.5 GB"), (1e12, "1 TB"),
        (3.2e15, "3200 TB"),
    ],
)  # fmt: skip
def test_bytes_have_the_largest_unit_that_they_fill(memory: float, said: str) -> None:
    assert amount(memory, "bytes") == said


@pytest.mark.parametrize("unit", [None, ""])
def test_without_a_unit_there_is_a_number_alone(unit: str | None) -> None:
    assert amount(2.45e10, unit) == "2.45e+10"
    assert duration(15.0, unit) == "15"
    assert duration(15.0, "ms") == "15 ms"


def test_numbers_have_four_digits_or_are_whole() -> None:
    assert [number(value) for value in (0.5, 3.14159, 9999.4, 123456.7)] == ["0.5", "3.142", "9999", "123457"]


def test_of_many_names_the_first_few_are_said() -> None:
    assert some([]) == "none"
    assert some(["a", "b"], 2) == "'a', 'b'"
    assert some([*"abcdefg"]) == "'a', 'b', 'c', 'd', 'e' and 2 more"
