import ctypes
import gc
import weakref

import numpy as np

from cgdnn.kernels._jit import call_entry
from cgdnn.layers._base import Slot
from cgdnn.runtime.python_task import FAILED, PythonTasks


def call(tasks: PythonTasks, task: int, entry: int) -> int:
    slots = ctypes.c_int64(task)
    return call_entry(entry, ctypes.addressof(slots), 0)


def test_functions_get_their_arguments():
    tasks, seen = PythonTasks(), []
    entries = [tasks.add(i, lambda *values: seen.append(values), [i, "x"]) for i in range(2)]
    assert [call(tasks, task, entries[task]) for task in (1, 0)] == [0, 0]
    assert seen == [(1, "x"), (0, "x")]


def test_slots_stand_for_numbers():
    tasks, seen = PythonTasks(), []
    entry = tasks.add(3, seen.append, [Slot("counter")])
    for number in (7, 8):
        tasks.numbers["counter"] = number
        call(tasks, 3, entry)
    assert seen == [7, 8]


def test_exception_is_stored_and_gives_a_status():
    tasks = PythonTasks()

    def explode() -> None:
        raise KeyboardInterrupt

    entry = tasks.add(0, explode, [])
    assert call(tasks, 0, entry) == FAILED
    assert isinstance(tasks.raised[0], KeyboardInterrupt)


def test_what_the_arguments_lie_in_goes_with_the_program():
    tasks, array = PythonTasks(), np.zeros(4)
    tasks.add(0, print, [array[1:]])
    owner = weakref.ref(array)
    gc.disable()  # no collector is needed
    try:
        del tasks, array
        assert owner() is None
    finally:
        gc.enable()
