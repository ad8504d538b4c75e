"""T04: the time axis of a curve holds training and nothing else."""

from __future__ import annotations

import pytest

from gramgn.training import Clock


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0
        self.synchronized = 0

    def __call__(self) -> float:
        return self.now

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def clock(time: FakeTime) -> Clock:
    return Clock(time.synchronize, now=time)


def spend(clock: Clock, time: FakeTime, part: str, seconds: float) -> None:
    with clock.part(part):
        time.now += seconds


def test_only_training_moves_train_s(clock: Clock, time: FakeTime) -> None:
    """T04: evaluation, checkpoints, logging and start-up do not move it."""
    for part in ("startup", "eval", "checkpoint", "log"):
        spend(clock, time, part, 2.0)
    assert clock.train_s() == 0.0
    spend(clock, time, "train", 3.0)
    assert clock.train_s() == 3.0
    assert clock.wall_s() == 11.0


def test_the_device_is_synchronised_at_both_edges(clock: Clock, time: FakeTime) -> None:
    """T04: work that the device still has to do belongs to the part that asked for it."""
    spend(clock, time, "train", 1.0)
    assert time.synchronized == 2


def test_parts_add_up_to_the_whole(clock: Clock, time: FakeTime) -> None:
    """T04: the sum of the parts is the wall time when everything is in a part."""
    for number, part in enumerate(("startup", "train", "eval", "checkpoint", "log")):
        spend(clock, time, part, 1.0 + number)
    summary = clock.summary()
    assert summary.pop("wall_s") == sum(summary.values())


def test_a_part_in_progress_counts(clock: Clock, time: FakeTime) -> None:
    with clock.part("train"):
        time.now += 1.5
        assert clock.train_s() == 1.5


def test_a_part_that_raises_is_counted(clock: Clock, time: FakeTime) -> None:
    def fail() -> None:
        with clock.part("train"):
            time.now += 2.0
            raise RuntimeError("out")

    with pytest.raises(RuntimeError, match="out"):
        fail()
    assert clock.train_s() == 2.0


def test_a_resumed_clock_goes_on(clock: Clock, time: FakeTime) -> None:
    """T04: seconds of earlier starts are kept, the pause between the starts is not."""
    spend(clock, time, "train", 3.0)
    state = clock.summary()
    time.now += 1000.0
    later = Clock(time.synchronize, now=time)
    spend(later, time, "startup", 1.0)
    later.resume(state)
    spend(later, time, "train", 4.0)
    assert later.train_s() == 7.0
    assert later.wall_s() == 8.0
    assert later.seconds["startup"] == 1.0
