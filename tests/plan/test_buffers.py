from cgdnn.layers._base import Buffer, Step, Use
from cgdnn.plan.buffers import ALIGNMENT, SMALL_BYTES, aligned, place, root
from cgdnn.plan.tasks import Task

COUNT = SMALL_BYTES // 2 + 7  # elements of a buffer that is not small
A, B, C = (Buffer(name, (COUNT,), kind="temporary") for name in "abc")


def sizes(buffer: Buffer) -> int:
    return 2 * buffer.size  # no multiple of the alignment


SIZE = aligned(2 * COUNT)


def tasks(*used: list[Buffer]) -> list[Task]:
    def touch(*_arrays: object) -> None:
        raise AssertionError("nothing is run here")

    return [
        Task(f"t{i}", -1, Step(touch, [Use(buffer, "update", "whole") for buffer in buffers]))
        for i, buffers in enumerate(used)
    ]


def test_aligned():
    assert [aligned(size) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_root_follows_aliases():
    second = Buffer("second", (1, COUNT), alias=A)
    assert root(Buffer("third", (COUNT,), alias=second)) is A
    assert root(A) is A


def test_buffers_that_live_together_lie_apart():
    # a lives in tasks 0-2, b in 1-2
    placement = place(tasks([A], [A, B], [B, A]), sizes)
    assert placement.places == {A: 0, B: SIZE}
    assert placement.arena_bytes == 2 * SIZE


def test_memory_is_reused_after_the_last_use():
    # a lives in 0-1, b in 1-2, c in 2-3: c takes the place of a
    placement = place(tasks([A], [A, B], [B, C], [C]), sizes)
    assert placement.places == {A: 0, B: SIZE, C: 0}
    assert placement.arena_bytes == 2 * SIZE


def test_gap_that_is_too_small_is_not_used():
    large = Buffer("large", (2 * COUNT,), kind="partial")
    # a dies before large is made; b lies behind a
    placement = place(tasks([A], [A, B], [B, large], [large]), sizes)
    assert placement.places[large] == 2 * SIZE


def test_small_buffers_keep_their_place():
    # the second could have the place of the first; but then its tasks would wait for that one's
    first, second = (Buffer(name, (32,), kind="partial") for name in "st")
    placement = place(tasks([first], [second], [second, A], [B]), sizes)
    assert placement.places == {first: 0, second: ALIGNMENT, A: 2 * ALIGNMENT, B: 2 * ALIGNMENT}


def test_aliases_share_a_place():
    view = Buffer("view", (COUNT, 1), kind="temporary", alias=A)
    placement = place(tasks([A], [B], [view]), sizes)
    assert placement.places == {A: 0, B: SIZE}


def test_long_lived_buffers_are_not_placed():
    placement = place(tasks([Buffer("blob", (32,)), Buffer("w", (32,), kind="param")]), sizes)
    assert placement.places == {}
    assert placement.arena_bytes == 0


def test_scratch_begins_anew_in_every_task():
    s, t, u = (Buffer(name, (32,), kind="scratch") for name in "stu")
    placement = place(tasks([s, t], [u], []), sizes)
    assert placement.places == {s: 0, t: ALIGNMENT, u: 0}
    assert placement.scratch_bytes == 2 * ALIGNMENT
    assert placement.arena_bytes == 0


def test_scratch_that_two_steps_use_stays_in_its_place():
    s, t, u = (Buffer(name, (32,), kind="scratch") for name in "stu")
    placement = place(tasks([s, t], [t], [u, t]), sizes)
    assert placement.places == {s: 0, t: ALIGNMENT, u: 2 * ALIGNMENT}
    assert placement.scratch_bytes == 3 * ALIGNMENT
