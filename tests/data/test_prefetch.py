import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from cgdnn.data.prefetch import Prefetcher
from cgdnn.errors import DataError


class Counting:
    """A source whose batch at p holds p, p + 1, ...; it records what was asked of it."""

    shapes = [(4, 2), (4,)]  # noqa: RUF012
    dtype = np.dtype(np.float32)

    def __init__(self, bad=None):
        self.warnings = ["odd"]
        self.bad = bad
        self.asked = []
        self.closed = 0

    def read_batch(self, position, out):
        self.asked.append(position)
        if position == self.bad:
            raise DataError(f"record {position}: torn")
        out[1][:] = np.arange(position, position + 4)
        out[0][:] = out[1][:, None]

    def close(self):
        self.closed += 1


@pytest.fixture(autouse=True)
def threads():
    """The reading threads that the test has started; the nets of other tests may have some, too."""
    before = threading.enumerate()

    def started():
        new = [thread for thread in threading.enumerate() if thread not in before]
        return [thread for thread in new if thread.name == "cgdnn-prefetch"]

    yield started
    gc.collect()
    assert started() == []


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_batches_in_order_and_position_of_what_was_delivered():
    reader = Prefetcher(Counting(), np.float64)
    assert (reader.batch_size, reader.shapes, reader.warnings) == (4, [(4, 2), (4,)], ["odd"])
    assert reader.position == 0
    for i in range(20):
        data, label = reader.next()
        assert data.dtype == label.dtype == np.float64
        assert label.tolist() == [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]
        assert data.tolist() == [[v, v] for v in label.tolist()]
        assert reader.position == 4 * (i + 1)
    reader.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_reads_ahead_as_far_as_depth_and_no_further(depth):
    source = Counting()
    reader = Prefetcher(source, np.float32, depth)
    reader.next()
    wait_for(lambda: len(source.asked) == 1 + depth)
    time.sleep(0.02)
    assert len(source.asked) == 1 + depth
    reader.close()


def test_delivered_arrays_stay_until_the_next_call():
    source = Counting()
    reader = Prefetcher(source, np.float32, depth=1)
    for i in range(10):
        _, label = reader.next()
        wait_for(lambda i=i: len(source.asked) == i + 2)
        assert label[0] == 4 * i
    reader.close()


def test_released_arrays_are_filled_at_once():
    source = Counting()
    reader = Prefetcher(source, np.float32, depth=1)
    reader.next()
    wait_for(lambda: len(source.asked) == 2)
    reader.release()
    wait_for(lambda: len(source.asked) == 3)
    reader.release()  # nothing is lent any more
    assert [reader.next()[1][0] for _ in range(3)] == [4, 8, 12]
    reader.close()


def test_waiting_is_measured():
    source = Counting()
    reader = Prefetcher(source, np.float32)
    slow = source.read_batch
    source.read_batch = lambda *args: (time.sleep(0.05), slow(*args))
    reader.next()
    assert 0.05 <= reader.waited < 5
    reader.close()


def test_seek_continues_there():
    reader = Prefetcher(Counting(), np.float32)
    reader.next()
    reader.seek(102)
    assert reader.position == 102
    assert reader.next()[1].tolist() == [102, 103, 104, 105]
    assert reader.position == 106
    reader.close()


def test_exception_comes_after_the_batches_before_it_and_can_be_tried_again():
    source = Counting(bad=8)
    reader = Prefetcher(source, np.float32)
    assert reader.next()[1][0] == 0
    assert reader.next()[1][0] == 4
    with pytest.raises(DataError, match="record 8: torn"):
        reader.next()
    assert reader.position == 8
    source.bad = None
    assert reader.next()[1][0] == 8
    reader.close()


def test_nothing_runs_before_the_first_batch_and_after_close(threads):
    source = Counting()
    reader = Prefetcher(source, np.float32)
    assert threads() == []
    reader.next()
    assert len(threads()) == 1
    reader.close()
    reader.close()
    assert threads() == []
    assert source.closed == 2


def test_waiting_thread_uses_no_processor_time():
    source = Counting()
    reader = Prefetcher(source, np.float32)
    reader.next()
    wait_for(lambda: len(source.asked) == 4)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.05
    reader.close()


def test_collected_reader_ends_its_thread(threads):
    reader = Prefetcher(Counting(), np.float32)
    reader.next()
    del reader
    gc.collect()
    assert threads() == []


def test_forked_child_reads_on_by_itself():
    reader = Prefetcher(Counting(), np.float32)
    reader.next()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            good = [reader.next()[1][0] for _ in range(5)] == [4, 8, 12, 16, 20]
            reader.close()
            code = 0 if good else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert reader.next()[1][0] == 4
    reader.close()


def test_interpreter_ends_cleanly_with_an_open_reader():
    program = (
        "import numpy as np\n"
        "from cgdnn.data.prefetch import Prefetcher\n"
        "class Source:\n"
        "    shapes, dtype, warnings = [(1,)], np.dtype(np.float32), []\n"
        "    def read_batch(self, position, out): out[0][:] = position\n"
        "    def close(self): pass\n"
        "reader = Prefetcher(Source(), np.float32)\n"
        "reader.next()\n"
        "print('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("end\n", "")
