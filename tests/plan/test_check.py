import copy
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgdnn.errors import InternalError
from cgdnn.layers._base import Buffer
from cgdnn.plan.check import check, find_faults
from cgdnn.plan.depend import connect
from cgdnn.plan.tasks import Access, Program, Task
from tests.plan.planning import LENET, ROOT, drawn, iteration, reads, updates, writes

BLOB, OTHER = Buffer("blob", (100,)), Buffer("other", (100,))
PART, SUM = Buffer("part", (100,), kind="partial"), Buffer("sum", (100,), kind="temporary")
ARENA = 0


def names(program: Program) -> set[str]:
    return {fault.name for fault in find_faults(program)}


def test_ordered_tasks_pass():
    # t0 -> t1 -> t2
    touched = [[writes(BLOB, 0, 8)], [reads(BLOB, 0, 4)], [updates(BLOB, 2, 8)]]
    check(drawn(touched, [(0, 1), (1, 2)]))


def test_order_through_a_join_counts():
    # t0, t1 -> t2 (a join) -> t3
    touched = [[writes(BLOB, 0, 4)], [writes(BLOB, 4, 8)], [], [reads(BLOB, 0, 8)]]
    check(drawn(touched, [(0, 2), (1, 2), (2, 3)]))


def test_reads_of_the_same_bytes_need_no_order():
    check(drawn([[reads(BLOB, 0, 8)], [reads(BLOB, 0, 8)]]))


def test_ranges_that_only_meet_need_no_order():
    check(drawn([[writes(BLOB, 0, 4)], [writes(BLOB, 4, 8)]]))


def test_other_spaces_need_no_order():
    check(drawn([[writes(BLOB, 0, 8)], [writes(OTHER, 0, 8, space=2)]]))


def test_write_and_read_unordered():
    assert names(drawn([[writes(BLOB, 0, 8)], [reads(BLOB, 7, 9)]])) == {"missing edge"}


def test_read_and_later_write_unordered():
    assert names(drawn([[reads(BLOB, 0, 8)], [writes(BLOB, 7, 9)]])) == {"missing edge"}


def test_two_writes_unordered():
    assert names(drawn([[writes(BLOB, 0, 8)], [writes(BLOB, 7, 9)]])) == {"overlapping writes"}


def test_two_additions_unordered():
    assert names(drawn([[updates(BLOB, 0, 8)], [updates(BLOB, 0, 8)]])) == {"unordered reduction"}


def test_tasks_that_wait_for_each_other():
    program = drawn([[], [], []], [(0, 1), (1, 2), (2, 1)])
    assert names(program) == {"cycle"}


def test_edge_against_program_order():
    assert names(drawn([[reads(BLOB, 0, 8)], [writes(BLOB, 0, 8)]], [(1, 0)])) == {"backward edge"}


def test_wrong_wait_count():
    program = drawn([[], []], [(0, 1)])
    program.waits[1] = 2
    assert names(program) == {"wrong wait count"}


def test_partial_read_that_nothing_wrote():
    touched = [[writes(PART, 0, 4, ARENA)], [reads(PART, 0, 8, ARENA)]]
    assert names(drawn(touched, [(0, 1)])) == {"read before its write"}


def test_partial_whose_bytes_were_taken():
    # t0 writes part, t1 writes sum over it, t2 reads part: the order is there, the values are not
    touched = [
        [writes(PART, 0, 8, ARENA)],
        [writes(SUM, 4, 12, ARENA)],
        [reads(PART, 0, 8, ARENA)],
    ]
    assert names(drawn(touched, [(0, 1), (1, 2)])) == {"buffer reused early"}


def test_partial_whose_bytes_can_be_taken_too_soon():
    # t0 -> t1 use part; t2 -> t3 use sum in the same bytes, and no edge keeps them apart
    touched = [
        [writes(PART, 0, 8, ARENA)],
        [reads(PART, 0, 8, ARENA)],
        [writes(SUM, 0, 8, ARENA)],
        [reads(SUM, 0, 8, ARENA)],
    ]
    assert names(drawn(touched, [(0, 1), (2, 3)])) == {"buffer reused early"}
    check(drawn(touched, [(0, 1), (1, 2), (2, 3)]))


def test_blob_from_an_earlier_run_may_be_read():
    check(drawn([[reads(BLOB, 0, 8)]]))


# LeNet's real plan with one fault planted


@pytest.fixture(scope="module")
def lenet() -> Program:
    return iteration(LENET)


@pytest.fixture
def plan(lenet: Program) -> Program:
    """Return a copy of LeNet's plan to spoil: its tasks are copied, their steps are not."""
    tasks = [copy.copy(task) for task in lenet.tasks]
    for task in tasks:
        task.accesses = list(task.accesses)
    successors = [list(many) for many in lenet.successors]
    return dataclasses.replace(lenet, tasks=tasks, successors=successors, waits=list(lenet.waits))


def find(program: Program, name: str) -> int:
    return next(i for i, task in enumerate(program.tasks) if task.name.startswith(name))


def cut_edge(program: Program, before: int, after: int) -> None:
    program.successors[before].remove(after)
    program.waits[after] -= 1


def test_lenet_plan_is_right(lenet):
    assert find_faults(lenet) == []


def test_lenet_with_a_missing_edge(plan):
    writer = find(plan, "ip2.forward")
    for reader in list(plan.successors[writer]):
        cut_edge(plan, writer, reader)
    with pytest.raises(InternalError, match=r"missing edge: ip2\.forward and .*on ip2"):
        check(plan)


def test_lenet_with_overlapping_writes(plan):
    first = find(plan, "conv1.forward[0:")
    second = first + 1
    position, access = next(
        (i, access) for i, access in enumerate(plan.tasks[first].accesses) if access.writes
    )
    wider = dataclasses.replace(access, stop=access.stop + 4)
    plan.tasks[first].accesses[position] = wider
    with pytest.raises(InternalError, match="overlapping writes: ") as caught:
        check(plan)
    assert f"{plan.tasks[first].name} and {plan.tasks[second].name}" in str(caught.value)


def test_lenet_with_a_read_before_its_write(plan):
    writer = find(plan, "conv2.backward_weights")
    plan.tasks[writer].accesses = [
        access for access in plan.tasks[writer].accesses if access.buffer.kind != "partial"
    ]
    with pytest.raises(InternalError, match=r"read before its write: .*of conv2\.dw"):
        check(plan)


def test_lenet_with_a_buffer_reused_early(plan):
    # one row of the bias partial lies on a row of the weight partial that another task writes
    task = plan.tasks[find(plan, "conv2.backward_weights")]
    row = next(access for access in task.accesses if access.buffer.name == "conv2.dw")
    task.accesses = [
        dataclasses.replace(access, start=row.stop, stop=row.stop + 200)
        if access.buffer.name == "conv2.db"
        else access
        for access in task.accesses
    ]
    with pytest.raises(InternalError, match=r"buffer reused early: .*conv2\.db and conv2\.dw"):
        check(plan)


def test_lenet_with_an_unordered_reduction(plan):
    # a second task adds to the gradient of conv1 beside the first
    adds = next(
        access
        for task in plan.tasks
        for access in task.accesses
        if access.buffer.name == "conv1[0].diff" and access.writes and access.reads
    )
    plan.tasks.append(Task("twin", -1, None, accesses=[adds]))
    plan.successors.append([])
    plan.waits.append(0)
    with pytest.raises(InternalError, match=r"unordered reduction: .*twin, on conv1\[0\]\.diff"):
        check(plan)


def test_lenet_with_a_cycle(plan):
    last, first = find(plan, "ip2.backward_data"), find(plan, "conv1.forward")
    plan.successors[last].append(first)
    plan.waits[first] += 1
    with pytest.raises(InternalError, match=r"cycle: conv1\.forward"):
        check(plan)


def test_every_net_has_a_right_plan():
    for path in sorted((ROOT / "tests" / "nets").glob("*.prototxt")):
        assert find_faults(iteration(path)) == [], path.name


# Random programs, against the plainest possible rule

SPACES = [Buffer(f"space{number}", (12,)) for number in range(3)]


@st.composite
def accesses(draw: st.DrawFn) -> Access:
    space = draw(st.integers(0, len(SPACES) - 1))
    start = draw(st.integers(0, 11))
    stop = draw(st.integers(start + 1, 12))
    make = draw(st.sampled_from([reads, writes, updates]))
    return make(SPACES[space], start, stop, space + 1)


def conflict(one: Task, two: Task) -> bool:
    return any(
        a.space == b.space and a.start < b.stop and b.start < a.stop and (a.writes or b.writes)
        for a in one.accesses
        for b in two.accesses
    )


def reachable(successors: list[list[int]], start: int) -> set[int]:
    found: set[int] = set()
    waiting = [start]
    while waiting:
        for successor in successors[waiting.pop()]:
            if successor not in found:
                found.add(successor)
                waiting.append(successor)
    return found


def wrong(program: Program) -> bool:
    """Look at every pair of tasks: do two conflict that no path orders?"""
    below = [reachable(program.successors, i) for i in range(len(program.tasks))]
    return any(
        conflict(program.tasks[i], program.tasks[j]) and j not in below[i]
        for i in range(len(program.tasks))
        for j in range(i + 1, len(program.tasks))
    )


random_tasks = st.lists(
    st.tuples(st.lists(accesses(), max_size=3), st.integers(0, 9)), min_size=1, max_size=25
)


def connected(specification: list[tuple[list[Access], int]]) -> Program:
    tasks = [
        Task(f"t{number}", -1, None, accesses=touched, gate=chance == 0)
        for number, (touched, chance) in enumerate(specification)
    ]
    ordered, successors, waits = connect(tasks)
    return Program(ordered, successors, waits, [], {}, 0, 0, {})


@settings(deadline=None)
@given(random_tasks)
def test_planner_orders_every_conflict(specification):
    program = connected(specification)
    assert not wrong(program)
    assert find_faults(program) == []


@settings(deadline=None)
@given(random_tasks, st.data())
def test_a_lost_edge_is_found_where_it_matters(specification, data):
    program = connected(specification)
    edges = [(a, b) for a, many in enumerate(program.successors) for b in many]
    if not edges:
        return
    cut_edge(program, *data.draw(st.sampled_from(edges)))
    assert bool(find_faults(program)) == wrong(program)
