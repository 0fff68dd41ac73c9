from cgdnn.layers._base import Step
from cgdnn.plan.order import furthest, urgency
from cgdnn.plan.tasks import Task


def task(cost: float, pieces: int = 1) -> Task:
    def touch() -> None:
        raise AssertionError("nothing is run here")

    return Task("", -1, Step(touch, [], cost=cost), 0, pieces)


def test_longest_way_to_the_end_comes_first():
    # 0 (10) -> 2 (10), 1 (15), 3 (5): ways of 20, 15, 10 and 5
    tasks = [task(10), task(15), task(10), task(5)]
    assert urgency(tasks, [[2], [], [], []]) == [0, 1, 2, 3]
    assert urgency(tasks[::-1], [[], [], [], []]) == [2, 1, 3, 0]


def test_cost_counts_for_each_unit_of_the_piece():
    assert urgency([task(10, 1), task(6, 2)], [[], []]) == [1, 0]


def test_join_costs_nothing_but_hands_its_way_on():
    # 0 (1) -> join -> 2 (100); 3 (50)
    join = Task("join", -1, None)
    assert urgency([task(1), join, task(100), task(50)], [[1], [2], [], []]) == [0, 1, 2, 3]


def test_ties_keep_the_order_of_the_program():
    assert urgency([task(0), task(0), task(0)], [[2], [], []]) == [0, 1, 2]


def test_depth_first_takes_the_last_of_the_program():
    assert furthest([task(1), task(5), task(1)]) == [2, 1, 0]
