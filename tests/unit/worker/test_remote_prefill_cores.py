"""Jobs and pulls of remote prefills, without bus, engine and memory."""

from collections.abc import Callable

import pytest

from kvbus_wire.transfer import BlocksReady
from kvbus_worker.core.prefill_jobs import PrefillJob, PrefillJobs, StagedChunk
from kvbus_worker.core.pulls import Coming
from kvbus_worker.engines.base import EngineError

KEYS = [bytes([i]) * 16 for i in range(8)]


class Flag:
    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        self.is_set = True

    async def wait(self) -> None:
        assert self.is_set


def _job(name: str = "a", lease_until: float = 10.0) -> PrefillJob:
    return PrefillJob(
        prefill_id=name, request_id=name, reader="d", keys=KEYS, first_block=0, lease_s=5.0, lease_until=lease_until
    )


def _stage(jobs: PrefillJobs, job: PrefillJob, first: int, most: int) -> StagedChunk:
    slots = jobs.take_slots(most)
    answer = BlocksReady(prefill_id=job.prefill_id, first=first, count=len(slots))
    chunk = StagedChunk(first, len(slots), first + 1, slots, answer)
    job.chunks.append(chunk)
    jobs.check_integrity()
    return chunk


def test_blocks_are_ready_as_far_as_the_chain_is_there() -> None:
    job = _job()
    assert job.advance({KEYS[0], KEYS[1], KEYS[3]})
    assert job.ready == 2
    assert not job.advance({KEYS[0], KEYS[1], KEYS[3]})
    assert job.advance(set(KEYS))
    assert job.ready == job.end_block == 8


def test_slots_come_back_when_chunks_were_read_and_at_the_end() -> None:
    jobs = PrefillJobs(limit=2, slots=5)
    job = _job()
    jobs.add(job)
    _stage(jobs, job, 0, 3)
    assert _stage(jobs, job, 3, 3).count == 2
    assert (jobs.staged, jobs.take_slots(1)) == (5, ())
    for chunk in job.take_read(3):
        jobs.free(chunk.slots)
    assert jobs.staged == 2
    assert job.chunk_at(3) is not None
    assert job.chunk_at(0) is None
    for chunk in jobs.remove(job):
        jobs.free(chunk.slots)
    assert (jobs.staged, len(jobs), jobs.remove(job)) == (0, 0, [])
    jobs.check_integrity()


def test_jobs_are_bounded_and_silent_ones_are_found() -> None:
    jobs = PrefillJobs(limit=2, slots=5)
    jobs.add(_job("a", 10.0))
    jobs.add(_job("b", 20.0))
    with pytest.raises(EngineError):
        jobs.add(_job("c"))
    assert jobs.next_due() == 10.0
    assert [job.prefill_id for job in jobs.silent(10.0)] == ["a"]
    found = jobs.of_engine("b|prefill")
    assert found is not None
    assert found.request_id == "b"
    assert jobs.request_ids == ("a", "b")


def _coming() -> tuple[Coming, Callable[[], int]]:
    coming = Coming(Flag)
    return coming, coming.number


def test_later_pulls_wait_for_what_earlier_ones_bring() -> None:
    coming, number = _coming()
    first, second, third = number(), number(), number()
    coming.begin(first, KEYS[:4])
    assert coming.shared(KEYS, 0, second) == 4
    assert coming.shared(KEYS, 2, second) == 4
    assert coming.shared(KEYS, 4, second) == 4
    coming.begin(second, KEYS[4:])
    assert coming.shared(KEYS, 0, third) == 8
    assert coming.shared(KEYS, 0, first) == 0, "nobody waits for itself or for one that began later"


def test_whoever_waits_is_woken_once_the_block_has_come_or_does_not() -> None:
    coming, number = _coming()
    pull = number()
    coming.begin(pull, KEYS)
    signal = coming.signal(KEYS[3])
    assert signal is coming.signal(KEYS[3])
    coming.end(pull, KEYS[:3])
    assert isinstance(signal, Flag)
    assert not signal.is_set
    coming.end(pull, KEYS)
    coming.end(pull, KEYS)
    assert signal.is_set
    assert len(coming) == 0


def test_a_block_that_two_bring_still_comes_when_one_gives_up() -> None:
    coming, number = _coming()
    first, second, third = number(), number(), number()
    coming.begin(first, KEYS)
    coming.begin(second, KEYS)
    coming.end(first, KEYS)
    assert coming.shared(KEYS, 0, third) == 8
    coming.end(second, KEYS)
    assert coming.shared(KEYS, 0, third) == 0
