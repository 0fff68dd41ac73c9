import pytest

from cgdnn.plan.partition import (
    MAX_PARTIAL_BYTES,
    MAX_PARTIALS,
    MAX_PIECES,
    PIECE_NANOSECONDS,
    cut,
    partial_limit,
)


def test_cheap_step_stays_whole():
    assert cut(64, cost=1.0) == [(0, 64)]


def test_pieces_differ_by_at_most_one_unit():
    assert cut(10, cost=PIECE_NANOSECONDS * 0.4) == [(0, 2), (2, 5), (5, 7), (7, 10)]


def test_never_more_pieces_than_units():
    assert cut(3, cost=1e9) == [(0, 1), (1, 2), (2, 3)]


def test_never_more_pieces_than_the_limit():
    assert len(cut(1000, cost=1e9)) == MAX_PIECES
    assert len(cut(1000, cost=1e9, most=5)) == 5


def test_nothing_to_cut():
    assert cut(0, cost=1e9) == [(0, 0)]


@pytest.mark.parametrize("extent", [1, 2, 31, 32, 33, 1000])
@pytest.mark.parametrize("cost", [0.0, 100.0, 1e4, 1e9])
def test_pieces_cover_the_extent_once(extent, cost):
    pieces = cut(extent, cost)
    assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == extent
    assert all(begin < end for begin, end in pieces)


def test_partials_are_limited_by_number_and_by_memory():
    assert partial_limit(4) == MAX_PARTIALS
    assert partial_limit(MAX_PARTIAL_BYTES // 3) == 3
    assert partial_limit(MAX_PARTIAL_BYTES * 2) == 1
    assert partial_limit(0) == MAX_PARTIALS
