"""The text format: what is written is read again, and every mistake names its line and field."""

from __future__ import annotations

import pytest

from tmojax.arena import Block, read_blocks, write_blocks
from tmojax.errors import InputError

BLOCKS = [Block("a, b", 7, -1, 9, ((2, 4), (5, 6))), Block("1", 10**15, 0, 1)]


def test_there_and_back(tmp_path):
    path = tmp_path / "blocks.csv"
    for blocks in (BLOCKS, BLOCKS[1:]):
        write_blocks(path, blocks)
        assert read_blocks(path) == (blocks, None)
        offsets = list(range(len(blocks)))
        write_blocks(path, blocks, offsets)
        assert read_blocks(path) == (blocks, offsets)


def test_the_plain_form(tmp_path):
    path = tmp_path / "blocks.csv"
    write_blocks(path, BLOCKS[1:], [4])
    assert path.read_text() == f"id,lower,upper,size,offset\n1,0,1,{10**15},4\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("id,lower,upper\n1,0,1\n", "line 1: the columns are id,lower,upper"),
        ("id,lower,upper,size,size\n", "line 1: the columns"),
        ("id,lower,upper,size,colour\n", "line 1: the columns"),
        ("id,lower,upper,size\n1,0,1\n", "line 2: has 3 fields for 4 columns"),
        ("id,lower,upper,size\n1,0,1,4\n1,0,1,4\n", "line 3, id: '1'"),
        ("id,lower,upper,size\n,0,1,4\n", "line 2, id"),
        ("id,lower,upper,size\n1,0.5,1,4\n", "line 2, lower: '0.5'"),
        ("id,lower,upper,size\n1,1,1,4\n", "line 2, upper: 1"),
        ("id,lower,upper,size\n1,0,1,0\n", "line 2, size: 0"),
        ("id,lower,upper,size\n1,0,1,nan\n", "line 2, size: 'nan'"),
        ("id,lower,upper,size,offset\n1,0,1,4,-8\n", "line 2, offset: -8"),
        ("id,lower,upper,size,gaps\n1,0,9,4,3\n", "line 2, gaps: '3'"),
        ("id,lower,upper,size,gaps\n1,0,9,4,3-9\n", "line 2, gaps: '3-9'"),
        ("id,lower,upper,size,gaps\n1,0,9,4,3-5 4-6\n", "line 2, gaps: '4-6'"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    path = tmp_path / "blocks.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_blocks(path)
    assert words in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.csv", "bytes.csv"):
        with pytest.raises(InputError, match=name):
            read_blocks(tmp_path / name)
