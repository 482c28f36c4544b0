"""Megatron's layouts: read, written, and both undo each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbkern.pipeline import layout_to_partition, partition_to_layout
from zbkern.schedules.layout import check_partition, layer_of, numbers_of


@pytest.mark.parametrize(
    ("text", "layers", "partition"),
    [
        ("EttttL", "EttttL", [0]),
        ("E|t*3|tL", "EttttLL", [0, 1, 4]),
        ("Et*3|(tt|)*2tL", "EttttttttL", [0, 4, 6, 8]),
        ("E, t | (t*2|)*2 m | L", "E" + "t" * 5 + "mLL", [0, 2, 4, 6, 7]),
        ("(t|)*3t", "tttt", [0, 1, 2, 3]),
        ("((t|)*2tt|)*2L", "t" * 8 + "L", [0, 1, 2, 4, 5, 6, 8]),
        ("E|t*3|(tt|)*29,m|L", "E" + "t" * 61 + "mLL", [0, 1, *range(4, 63, 2), 63]),  # DeepSeek-V3 on 33 chunks
    ],
)
def test_layouts_are_read_and_written(text: str, layers: str, partition: list[int]) -> None:
    assert list(layout_to_partition(text, layers)) == partition
    assert list(layout_to_partition(partition_to_layout(partition, layers), layers)) == partition


def test_what_is_written_is_short() -> None:
    assert partition_to_layout([0, 1, *range(4, 63, 2), 63], "E" + "t" * 61 + "mLL") == "E|t*3|(tt|)*29m|L"


@given(st.integers(1, 12), st.data())
def test_written_and_read_again(blocks: int, data: st.DataObject) -> None:
    layers = "E" + "t" * blocks + "LL"
    firsts = data.draw(st.sets(st.integers(1, blocks + 1)))
    partition = (0, *sorted(firsts))
    assert layout_to_partition(partition_to_layout(partition, layers), layers) == partition


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|tL", r"must have the model's layers, 'Et\*4L'; got 'Et\*3L'"),
        ("Et||tttL", "none in chunk 1"),
        ("Etttt|L|", "none in chunk 2"),
        ("Ett|xtL", "got 'x'"),
        ("E(tt|ttL", r"got '\('"),
        ("Et*tttL", r"got '\*'"),
    ],
)
def test_bad_layouts(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_to_partition(text, "EttttLL")


@pytest.mark.parametrize("partition", [[], [1, 2], [0, 2, 2], [0, 7], [0, 6], [0.5, 2], [0, 2.5, 2.5], [0, 7.5]])
def test_bad_partitions(partition: list[float]) -> None:
    with pytest.raises(ValueError, match=r"partition must|layout has norm, head and loss in one chunk"):
        partition_to_layout(partition, "EttttLL")


def test_halves_have_numbers_and_no_layout() -> None:
    names = ["embed", "blocks.0:attention", "blocks.0:mlp", "blocks.1", "blocks.2:attention", "blocks.2:mlp", "head"]
    assert numbers_of(names) == [0, 1, 1.5, 2, 3, 3.5, 4]
    assert list(dict.fromkeys(map(layer_of, names))) == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert str(check_partition("f", (0, 1.0, 2.5), 4)) == "[0, 1, 2.5]"
    with pytest.raises(TypeError, match=r"4\.5 for the second half of layer 4; got \[0, 2\.25\]"):
        check_partition("f", [0, 2.25], 4)
    with pytest.raises(ValueError, match=r"a layout has whole layers; got one that begins within one: 2\.5"):
        partition_to_layout([0, 2.5], "EttttLL")
    assert partition_to_layout([0, 2.0], "EttttLL") == "Et|t*3L"
