"""The split rule."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gramgn.data import split_samples

SAMPLES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=80)


def named(samples: list[tuple[int, int]]) -> tuple[list[str], list[str], list[str]]:
    """Return keys, persons (0 is none) and hashes."""
    keys = [f"{position:03d}" for position in range(len(samples))]
    return (
        keys,
        [f"p{person}" if person else "" for person, _ in samples],
        [f"h{digest}" for _, digest in samples],
    )


@settings(max_examples=60, deadline=None)
@given(SAMPLES, st.integers(0, 5))
def test_persons_and_equal_bytes_stay_together(samples: list[tuple[int, int]], seed: int) -> None:
    """D10: no person and no bytes on two sides, however they are chained."""
    keys, groups, hashes = named(samples)
    splits = split_samples(keys, groups, hashes, [""] * len(keys), seed)
    for labels in (groups, hashes):
        for label in set(labels) - {""}:
            assert len({split for split, other in zip(splits, labels, strict=True) if other == label}) == 1
    assert set(splits) <= {"train", "val", "test"}


@settings(max_examples=30, deadline=None)
@given(SAMPLES)
def test_the_smallest_key_decides_for_all_that_it_reaches(samples: list[tuple[int, int]]) -> None:
    """D11: against a plain search through the graph of persons and equal bytes."""
    keys, groups, hashes = named(samples)
    splits = split_samples(keys, groups, hashes, [""] * len(keys), 0)
    for start in range(len(keys)):
        reached, waiting = {start}, [start]
        while waiting:
            one = waiting.pop()
            for other in range(len(keys)):
                same_person = groups[one] and groups[one] == groups[other]
                if other not in reached and (same_person or hashes[one] == hashes[other]):
                    reached.add(other)
                    waiting.append(other)
        assert splits[start] == alone(keys[min(reached)])


def alone(key: str, seed: int = 0) -> str:
    """Return the split of a sample that shares nothing with others."""
    return split_samples([key], [""], [""], [""], seed)[0]


def test_shares_are_80_10_10_and_depend_on_the_seed() -> None:
    keys = [str(number) for number in range(20_000)]
    splits = {seed: split_samples(keys, [""] * 20_000, keys, [""] * 20_000, seed) for seed in (0, 1)}
    counts = Counter(splits[0])
    assert abs(counts["val"] - 2000) < 150
    assert abs(counts["test"] - 2000) < 150
    assert splits[0] != splits[1]


def test_the_rule_is_frozen() -> None:
    """D11: these assignments are published; another rule would be another data set."""
    ids = ("1377", "1378", "1379", "39/112/474596-0.jpg", "18/111/1-0.jpg", "1404", "1411")
    frozen = ["train", "train", "val", "train", "test", "train", "train"]
    assert [alone(key) for key in ids] == frozen


def test_published_test_set_leaves_90_10() -> None:
    keys = [f"{number:05d}" for number in range(5000)]
    official = ["test" if number < 100 else "" for number in range(5000)]
    counts = Counter(split_samples(keys, [""] * 5000, keys, official, 0))
    assert counts["test"] == 100
    assert abs(counts["val"] - 490) < 70


def test_copies_of_published_test_images_are_in_no_split() -> None:
    """D10: a published test set stays as it is; a training image with the same bytes is left out."""
    splits = split_samples(
        ["a", "b", "c", "d"], [""] * 4, ["1", "1", "2", "3"], ["test", "", "test", "val"], 0
    )
    assert splits == ["test", "", "test", "val"]
