"""Decide which of several ready tasks runs first.

Either the one with the longest way to the end, which is its own estimated time and the longest of
those that wait for it (list scheduling by critical path: Graham 1969, Kohler 1975). So the few long
chains of an iteration start early, and what nothing waits for, such as weight gradients, fills the
gaps. Or, where blobs are larger than caches, the one furthest on: what a piece of the minibatch has
just written is read while it is near. Values are the same bits in any order that the edges allow;
only the time differs.
"""

from __future__ import annotations

from cgdnn.plan.tasks import Task


def furthest(tasks: list[Task]) -> list[int]:
    """Return the numbers of all tasks, those furthest on in the program first."""
    return list(range(len(tasks)))[::-1]


def urgency(tasks: list[Task], successors: list[list[int]]) -> list[int]:
    """Return the numbers of all tasks, the most urgent first.

    A task comes before all that wait for it, so the list is an order in which they can run.

    Parameters
    ----------
    tasks : list of Task
        Each comes after all that it waits for.
    successors : list of list of int
    """
    to_end = [0.0] * len(tasks)
    for number in reversed(range(len(tasks))):
        behind = max((to_end[successor] for successor in successors[number]), default=0.0)
        to_end[number] = _nanoseconds(tasks[number]) + behind
    return sorted(range(len(tasks)), key=lambda number: (-to_end[number], number))


def _nanoseconds(task: Task) -> float:
    return sum(
        part.step.cost * (part.end - part.begin) for part in task.parts if part.step is not None
    )
