"""Graphs are drawn as ``a -> b``: b waits for a. A range is written [start, stop)."""

from cgdnn.layers._base import Buffer
from cgdnn.plan.depend import MANY, connect
from cgdnn.plan.tasks import Access, Task
from tests.plan.planning import reads, updates, writes

BLOB = Buffer("blob", (100,))


def graph(*touched: list[Access], gates: tuple[int, ...] = ()) -> dict[str, set[str]]:
    """Connect tasks named 0, 1, ... and return what each waits for, joins included."""
    tasks = [
        Task(str(number), -1, None, accesses=accesses, gate=number in gates)
        for number, accesses in enumerate(touched)
    ]
    ordered, successors, waits = connect(tasks)
    before: dict[str, set[str]] = {task.name: set() for task in ordered}
    for number, many in enumerate(successors):
        for successor in many:
            before[ordered[successor].name].add(ordered[number].name)
    assert [len(before[task.name]) for task in ordered] == waits
    return before


def test_reader_waits_for_the_writer():
    # 0 writes -> 1 reads
    assert graph([writes(BLOB, 0, 8)], [reads(BLOB, 0, 8)]) == {"0": set(), "1": {"0"}}


def test_readers_do_not_wait_for_each_other():
    # 0 -> 1, 0 -> 2
    touched = ([writes(BLOB, 0, 8)], [reads(BLOB, 0, 8)], [reads(BLOB, 0, 8)])
    assert graph(*touched) == {"0": set(), "1": {"0"}, "2": {"0"}}


def test_writer_waits_for_the_readers_of_what_it_replaces():
    # 0 -> 1, 0 -> 2; 1 -> 3, 2 -> 3 (and 0 -> 3, the writer that it replaces)
    touched = ([writes(BLOB, 0, 8)], [reads(BLOB, 0, 4)], [reads(BLOB, 4, 8)], [writes(BLOB, 0, 8)])
    assert graph(*touched)["3"] == {"0", "1", "2"}


def test_piece_waits_only_for_the_pieces_that_overlap_it():
    # 0 [0, 4)   1 [4, 8)     2 [0, 3) waits for 0, 3 [3, 8) for both
    touched = ([writes(BLOB, 0, 4)], [writes(BLOB, 4, 8)], [reads(BLOB, 0, 3)], [reads(BLOB, 3, 8)])
    found = graph(*touched)
    assert found["2"] == {"0"}
    assert found["3"] == {"0", "1"}


def test_only_the_last_writer_counts():
    # 0 -> 1 -> 2
    touched = ([writes(BLOB, 0, 8)], [writes(BLOB, 0, 8)], [reads(BLOB, 0, 8)])
    assert graph(*touched) == {"0": set(), "1": {"0"}, "2": {"1"}}


def test_partly_replaced_range_has_two_writers():
    # 0 [0, 8), 1 [2, 4): a read of [0, 4) needs both
    touched = ([writes(BLOB, 0, 8)], [writes(BLOB, 2, 4)], [reads(BLOB, 0, 4)])
    assert graph(*touched)["2"] == {"0", "1"}


def test_updates_of_one_range_are_a_chain():
    # 0 -> 1 -> 2
    found = graph(*([updates(BLOB, 0, 8)] for _ in range(3)))
    assert found == {"0": set(), "1": {"0"}, "2": {"1"}}


def test_task_does_not_wait_for_itself():
    touched = ([reads(BLOB, 0, 8), writes(BLOB, 0, 8)], [writes(BLOB, 0, 8), reads(BLOB, 0, 8)])
    assert graph(*touched) == {"0": set(), "1": {"0"}}


def test_other_spaces_are_independent():
    touched = ([writes(BLOB, 0, 8, space=1)], [writes(BLOB, 0, 8, space=2)])
    assert graph(*touched) == {"0": set(), "1": set()}


def test_empty_range_touches_nothing():
    assert graph([writes(BLOB, 0, 8)], [reads(BLOB, 4, 4)]) == {"0": set(), "1": set()}


def test_range_with_a_hole_that_nobody_touched():
    # 0 [0, 2), 1 [6, 8); 2 [0, 8) waits for both, 3 [3, 5) only for 2
    touched = (
        [writes(BLOB, 0, 2)],
        [writes(BLOB, 6, 8)],
        [writes(BLOB, 0, 8)],
        [reads(BLOB, 3, 5)],
    )
    found = graph(*touched)
    assert found["2"] == {"0", "1"}
    assert found["3"] == {"2"}


def test_many_pieces_after_many_pieces_meet_in_a_join():
    # n writers -> join -> n readers: 2 n edges, not n * n
    count = MANY + 2
    writers = [[writes(BLOB, i, i + 1)] for i in range(count)]
    readers = [[reads(BLOB, 0, count)] for _ in range(count)]
    found = graph(*writers, *readers)
    assert found["blob.join"] == {str(i) for i in range(count)}
    assert all(found[str(count + i)] == {"blob.join"} for i in range(count))


def test_writer_after_many_readers_waits_for_their_join():
    # 0 -> n readers -> join -> writers of the two halves
    count = MANY + 2
    readers = [[reads(BLOB, 0, 8)] for _ in range(count)]
    found = graph([writes(BLOB, 0, 8)], *readers, [writes(BLOB, 0, 4)], [writes(BLOB, 4, 8)])
    assert found["blob.join"] == {str(1 + i) for i in range(count)}
    assert found[str(count + 1)] == {"0", "blob.join"}
    assert found[str(count + 2)] == {"0", "blob.join"}


def test_gate_waits_for_all_before_it_and_all_after_wait_for_it():
    # 0 -> 1; 2; gate 3 after 1 and 2 (0 comes before 1 anyway); 4 after 3 though it touches nothing
    touched = ([writes(BLOB, 0, 4)], [reads(BLOB, 0, 4)], [writes(BLOB, 50, 60)], [], [])
    found = graph(*touched, gates=(3,))
    assert found["3"] == {"1", "2"}
    assert found["4"] == {"3"}


def test_two_gates():
    # 0 -> gate 1 -> gate 2 -> 3
    assert graph([], [], [], [], gates=(1, 2)) == {"0": set(), "1": {"0"}, "2": {"1"}, "3": {"2"}}
