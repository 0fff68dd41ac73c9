import os
import shutil
import signal
import stat
import threading
import time

import lmdb
import pytest

from cgdnn.data.lmdb import LmdbReader, find_lmdb, write_lmdb
from cgdnn.errors import DataError


def values_of(count, begin=0):
    return [b"value %d" % i for i in range(begin, begin + count)]


@pytest.fixture
def database(tmp_path):
    write_lmdb(tmp_path / "db", values_of(2500))
    return tmp_path / "db"


def test_records_come_in_order_under_caffe_keys(tmp_path):
    assert write_lmdb(tmp_path / "db", [b"a", b"b", b"c"]) == 3
    reader = LmdbReader(tmp_path / "db")
    assert reader.entries == 3
    assert reader.read(0, 3) == [b"a", b"b", b"c"]
    assert reader.key(2) == b"00000002"
    reader.close()


def test_reading_wraps_any_number_of_times(tmp_path):
    write_lmdb(tmp_path / "db", [b"a", b"b", b"c"])
    reader = LmdbReader(tmp_path / "db")
    assert reader.read(2, 5) == [b"c", b"a", b"b", b"c", b"a"]
    assert reader.read(7, 2) == [b"b", b"c"]
    assert reader.read(9, 1) == [b"a"]
    reader.close()


@pytest.mark.parametrize("record", [0, 1, 999, 1000, 1001, 2000, 2499])
def test_jumps_reach_the_record(database, record):
    reader = LmdbReader(database)
    assert reader.read(record, 1) == values_of(1, record)
    assert reader.read(5, 2) == values_of(2, 5)
    assert reader.read(record, 1) == values_of(1, record)
    assert reader.key(record) == b"%08d" % record
    assert reader.read(record, 1) == values_of(1, record)
    reader.close()


def test_data_file_itself_may_be_named(database):
    reader = LmdbReader(database / "data.mdb")
    assert reader.read(0, 1) == [b"value 0"]
    reader.close()


def test_two_readers_share_a_file_and_keep_their_own_place(database):
    first, second = LmdbReader(database), LmdbReader(database / "data.mdb")
    assert first.read(0, 2) == values_of(2)
    assert second.read(7, 2) == values_of(2, 7)
    assert first.read(2, 2) == values_of(2, 2)
    first.close()
    first.close()
    assert second.read(9, 2) == values_of(2, 9)
    second.close()
    with lmdb.open(str(database), readonly=True, lock=False) as environment:  # all was given back
        assert environment.stat()["entries"] == 2500


def resident(path):
    """Return the kilobytes of a file that this process has mapped and touched."""
    with open("/proc/self/smaps") as lines:
        sizes = iter(lines)
        return sum(
            int(next(line for line in sizes if line.startswith("Rss:")).split()[1])
            for line in sizes
            if line.rstrip().endswith(str(path))
        )


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="tells nothing of mappings")
def test_pages_that_were_read_do_not_stay(tmp_path, monkeypatch):
    records = [bytes([i % 256]) * 50_000 for i in range(200)]
    write_lmdb(tmp_path / "db", records)
    reader = LmdbReader(tmp_path / "db")
    assert [reader.read(i, 1)[0] for i in range(200)] == records
    assert resident(tmp_path / "db" / "data.mdb") > 9_000
    monkeypatch.setattr("cgdnn.data.lmdb._MOST_MAPPED", 1_000_000)
    assert [reader.read(i, 1)[0] for i in range(200)] == records
    assert resident(tmp_path / "db" / "data.mdb") < 3_000
    reader.close()


def test_order_is_kept_where_the_database_is_opened_anew(database, monkeypatch):
    monkeypatch.setattr("cgdnn.data.lmdb._MOST_MAPPED", 0)
    reader = LmdbReader(database)
    assert [reader.read(i, 7) for i in range(0, 2800, 7)] == [
        [b"value %d" % (j % 2500) for j in range(i, i + 7)] for i in range(0, 2800, 7)
    ]
    assert reader.read(2493, 7) == values_of(7, 2493)
    assert reader.read(2500, 2) == values_of(2)
    assert reader.key(3) == b"%08d" % 3
    assert reader.read(4, 2) == values_of(2, 4)
    reader.close()


def test_database_that_is_replaced_is_read_on_as_it_was_opened(database, monkeypatch):
    monkeypatch.setattr("cgdnn.data.lmdb._MOST_MAPPED", 0)
    reader = LmdbReader(database)
    assert reader.read(0, 2) == values_of(2)
    write_lmdb(database, [b"other"] * 2500)
    assert reader.read(2, 2) == values_of(2, 2)
    reader.close()


def test_reading_leaves_no_trace_in_a_read_only_folder(database):
    database.chmod(stat.S_IRUSR | stat.S_IXUSR)
    before = sorted(os.listdir(database))
    reader = LmdbReader(database)
    assert reader.read(0, 1) == [b"value 0"]
    reader.close()
    assert sorted(os.listdir(database)) == before == ["data.mdb"]
    database.chmod(stat.S_IRWXU)


def test_forked_child_reads_on(database):
    reader = LmdbReader(database)
    assert reader.read(0, 3) == values_of(3)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fine = reader.read(3, 2) == values_of(2, 3)
            reader.close()
            other = LmdbReader(database)
            code = 0 if fine and other.read(0, 1) == [b"value 0"] else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert reader.read(3, 2) == values_of(2, 3)
    reader.close()


def test_writing_replaces_the_whole_and_leaves_nothing_beside(tmp_path):
    write_lmdb(tmp_path / "db", values_of(5))
    write_lmdb(tmp_path / "db", [b"new"])
    reader = LmdbReader(tmp_path / "db")
    assert reader.read(0, reader.entries) == [b"new"]
    reader.close()
    assert os.listdir(tmp_path) == ["db"]


def test_failed_writing_keeps_the_old_database(tmp_path):
    def torn():
        yield b"new"
        raise RuntimeError("no more")

    write_lmdb(tmp_path / "db", [b"old"])
    with pytest.raises(RuntimeError, match="no more"):
        write_lmdb(tmp_path / "db", torn())
    reader = LmdbReader(tmp_path / "db")
    assert reader.read(0, 1) == [b"old"]
    reader.close()
    assert os.listdir(tmp_path) == ["db"]


def test_database_outgrows_its_first_map(tmp_path, monkeypatch):
    monkeypatch.setattr("cgdnn.data.lmdb._INITIAL_MAP_BYTES", 1 << 16)
    values = [bytes([i % 256]) * 5000 for i in range(300)]
    write_lmdb(tmp_path / "db", values)
    reader = LmdbReader(tmp_path / "db")
    assert reader.read(0, 300) == values
    reader.close()


def test_missing_database_is_named_by_its_absolute_path(case):
    case("db_missing")
    with pytest.raises(DataError) as caught:
        LmdbReader("db")
    assert str(caught.value).startswith(f"{os.getcwd()}/db: database does not exist")
    assert "`source`" in str(caught.value)


def test_leveldb_is_refused_by_name(golden):
    with pytest.raises(DataError, match=r"images_leveldb: is a LevelDB database.*expected an LMDB"):
        find_lmdb("data/images_leveldb")


def test_folder_of_something_else_lists_what_it_holds(tmp_path):
    (tmp_path / "a.png").touch()
    with pytest.raises(DataError, match=r"holds a\.png, expected data\.mdb"):
        find_lmdb(tmp_path)


def test_empty_database_is_refused(tmp_path):
    write_lmdb(tmp_path / "db", [])
    with pytest.raises(DataError, match="got 0 records, expected at least 1"):
        LmdbReader(tmp_path / "db")


def test_other_file_is_refused(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"text" * 5000)
    with pytest.raises(DataError, match="is not a readable LMDB"):
        LmdbReader(tmp_path)


def test_cut_file_is_refused_before_it_is_mapped(database, tmp_path):
    size = (database / "data.mdb").stat().st_size
    cut = tmp_path / "cut"
    shutil.copytree(database, cut)
    os.truncate(cut / "data.mdb", size // 2)
    with pytest.raises(DataError, match=rf"is cut off; got {size // 2} bytes, expected {size}"):
        LmdbReader(cut)


def test_damaged_page_is_a_data_error(database):
    page_size, is_branch = 4096, 1
    with (database / "data.mdb").open("r+b") as file:
        pages = range(2, (database / "data.mdb").stat().st_size // page_size)
        for page in pages:
            file.seek(page * page_size + 10)
            if file.read(2)[0] & is_branch:
                file.seek(page * page_size)
                file.write(bytes(page_size))
    reader = LmdbReader(database)
    with pytest.raises(DataError, match=r"db, record 5: cannot be read \(.*MDB_CORRUPTED"):
        reader.read(5, 1)
    reader.close()


def exit_status(pid, seconds=20):
    """Wait for a child; end one that hangs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_amid_the_reading_of_another_thread(database):
    reader = LmdbReader(database)
    stop = threading.Event()

    def read_on():
        position = 0
        while not stop.is_set():
            reader.read(position, 7)
            position += 7

    thread = threading.Thread(target=read_on)
    thread.start()
    try:
        for _ in range(30):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if reader.read(11, 2) == values_of(2, 11) else 2)
            assert exit_status(pid) == 0
    finally:
        stop.set()
        thread.join()
    reader.close()
