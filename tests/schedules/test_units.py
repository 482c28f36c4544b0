"""Numbers and names as people read them, with the units that are known."""

from __future__ import annotations

import pytest

from zbkern.schedules.units import amount, duration, enough, number, some


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (0, "0 bytes"), (999, "999 bytes"), (1e3, "1 kB"), (512e6, "512 MB"), (2.45e10, "24.5 GB"), (1e12, "1 TB"),
        (3.2e15, "3200 TB"),
    ],
)  # fmt: skip
def test_bytes_have_the_largest_unit_that_they_fill(memory: float, said: str) -> None:
    assert amount(memory, "bytes") == said


@pytest.mark.parametrize("memory", [0.0, 1e-320, 1 / 3, 4 / 3, 2.0, 9999.1, 12345.4, 24.561e9, 999.96e9, 3e100])
@pytest.mark.parametrize("unit", [None, "bytes"])
def test_an_amount_that_is_enough_is_not_rounded_down(memory: float, unit: str | None) -> None:
    shown, prefix = [*enough(memory, unit).split(), ""][:2]
    assert memory <= float(shown) * {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}.get(prefix, 1) <= memory * 1.001


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
