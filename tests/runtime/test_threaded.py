import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from cgdnn.data.prefetch import Prefetcher
from cgdnn.errors import DataError, RunError, UsageError
from cgdnn.layers._base import BEGIN, END, Step, read, update_all
from cgdnn.plan.lower import Work
from cgdnn.runtime import threaded
from cgdnn.runtime.net import Net
from cgdnn.runtime.state import State
from cgdnn.runtime.threaded import MAX_THREADS, ThreadedRun
from tests.plan.planning import ROOT
from tests.runtime.programs import DATA_NET, bound, counting, message, passes, refuse_marked


@pytest.fixture
def eight_cores(monkeypatch):
    """Let eight workers run at once, however many cores there are."""
    monkeypatch.setattr(threaded._the_pool(), "cores", 8)


# Values


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    return passes(Net(message(), threads=1, serial=True), 3)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_same_bits_at_any_number_of_threads(eight_cores, expected, threads):
    assert passes(Net(message(), threads=threads), 3) == expected


@pytest.mark.parametrize("threads", [3, 8])
def test_no_wake_up_is_lost(eight_cores, threads):
    """Two steps of 16 pieces and one between them that waits for all, 200 times over."""
    state = State("float32")
    first, work = counting("first", 16)
    middle = Step(lambda x: x.__setitem__(slice(None), x + 1), [update_all(first)])
    last = Work("last", -1, work.step)
    run = ThreadedRun(bound([work, Work("middle", -1, middle), last], threads, state), threads)
    for _ in range(200):
        assert run.run() is None
    assert state.array(first).tolist() == [600] * 16


def test_tasks_run_after_what_they_wait_for(eight_cores):
    net = Net(message(), threads=3)
    times = net.run(("forward", "backward"), trace=True)
    (run,) = net._programs.values()
    program = run.program.program
    assert [time.name for time in times] == [t.name for t in program.tasks if t.step is not None]
    assert {time.worker for time in times} <= {0, 1, 2}
    for number, successors in enumerate(program.successors):
        for successor in successors:
            if program.tasks[number].step and program.tasks[successor].step:
                assert run.trace[number, 1] <= run.trace[successor, 0]


def test_most_urgent_task_runs_first():
    order = []
    works = [
        Work(f"t{cost}", -1, Step(lambda cost=cost: order.append(cost), [], cost=cost))
        for cost in (5, 70, 1, 30)
    ]
    ThreadedRun(bound(works), 1).run()
    assert order == [70, 30, 5, 1]


def test_plan_with_more_tasks_than_a_word_has_bits():
    state = State("float32")
    counters = [counting(f"c{i}", 32) for i in range(5)]
    run = ThreadedRun(bound([work for _, work in counters], 2, state), 2)
    run.run()
    assert len(run.program.tasks) == 160
    assert all((state.array(buffer) == 1).all() for buffer, _ in counters)


def test_program_without_tasks():
    assert ThreadedRun(bound([]), 2).run() is None


@pytest.mark.parametrize("threads", [0, MAX_THREADS + 1])
def test_impossible_number_of_threads(threads):
    with pytest.raises(UsageError, match=f"got {threads} threads, expected 1 to {MAX_THREADS}"):
        ThreadedRun(bound([]), threads)


def test_threads_beyond_the_cores_stay_asleep(monkeypatch):
    pool = threaded._the_pool()
    monkeypatch.setattr(pool, "cores", 1)
    net = Net(message(), threads=8)
    assert {time.worker for time in net.run(("forward", "backward"), trace=True)} == {0}


# Failures


def spoil_compiled(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Label 99 is outside the ten classes."""
    net.blobs["label"].data[...] = 99


def spoil_python(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that fills the labels misses what it remembers."""
    monkeypatch.delattr(net.assembly.layers[0].layer, "_filled")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("spoil", "text"),
    [(spoil_compiled, "label 99"), (spoil_python, r"data\.forward: AttributeError: .*_filled")],
)
def test_net_goes_on_after_a_failed_task(monkeypatch, spoil, text, threads):
    fresh = passes(Net(message(), threads=1), 2)
    net = Net(message(), threads=threads)
    passes(net, 1)
    spoil(net, monkeypatch)
    for _ in range(3):
        with pytest.raises(RunError if spoil is spoil_python else DataError, match=text):
            net.run(("forward", "backward"))
    monkeypatch.undo()
    net.blobs["label"].data[...] = 2
    assert passes(net, 1) == fresh


@pytest.mark.parametrize("threads", [1, 2])
def test_net_goes_on_after_a_failed_data_task(monkeypatch, threads):
    fresh = passes(Net(message(DATA_NET), threads=1), 2)
    net = Net(message(DATA_NET), threads=threads)
    passes(net, 1)

    def fail(_prefetcher: Prefetcher) -> None:
        raise DataError("record 7 is torn")

    monkeypatch.setattr(Prefetcher, "next", fail)
    for _ in range(3):
        with pytest.raises(DataError, match=r"layer \"data\" \(Data\): record 7 is torn"):
            net.run(("forward", "backward"))
    monkeypatch.undo()
    assert passes(net, 1) == fresh
    net.close()


def fail_on(worker: int, failing: Work, state: State) -> tuple[int, int]:
    """Run `failing` beside a task that keeps one thread busy until it ran on `worker`."""
    seen: list[str] = []

    def keep_busy() -> None:
        seen.append(threading.current_thread().name)
        time.sleep(0.05)

    for _ in range(100):
        busy = Work("busy", -1, Step(keep_busy, [], cost=1e9 if worker else 0.0))
        run = ThreadedRun(bound([busy, failing], 2, state), 2)
        failed = run.run(trace=True)
        assert failed is not None
        if run.program.tasks[failed[0]].name != failing.label:
            continue
        if int(run.trace[failed[0], 2]) == worker:
            return failed
    raise AssertionError(f"never ran on worker {worker}")


@pytest.mark.parametrize("worker", [0, 1])
def test_compiled_task_fails_on_either_thread(monkeypatch, worker):
    monkeypatch.setattr(threaded._the_pool(), "cores", 2)
    state = State("float32")
    buffer, _ = counting("x", 4)
    state.array(buffer)[...] = [0, 0, -1, 0]
    failing = Work("check", -1, Step(refuse_marked, [read(buffer), BEGIN, END], 4, 25.0))
    task, status = fail_on(worker, failing, state)
    assert status == 3
    state.array(buffer)[...] = 0
    assert ThreadedRun(bound([failing], 2, state), 2).run() is None
    assert task in (0, 1)


@pytest.mark.parametrize("worker", [0, 1])
def test_python_task_fails_on_either_thread(monkeypatch, worker):
    monkeypatch.setattr(threaded._the_pool(), "cores", 2)

    def explode() -> None:
        raise ValueError("boom")

    failing = Work("explode", -1, Step(explode, [], cost=100.0))
    _, status = fail_on(worker, failing, State("float32"))
    assert status == -1


def test_first_failure_in_program_order_is_reported():
    state = State("float32")
    buffer, _ = counting("x", 4)
    state.array(buffer)[...] = -1
    works = [
        Work(f"check{i}", -1, Step(refuse_marked, [read(buffer), BEGIN, END], 4, 25.0))
        for i in range(3)
    ]
    assert ThreadedRun(bound(works, 1, state), 1).run() == (0, 1)


# Several threads, several processes


def test_two_nets_in_two_threads(monkeypatch, expected):
    monkeypatch.setattr(threaded._the_pool(), "cores", 4)
    nets = [Net(message(), threads=2) for _ in range(2)]
    found: list[list[bytes] | None] = [None, None]

    def work(number: int) -> None:
        found[number] = passes(nets[number], 3)

    runners = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert found == [expected, expected]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_of_a_fork_works_and_so_does_the_parent(expected):
    net = Net(message(), threads=2)
    passes(net, 1)
    child = os.fork()
    if child == 0:  # the child must leave by os._exit, whatever happens
        code = 1
        try:
            code = 0 if passes(net, 2) == expected else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert passes(net, 2) == expected


def test_no_worker_burns_time_after_a_run(eight_cores):
    passes(Net(message(), threads=8), 1)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.05


def ended(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in another process; it must end by itself."""
    prologue = """
        from cgdnn.runtime.net import Net
        from tests.runtime.programs import message, passes
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prologue) + textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_process_ends_with_sleeping_workers():
    result = ended("passes(Net(message(), threads=2)); print('done')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_process_ends_by_an_exception_in_a_task():
    result = ended(
        """
        net = Net(message(), threads=2)
        passes(net)
        net.blobs["label"].data[...] = 99
        net.forward()
        """
    )
    assert result.returncode == 1
    assert "label 99" in result.stderr


def test_process_ends_while_another_thread_runs_a_net():
    result = ended(
        """
        import threading, time
        net = Net(message(), threads=2)
        passes(net)
        threading.Thread(target=lambda: passes(net, 10**6), daemon=True).start()
        time.sleep(0.2)
        raise SystemExit(7)
        """
    )
    assert result.returncode == 7


def test_importing_starts_no_thread():
    result = ended(
        """
        import threading
        assert threading.active_count() == 1, threading.enumerate()
        """
    )
    assert result.returncode == 0, result.stderr


def test_float_bits_of_a_run_are_those_of_the_kernel():
    state = State("float32")
    buffer, work = counting("x", 8, turns=3)
    ThreadedRun(bound([work], 1, state), 1).run()
    np.testing.assert_array_equal(state.array(buffer), np.full(8, 3, np.float32))
