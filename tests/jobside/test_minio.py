"""The data cache with real processes: shared, whole after deaths, private, and never in the way."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inprocess import clean_environment, finish, start

from slurm_synergy.errors import CacheError
from slurm_synergy.jobside import minio_job
from slurm_synergy.jobside.minio import CachedDataset, CachedFile, cached_open
from slurm_synergy.jobside.minio_buffers import ReadBuffers
from slurm_synergy.jobside.minio_place import CachePlace, cache_path, keep_or_remove, sweep
from slurm_synergy.jobside.minio_store import MinioStore

SIZE = 5000


def content(index: int) -> bytes:
    return index.to_bytes(4, "little") * (SIZE // 4)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of this job's cache; its budget is 1 MiB."""
    for name in [name for name in os.environ if name.startswith(("SYNERGY_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SYNERGY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("SYNERGY_CACHE_MIB", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(minio_job, "_cache", None)
    yield tmp_path / f"synergy-cache-{os.getuid()}-77"
    minio_job.job_cache().close()


class Items:
    """A data set of raw bytes that counts what was read from it."""

    classes = ("cat", "dog")

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> bytes:
        self.read += 1
        return content(index)


# -- processes ---------------------------------------------------------------------------------


def _read_share(path: Path, orders: list[list[int]], budget: int, pipe: Any) -> None:
    """One worker: its share of each epoch, in step with the others."""
    store = MinioStore(path)
    store.set_budget(budget)
    source = store.enter("set", 300)
    for order in orders:
        pipe.recv()
        hits = 0
        for index in order:
            view = store.get(source.key_of_index(index))
            if view is None:
                store.put(source.of_index(index), content(index))
            else:
                assert view == content(index)
                hits += 1
        pipe.send(hits)
    pipe.recv()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_together_hit_exactly_what_fits_in_every_epoch(
    tmp_path: Path, method: str
) -> None:
    epochs, workers, items, fits = 4, 3, 300, 111
    shuffled, context = random.Random(5), multiprocessing.get_context(method)
    shares: list[list[list[int]]] = [[] for _ in range(workers)]
    for _ in range(epochs):
        order = shuffled.sample(range(items), items)
        for number in range(workers):
            shares[number].append(order[number::workers])
    pipes, processes = [], []
    for share in shares:
        ours, theirs = context.Pipe()
        budget = fits * SIZE + SIZE // 2
        process = context.Process(
            target=_read_share, args=(tmp_path / "cache", share, budget, theirs)
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    hits = []
    for _ in range(epochs):
        for pipe in pipes:
            pipe.send(None)
        hits.append(sum(pipe.recv() for pipe in pipes))
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert hits == [0, fits, fits, fits]


def test_forked_workers_use_the_cache_of_their_parent(place: Path) -> None:
    data = CachedDataset(Items(60), decode=bytes)
    for part in range(2):
        pid = os.fork()
        if pid == 0:
            good = all(data[index] == content(index) for index in range(part, 60, 2))
            os._exit(0 if good else 1)
        assert os.waitpid(pid, 0)[1] == 0
    data.dataset.read = 0
    assert [data[index] for index in range(60)] == [content(index) for index in range(60)]
    assert data.dataset.read == 0


KILLED_INSIDE = """
import os, signal, sys
from pathlib import Path
from slurm_synergy.jobside import minio_index, minio_store
from slurm_synergy.jobside.minio_store import MinioStore
store = MinioStore(Path(sys.argv[1]))
source = store.enter("set", 100)
where = sys.argv[2]
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
def half(index, at, raw):
    index._table[at * 64 : at * 64 + 40] = raw[:40]
    die()
if where == "before the content":
    os.pwrite = die
elif where == "in the content":
    real = os.pwrite
    os.pwrite = lambda fd, data, at: (real(fd, data[:100], at), die())
elif where == "in the slot":
    minio_index.Index._put_raw = half
elif where == "before the counters":
    minio_index.Index.publish = die
store.put(source.of_index(50), bytes(range(250)) * 20)
"""


@pytest.mark.parametrize(
    "where", ["before the content", "in the content", "in the slot", "before the counters"]
)
def test_a_worker_killed_in_an_insert_leaves_nothing_torn(tmp_path: Path, where: str) -> None:
    path = tmp_path / "cache"
    store = MinioStore(path)
    store.set_budget(100 * SIZE)
    source = store.enter("set", 100)
    for index in range(50):
        assert store.put(source.of_index(index), content(index))
    status, _, err = finish(start(["-c", KILLED_INSIDE, str(path), where], clean_environment()))
    assert status == -signal.SIGKILL, err
    torn = store.get(source.key_of_index(50))
    if where == "before the counters":
        assert torn == bytes(range(250)) * 20  # it was all there
    else:
        assert torn is None
    for index in range(50, 100):
        held = store.get(source.key_of_index(index))
        if held is None:
            assert store.put(source.of_index(index), content(index))
    for index in set(range(100)) - {50}:
        assert store.get(source.key_of_index(index)) == content(index)
    assert store.head.items == 100 and store.head.used_bytes == 100 * SIZE
    store.close()


def test_a_view_stays_good_when_its_item_is_given_up(tmp_path: Path) -> None:
    store, other = MinioStore(tmp_path / "cache"), MinioStore(tmp_path / "cache")
    store.set_budget(10 * SIZE)
    source = store.enter("set", 10)
    for index in range(10):
        store.put(source.of_index(index), content(index))
    views = [other.get(source.key_of_index(index)) for index in range(10)]
    store.set_budget(3 * SIZE)
    for index in range(10):
        store.put(source.of_index(index), b"x" * SIZE)
    assert views == [content(index) for index in range(10)]
    assert sum(other.get(source.key_of_index(i)) is not None for i in range(10)) == 3
    store.close(), other.close()


def _blocks(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.glob("seg-*"))


def test_a_smaller_budget_gives_the_memory_back_at_once(tmp_path: Path) -> None:
    store = MinioStore(tmp_path / "cache")
    store.set_budget(8 << 20)
    source = store.enter("set", 64)
    for index in range(64):
        store.put(source.of_index(index), bytes(1 << 17))
    assert _blocks(store.path) >= 8 << 20
    store.set_budget(2 << 20)
    assert store.head.items == 16
    assert _blocks(store.path) <= (2 << 20) + 8192
    store.set_budget(4 << 20)
    for index in range(64):
        if store.get(source.key_of_index(index)) is None:
            store.put(source.of_index(index), bytes(1 << 17))
    assert store.head.items == 32 and _blocks(store.path) <= (4 << 20) + 16384
    store.close()


# -- no room, no trust ---------------------------------------------------------------------------


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "small"
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0777", "none", str(where)], check=False
    )
    if done.returncode:
        pytest.skip("mounting a small tmpfs takes root")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_storage_ends_taking_in_with_one_line(
    small_tmpfs: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SYNERGY_CACHE_DIR", str(small_tmpfs))
    data = CachedDataset(Items(400), decode=bytes)
    cache = minio_job.job_cache().store
    assert cache is not None
    cache.set_budget(64 << 20)  # another program takes the room after the cache was opened
    for _ in range(3):
        assert all(data[index] == content(index) for index in range(400))
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and "no more room for the data cache" in err
    data.dataset.read = 0
    held = sum(1 for index in range(400) if data[index] and not data.dataset.read)
    assert 100 < cache.head.items < 220 and held >= 0
    assert data.dataset.read == 400 - cache.head.items


def test_more_than_there_is_room_for_is_cut_with_one_line(
    small_tmpfs: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SYNERGY_CACHE_DIR", str(small_tmpfs))
    for asked in ("2", "100000000000", "9" * 30):
        monkeypatch.setenv("SYNERGY_CACHE_MIB", asked)
        data = CachedDataset(Items(400), decode=bytes)
        for _ in range(2):
            assert all(data[index] == content(index) for index in range(400))
        cache = minio_job.job_cache().store
        assert cache is not None and 100 < cache.head.items < 220
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"SYNERGY_CACHE_MIB = {asked} is more than" in err
        assert f"at most (the file system of {small_tmpfs})" in err
        monkeypatch.setenv("SYNERGY_CACHE_MIB", "64")  # another process of the same run
        other = minio_job.JobCache(os.environ)
        assert other.store is not None and other.store.head == cache.head
        other.close()
        minio_job.forget_job_cache()
    assert capsys.readouterr().err == ""


def test_no_room_for_the_index_means_no_cache_and_one_line(
    small_tmpfs: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (small_tmpfs / "filler").write_bytes(bytes((1 << 20) - 8192))
    monkeypatch.setenv("SYNERGY_CACHE_DIR", str(small_tmpfs))
    data = CachedDataset(Items(5), decode=bytes)
    assert [data[index] for index in range(5)] * 2 == [content(i) for i in range(5)] * 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "read without a cache" in err and "No space left" in err


@pytest.mark.parametrize("wrong", ["symlink", "open to others", "file"])
def test_a_directory_that_cannot_be_trusted_is_not_used(
    place: Path, tmp_path: Path, wrong: str, capsys: Any
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if wrong == "symlink":
        place.symlink_to(elsewhere)
    elif wrong == "file":
        place.touch(mode=0o600)
    else:
        place.mkdir(mode=0o755)
    data = CachedDataset(Items(3), decode=bytes)
    assert data[2] == content(2) and list(elsewhere.iterdir()) == []
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "read without a cache" in err and str(place) in err


def test_a_symlink_inside_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    store = MinioStore(tmp_path / "cache")
    store.set_budget(10 * SIZE)
    source = store.enter("set", 10)
    (store.path / "seg-0").symlink_to(victim)
    (store.path / "table-1").symlink_to(victim)
    assert store.put(source.of_index(0), content(0))
    assert victim.read_bytes() == b"precious"
    assert store.get(source.key_of_index(0)) == content(0)
    store.close()


def test_the_directory_and_its_files_are_private(place: Path) -> None:
    CachedDataset(Items(3), decode=bytes)[0]
    assert place.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in place.iterdir()} == {0o600}


# -- restarts, removal ----------------------------------------------------------------------------


def _filled(path: Path) -> None:
    store = MinioStore(path)
    store.set_budget(20 * SIZE)
    source = store.enter("set", 20)
    for index in range(20):
        store.put(source.of_index(index), content(index), stamp=index)
    store.close()


def test_a_restart_uses_again_what_is_still_good(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    _filled(path)
    segment = path / "seg-0"
    raw = bytearray(segment.read_bytes())
    at = raw.index(content(7))
    raw[at : at + 8] = b"rotten!!"
    segment.write_bytes(raw)
    store = MinioStore(path)
    source = store.enter("set", 20)
    for index in range(20):
        # The source of item 9 was written anew meanwhile.
        view = store.get(source.key_of_index(index), lambda i=index: 99 if i == 9 else i)
        assert view == (None if index in (7, 9) else content(index))
    assert store.head.items == 18
    store.close()


def test_what_was_made_before_the_machine_started_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    _filled(path)
    control = bytearray((path / "control").read_bytes())
    control[320:330] = b"other-boot"
    (path / "control").write_bytes(control)
    store = MinioStore(path)
    assert store.head.items == 0 and not list(path.glob("seg-*"))
    store.close()


def test_data_sets_that_a_restart_does_not_use_make_room(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    _filled(path)
    store = MinioStore(path)
    source = store.enter("another set", 20)
    for index in range(20):
        store.put(source.of_index(index), content(index + 50))
    assert all(store.get(source.key_of_index(i)) == content(i + 50) for i in range(20))
    store.close()


def test_the_last_user_removes_and_nobody_else_does(tmp_path: Path) -> None:
    env = {"SYNERGY_CACHE_DIR": str(tmp_path), "SLURM_JOB_ID": "5"}
    path = cache_path(env)
    first, second = MinioStore(path), MinioStore(path)
    assert not keep_or_remove(env, continues=False)
    first.close()
    assert not keep_or_remove(env, continues=False) and path.exists()
    second.close()
    assert not keep_or_remove(env, continues=True) and path.exists()
    assert keep_or_remove(env, continues=False) and not path.exists()


def test_a_cache_in_memory_is_kept_for_a_restart_only_where_that_is_asked_for() -> None:
    env = {"SLURM_JOB_ID": f"999{os.getpid()}"}
    path = cache_path(env)
    assert path.parent == Path("/dev/shm")
    MinioStore(path).close()
    assert not keep_or_remove({**env, "SYNERGY_CACHE_KEEP": "1"}, continues=True)
    assert path.exists()
    assert keep_or_remove(env, continues=True) and not path.exists()


def test_left_overs_of_ended_sessions_are_swept_at_once(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    mine = cache_path({"SYNERGY_CACHE_DIR": str(tmp_path)})
    gone = mine.with_name(f"synergy-cache-{os.getuid()}-session{ended.pid}")
    in_use = CachePlace(gone)
    CachePlace(mine).close()
    sweep(tmp_path / f"synergy-cache-{os.getuid()}-1")
    assert mine.exists() and gone.exists()
    in_use.close()
    sweep(tmp_path / f"synergy-cache-{os.getuid()}-1")
    assert mine.exists() and not gone.exists()


@pytest.mark.parametrize("session", ["9" * 30, "\N{SUPERSCRIPT TWO}", ""])
def test_what_others_put_beside_a_cache_is_in_nobodys_way(tmp_path: Path, session: str) -> None:
    strange = tmp_path / f"synergy-cache-{os.getuid()}-session{session}"
    strange.write_text("")
    sweep(tmp_path / f"synergy-cache-{os.getuid()}-1")
    assert strange.exists()


def test_left_overs_of_killed_jobs_are_swept(tmp_path: Path) -> None:
    names = ("old", "used", "kept")
    paths = {name: tmp_path / f"synergy-cache-{os.getuid()}-{name}" for name in names}
    for name in ("old", "kept"):
        CachePlace(paths[name]).close()
    (paths["kept"] / "kept").touch()
    used = CachePlace(paths["used"])
    for path in paths.values():
        os.utime(path, (1, os.stat(path).st_mtime - 3600))
    sweep(tmp_path / f"synergy-cache-{os.getuid()}-1")
    assert [name for name in names if paths[name].exists()] == ["used", "kept"]
    used.close()


def test_without_a_launcher_the_program_removes_its_cache(tmp_path: Path) -> None:
    program = """
import os, slurm_synergy.jobside as synergy
data = synergy.CachedDataset([b"a", b"b"], decode=bytes)
print(data[0], data[0], len(os.listdir(os.environ["SYNERGY_CACHE_DIR"])))
"""
    environment = clean_environment(SYNERGY_CACHE_DIR=str(tmp_path), SYNERGY_CACHE_MIB="1")
    status, out, err = finish(start(["-c", program], environment))
    assert (status, out, err) == (0, "b'a' b'a' 1\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_workers_still_use_or_that_was_given_up_is_removed_too(tmp_path: Path) -> None:
    program = """
import multiprocessing, os, slurm_synergy.jobside as synergy
from slurm_synergy.jobside.minio_job import job_cache
data = synergy.CachedDataset([b"a", b"b"], decode=bytes)
def work(pipe):
    pipe.send(data[0])
    pipe.recv()
here, there = multiprocessing.get_context("fork").Pipe()
worker = multiprocessing.get_context("fork").Process(target=work, args=(there,), daemon=True)
worker.start()
print(here.recv(), len(os.listdir(os.environ["SYNERGY_CACHE_DIR"])))
job_cache()._give_up(OSError("broken"))
"""
    environment = clean_environment(SYNERGY_CACHE_DIR=str(tmp_path), SYNERGY_CACHE_MIB="1")
    status, out, err = finish(start(["-c", program], environment))
    assert (status, out) == (0, "b'a' 1\n") and "without a cache: broken" in err
    assert list(tmp_path.iterdir()) == []


def test_giving_up_takes_no_file_from_a_thread_that_writes_an_item(place: Path) -> None:
    data, cache = CachedDataset([content(0)], decode=bytes), minio_job.job_cache()
    assert data[0] == content(0)
    store = cache.store
    assert store is not None
    tail = store._segments.tail.fd
    cache._give_up(OSError("broken"))
    assert os.pread(tail, SIZE, 0) == content(0), "its descriptor is no other file's"
    after = CachePlace(place)
    assert after.alone and cache.get(b"key") is None
    for one in (after, store._segments, store._index):
        one.close()


# -- files -----------------------------------------------------------------------------------------


def test_a_cached_file_reads_as_the_file_does(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n" + b"x" * 9000 + b"\nlast")
    for _ in range(2):
        with cached_open(path) as ours, path.open("rb") as plain:
            assert isinstance(ours, CachedFile) and ours.name == str(path)
            for size in (3, 1, 5000):
                assert ours.read(size) == plain.read(size)
            assert ours.seek(-6, os.SEEK_END) == plain.seek(-6, os.SEEK_END)
            assert ours.read() == plain.read() and ours.read() == b""
            assert ours.seek(0) == plain.seek(0) == ours.tell()
            assert list(ours) == list(plain)
            plain.seek(2), ours.seek(2)
            assert ours.readline(1) == plain.readline(1)
            mine, theirs = bytearray(10), bytearray(10)
            assert ours.readinto(mine) == plain.readinto(theirs) and mine == theirs
            assert ours.seek(1 << 20) and ours.read() == b"" and ours.readline() == b""
            with pytest.raises(OSError, match="negative"):
                ours.seek(-1)
            assert not ours.writable()


def test_a_hit_copies_nothing_and_does_not_touch_the_file(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(content(1))
    cached_open(path).close()
    path.unlink()
    first, second = cached_open(path), cached_open(path)
    assert isinstance(first, CachedFile) and isinstance(second, CachedFile)
    assert first.getbuffer() == content(1) and first.getbuffer().readonly
    assert first.getbuffer().obj is second.getbuffer().obj


def test_a_file_that_changed_since_the_last_run_is_read_anew(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same, changed = tmp_path / "same", tmp_path / "changed"
    for path in (same, changed):
        path.write_bytes(b"before")
        cached_open(path).close()
    minio_job.job_cache().close()
    monkeypatch.setattr(minio_job, "_cache", None)
    changed.write_bytes(b"after it")
    assert cached_open(changed).read() == b"after it"
    assert cached_open(changed).read() == b"after it"
    assert cached_open(same).read() == b"before"
    store = minio_job.job_cache().store
    assert store is not None and store.head.items == 2


def test_beyond_the_budget_a_file_is_opened_as_ever(place: Path, tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(bytes(2 << 20))
    small.write_bytes(b"small")
    assert cached_open(large).read() == bytes(2 << 20)
    assert cached_open(small).read() == b"small"
    small.unlink()
    assert cached_open(small).read() == b"small"


def test_files_are_taken_in_when_their_batch_is_complete(place: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"file-{number}" for number in range(80)]
    for number, file in enumerate(files):
        file.write_bytes(content(number))
    cache = minio_job.job_cache()

    def held_after(first: int, last: int) -> int:
        for file in files[first:last]:
            with cached_open(file) as opened:
                assert opened.read() == file.read_bytes()
        assert cache.store is not None
        return cache.store.head.items

    assert held_after(0, 1) == 1  # nobody has spoken of batches yet
    minio_job.batch_is_complete()
    assert held_after(1, 11) == 1
    minio_job.batch_is_complete()
    assert held_after(11, 11) == 11
    assert held_after(11, 76) == 11 + 64  # not more than so many wait
    data = CachedDataset(Items(3), decode=bytes)
    assert data[1] == content(1)  # of another kind: the last file waits no longer
    assert held_after(0, 0) == 76
    minio_job.batch_is_complete()
    assert held_after(0, 76) == 77


def test_what_files_are_read_into_is_used_again_when_nobody_sees_it() -> None:
    buffers = ReadBuffers()
    first = buffers.take(100)
    assert first is not None
    first[:] = bytes(100)
    part = first[10:20].toreadonly()
    first.release()
    second = buffers.take(100)
    assert second is not None and second.obj is not part.obj
    second.release()
    assert buffers.take(90 << 10) is not None  # the oldest is in use, so it is a new one
    known = part.obj
    part.release()
    again = buffers.take(60 << 10)
    assert again is not None and again.obj is known and len(again) == 60 << 10
    assert buffers.take(1 << 20) is None
    held = [buffers.take(1) for _ in range(100)]
    given = {id(view.obj) for view in held if view is not None}
    assert held[-1] is None and len(given) == sum(view is not None for view in held) < 70


@pytest.mark.parametrize("batch", [0, 5])
def test_files_stay_as_they_were_while_somebody_holds_them(
    place: Path, tmp_path: Path, batch: int
) -> None:
    sizes = [0, 1, 5000, 66_000, 300_000] * 12
    store, held = minio_job.job_cache().store, {}
    minio_job.job_cache().get(bytes(16))  # the first look at the lease is over
    assert store is not None
    store.set_budget(32 << 20)
    if batch:
        minio_job.batch_is_complete()
    for number, size in enumerate(sizes):
        file = tmp_path / f"file-{number}"
        file.write_bytes(bytes([number]) * size)
        opened = cached_open(file)
        assert isinstance(opened, CachedFile) and opened.read() == file.read_bytes()
        if number % 3 == 0:
            held[number] = opened.getbuffer()
        if batch and number % batch == 0:
            minio_job.batch_is_complete()
    for number, view in held.items():
        assert view.readonly and view == bytes([number]) * sizes[number]
    minio_job.batch_is_complete()
    for number, size in enumerate(sizes):  # and what the cache has is the same
        (tmp_path / f"file-{number}").unlink()
        assert cached_open(tmp_path / f"file-{number}").read() == bytes([number]) * size


@pytest.mark.parametrize("capacity", [0, 3, 41, 60])
def test_files_hit_exactly_as_many_as_fit(place: Path, tmp_path: Path, capacity: int) -> None:
    files = [tmp_path / f"file-{number}" for number in range(60)]
    for number, file in enumerate(files):
        file.write_bytes(content(number))
    store = minio_job.job_cache().store
    assert store is not None
    minio_job.job_cache().get(bytes(16))  # the first look at the lease is over
    store.set_budget(capacity * SIZE + SIZE // 2)
    for epoch in range(3):
        random.Random(epoch).shuffle(files)
        looked = {file: store.get(key_of(file)) is not None for file in files}
        assert sum(looked.values()) == (capacity if epoch else 0)
        for number, file in enumerate(files):
            with cached_open(file) as opened:
                assert opened.read() == file.read_bytes()
                assert not looked[file] or isinstance(opened, CachedFile)
            if number % 7 == 6:
                minio_job.batch_is_complete()
        minio_job.batch_is_complete()


def key_of(file: Path) -> bytes:
    source = minio_job.job_cache().source("files")
    assert source is not None
    return source.key_of_name(str(file))


def test_files_that_are_not_what_they_seem(place: Path, tmp_path: Path) -> None:
    status = Path("/proc/version")
    assert status.stat().st_size == 0 and cached_open(status).read() == status.read_bytes()
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        cached_open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    pid = os.fork()
    if not pid:
        try:
            (tmp_path / "pipe").write_bytes(b"through a pipe")
        finally:
            os._exit(0)
    assert cached_open(tmp_path / "pipe").read() == b"through a pipe"
    os.waitpid(pid, 0)


def test_wrong_uses_of_files_are_told(place: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="read as 'rb'"):
        cached_open(tmp_path / "x", "w")
    with pytest.raises(FileNotFoundError, match="missing"):
        cached_open(tmp_path / "missing")


# -- data sets -------------------------------------------------------------------------------------


def test_each_item_is_read_once_and_attributes_stay(place: Path) -> None:
    data = CachedDataset(Items(20), decode=lambda view: (bytes(view), view.readonly))
    data.dataset.read = 0
    for _ in range(3):
        assert [data[index] for index in range(-20, 20)] == [
            (content(index % 20), True) for index in range(-20, 20)
        ]
    assert data.dataset.read == 20 and data.classes == ("cat", "dog") and len(data) == 20
    with pytest.raises(IndexError, match="item 20 of 20"):
        data[20]
    with pytest.raises(AttributeError):
        _ = data._private


def test_a_batch_is_read_and_taken_in_together(place: Path) -> None:
    class Second(CachedDataset):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index), "second"

    seen: list[bytes] = []
    data = CachedDataset(Items(70), decode=bytes, transform=lambda item: seen.append(item) or item)
    data.dataset.read = 0
    store = minio_job.job_cache().store
    assert store is not None
    for turn in range(2):
        seen.clear()
        got = data.__getitems__(range(-70, 0))
        assert got == seen == [content(index) for index in range(70)]
        assert data.dataset.read == 70 and store.head.items == 70, turn
    with pytest.raises(IndexError):
        data.__getitems__([3, 70])
    assert Second(Items(3), decode=bytes).__getitems__([2]) == [(content(2), "second")]


def test_what_is_only_collated_is_not_copied_before(place: Path) -> None:
    torch = pytest.importorskip("torch")
    items = [{"image": torch.full((40, 50), float(n)), "label": n} for n in range(4)]
    data = CachedDataset(items)
    collated = data.for_collation()
    assert [collated[n]["image"].sum() for n in range(4)] == [2000.0 * n for n in range(4)]
    addresses = [collated[2]["image"].data_ptr() for _ in range(2)]
    assert addresses[0] == addresses[1]
    batch = torch.utils.data.default_collate(collated.__getitems__([1, 2]))
    batch["image"] += 7
    own = data[2]["image"]
    own += 7
    assert own.data_ptr() != addresses[0] and torch.equal(collated[2]["image"], items[2]["image"])
    moved = CachedDataset(items, transform=lambda item: item)
    assert moved.for_collation() is moved  # it may write into what it gets


def test_any_items_can_be_cached_and_are_the_readers_own(place: Path) -> None:
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    items = [
        {
            "image": torch.arange(12.0).reshape(3, 4).t(),
            "large": torch.arange(999, dtype=torch.int16).reshape(3, 1, 333),
            "label": label,
            "raw": numpy.ones(3 + 400 * label),
            "none": torch.zeros(0, 2),
        }
        for label in range(4)
    ]
    items[3]["image"] = torch.ones(2, dtype=torch.bfloat16)
    data = CachedDataset(items, transform=lambda item: (item, "seen"))
    for epoch in range(2):
        for index, item in enumerate(items):
            got, seen = data[index]
            assert seen == "seen" and got["label"] == item["label"]
            assert torch.equal(got["image"], item["image"])
            assert got["image"].dtype == item["image"].dtype
            assert torch.equal(got["large"], item["large"]) and got["none"].shape == (0, 2)
            assert got["raw"].tolist() == item["raw"].tolist()
            if epoch:
                for name in ("image", "large", "raw"):
                    got[name] += 1
    assert set(data[3][0]["raw"].tolist()) == {1} and data[0][0]["image"][1, 0] == 1
    assert data[2][0]["large"][0, 0, 1] == 1


def test_a_data_set_that_is_random_is_not_cached(place: Path, capsys: Any) -> None:
    class Augmented(Items):
        def __getitem__(self, index: int) -> bytes:
            return random.randbytes(8)

    state = random.getstate()
    data = CachedDataset(Augmented(5), decode=bytes)
    assert random.getstate() == state
    assert data[0] != data[0]
    err = capsys.readouterr().err
    assert "Augmented is not cached: item 0 differs" in err and err.count("\n") == 1


def test_wrong_uses_of_data_sets_are_told(place: Path) -> None:
    with pytest.raises(CacheError, match="a generator cannot be cached"):
        CachedDataset(iter_ for iter_ in ())
    with pytest.raises(CacheError, match="gave a str"):
        CachedDataset(["text"], decode=bytes)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SYNERGY_CACHE_MIB", "much", "SYNERGY_CACHE_MIB = 'much'"),
        ("SYNERGY_CACHE_MIB", "", "set SYNERGY_CACHE_MIB"),
        ("SYNERGY_CACHE_DIR", "/proc/none", "set SYNERGY_CACHE_DIR"),
        ("SYNERGY_CACHE", "never", "SYNERGY_CACHE = 'never': expected 0, no, off, false or 1"),
        ("SYNERGY_CACHE", "0", ""),
        ("SYNERGY_CACHE", "no", ""),
        ("SYNERGY_CACHE", "Off", ""),
        ("SYNERGY_CACHE", "FALSE", ""),
    ],
)
def test_without_a_cache_the_data_are_read_and_one_line_tells_why(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    data = CachedDataset(Items(3), decode=bytes)
    assert [data[1], data[1]] == [content(1)] * 2 and data.dataset.read == 5
    err = capsys.readouterr().err
    assert err.count("\n") == (1 if words else 0) and words in err


def test_loader_workers_share_one_cache(place: Path) -> None:
    pytest.importorskip("torch")
    program = """
import pickle, sys
from torch.utils.data import DataLoader
import slurm_synergy.jobside as synergy
class Counting:
    def __len__(self): return 40
    def __getitem__(self, index):
        with open(sys.argv[1], "a") as file: file.write("x")
        return index * index
data = synergy.CachedDataset(Counting())
for workers in (2, 0, 1):
    loader = DataLoader(data, batch_size=8, num_workers=workers)
    print(sorted(int(v) for batch in loader for v in batch) == [i * i for i in range(40)])
print(pickle.loads(pickle.dumps(data))[6])
"""
    script, count = place.parent / "program.py", place.parent / "count"
    script.write_text(program)
    environment = clean_environment(SYNERGY_CACHE_DIR=str(place.parent), SYNERGY_CACHE_MIB="1")
    status, out, err = finish(start([str(script), str(count)], environment))
    assert (status, out, err) == (0, "True\n" * 3 + "36\n", "")
    assert len(count.read_text()) == 40 + 3  # and the three looks at what the items are
