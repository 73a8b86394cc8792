import errno
import fcntl
import gc
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import xxhash

from kvbus_transfer import (
    Arena,
    ArenaClosed,
    ArenaExists,
    ArenaMismatch,
    ArenaNoRoom,
    ArenaUnavailable,
    checksum,
    remove_stale,
)


def test_what_the_owner_writes_another_mapping_reads(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "a.arena", 64, 4) as owner, Arena.open(tmp_path / "a.arena", 64, 4) as other:
        owner.view(2)[:] = b"x" * 64
        assert bytes(other.view(2)) == b"x" * 64
        assert bytes(other.view(1)) == bytes(64) == bytes(other.view(3))
        other.view(0)[3] = 7
        assert owner.view(0)[3] == 7
        assert owner.size_bytes == 256


def test_another_process_sees_the_same_memory(tmp_path: Path) -> None:
    code = """
        import sys
        from kvbus_transfer import Arena
        with Arena.open(sys.argv[1], 4096, 3) as arena:
            arena.view(1)[:5] = b"hello"
    """
    with Arena.create(tmp_path / "a.arena", 4096, 3) as arena:
        subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(arena.path)], check=True, timeout=30)
        assert bytes(arena.view(1)[:5]) == b"hello"


def test_the_umask_does_not_decide_the_permissions(tmp_path: Path) -> None:
    for umask in (0o000, 0o377):
        before = os.umask(umask)
        try:
            with Arena.create(tmp_path / f"{umask}.arena", 16, 1) as arena:
                mode = stat.S_IMODE(arena.path.stat().st_mode)
        finally:
            os.umask(before)
        assert mode == 0o600


def test_a_group_may_share_the_arena(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "a.arena", 16, 1, group=os.getegid()) as arena:
        status = arena.path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o660
        assert status.st_gid == os.getegid()


def test_the_memory_is_reserved_at_creation(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "a.arena", 4096, 32) as arena:
        assert arena.path.stat().st_blocks * 512 >= 4096 * 32


def test_a_full_file_system_is_a_clear_error_and_leaves_no_file(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("os.posix_fallocate", side_effect=full), pytest.raises(ArenaNoRoom) as caught:
        Arena.create(tmp_path / "a.arena", 4096, 10)
    assert caught.value.wanted_bytes == 40960
    assert caught.value.retryable
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_an_arena_larger_than_the_memory_file_system_is_refused() -> None:
    path = Path(f"/dev/shm/kvbus-test-{os.getpid()}.arena")
    with pytest.raises(ArenaNoRoom):
        Arena.create(path, 1 << 40, 1 << 20)
    assert not path.exists()


def test_an_existing_file_is_never_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    path.write_bytes(b"mine")
    with pytest.raises(ArenaExists):
        Arena.create(path, 16, 1)
    assert path.read_bytes() == b"mine"
    link = tmp_path / "link.arena"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArenaExists):
        Arena.create(link, 16, 1)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("slot_bytes", "slots"), [(64, 5), (32, 4), (0, 4), (64, 0), (-64, -4)])
def test_opening_with_another_shape_is_refused(tmp_path: Path, slot_bytes: int, slots: int) -> None:
    with Arena.create(tmp_path / "a.arena", 64, 4) as arena, pytest.raises(ArenaMismatch):
        Arena.open(arena.path, slot_bytes, slots)


def test_opening_what_is_no_arena_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArenaUnavailable):
        Arena.open(tmp_path / "missing.arena", 64, 4)
    os.mkfifo(tmp_path / "fifo.arena")
    with pytest.raises(ArenaMismatch):
        Arena.open(tmp_path / "fifo.arena", 64, 4)
    with Arena.create(tmp_path / "a.arena", 64, 4) as arena:
        (tmp_path / "link.arena").symlink_to(arena.path)
        with pytest.raises(ArenaUnavailable):
            Arena.open(tmp_path / "link.arena", 64, 4)


def test_slots_have_bounds(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "a.arena", 64, 4) as arena:
        for index in (-1, 4):
            with pytest.raises(IndexError):
                arena.view(index)


def test_closing_twice_is_harmless_and_a_living_view_stays_valid(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a.arena", 64, 4)
    view = arena.view(0)
    view[0] = 9
    arena.close()
    arena.close()
    assert arena.is_closed
    assert view[0] == 9
    with pytest.raises(ArenaClosed):
        arena.view(0)
    assert remove_stale(tmp_path, "*.arena") == [arena.path]  # the lock is gone although the view keeps the mapping
    del view
    gc.collect()


def test_removing_keeps_the_mappings_of_others(tmp_path: Path) -> None:
    owner = Arena.create(tmp_path / "a.arena", 64, 4)
    owner.view(1)[0] = 5
    with Arena.open(owner.path, 64, 4) as other:
        owner.remove()
        owner.remove()
        assert not owner.path.exists()
        assert other.view(1)[0] == 5


def test_only_the_arenas_of_dead_owners_are_stale(tmp_path: Path) -> None:
    code = """
        import os, sys
        from kvbus_transfer import Arena
        arena = Arena.create(sys.argv[1], 64, 4)
        os._exit(0)
    """
    dead = tmp_path / "kvbus-dead.arena"
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(dead)], check=True, timeout=30)
    (tmp_path / "other.file").write_bytes(b"")
    (tmp_path / "kvbus-directory.arena").mkdir()
    with Arena.create(tmp_path / "kvbus-alive.arena", 64, 4) as alive, Arena.open(dead, 64, 4) as reader:
        assert remove_stale(tmp_path, "kvbus-*.arena") == [dead]
        assert alive.path.exists()
        assert bytes(reader.view(0)) == bytes(64)
    assert (tmp_path / "other.file").exists()


def test_a_creator_whose_file_was_swept_before_it_was_locked_tries_again(tmp_path: Path) -> None:
    real = fcntl.flock
    swept: list[int] = []

    def sweep_first(fd: int, operation: int) -> None:
        if not swept:
            swept.append(fd)
            (tmp_path / "a.arena").unlink()
        real(fd, operation)

    with mock.patch("fcntl.flock", sweep_first), Arena.create(tmp_path / "a.arena", 64, 4) as arena:
        assert arena.path.stat().st_size == 256
        assert swept


def test_a_creator_gives_up_when_its_file_is_swept_every_time(tmp_path: Path) -> None:
    real = fcntl.flock

    def sweep(fd: int, operation: int) -> None:
        (tmp_path / "a.arena").unlink()
        real(fd, operation)

    with mock.patch("fcntl.flock", sweep), pytest.raises(ArenaUnavailable):
        Arena.create(tmp_path / "a.arena", 64, 4)


def test_the_checksum_is_xxh3_64(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "a.arena", 64, 1) as arena:
        arena.view(0)[:] = bytes(range(64))
        assert checksum(arena.view(0)) == xxhash.xxh3_64(bytes(range(64))).intdigest()
        assert checksum(b"") == 0x2D06800538D394C2  # the reference value of the empty input
