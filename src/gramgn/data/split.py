"""The split rule: photos of a person and equal files stay together; only keys and a seed decide."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

TEST_SHARE = 0.1
VAL_SHARE = 0.1
PRIORITY = ("test", "val", "train")


def hash_share(text: str) -> float:
    """Return the first 64 bits of a text's sha256 as a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _components(keys: Sequence[str], groups: Sequence[str], hashes: Sequence[str]) -> list[int]:
    """Join samples of one group or with equal bytes; return `[N]` the first sample of each sample's component.

    The first sample of a component has its smallest key, as the keys are sorted.
    """
    parent = list(range(len(keys)))

    def find(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    first: dict[tuple[str, str], int] = {}
    for position, (group, digest) in enumerate(zip(groups, hashes, strict=True)):
        for label in (("group", group), ("bytes", digest)):
            if label[1]:
                one, other = find(first.setdefault(label, position)), find(position)
                parent[max(one, other)] = min(one, other)
    return [find(position) for position in range(len(keys))]


def split_samples(
    keys: Sequence[str], groups: Sequence[str], hashes: Sequence[str], official: Sequence[str], seed: int
) -> list[str]:
    """Assign every sample to a split.

    Published splits are binding. If one of them is the test split, the rest is split 90/10 into train and
    val, otherwise 80/10/10. A sample that shares a person or its bytes with a binding sample of another split is in
    none, so that published sets stay as they are; test has priority over val, val over train.

    A component goes to the split of the share of `[0, 1)` that the first 64 bits of sha256 of `"<seed>:<key>"` fall
    in, where `key` is its smallest key.

    Args:
        keys: `[N]` stable keys, sorted.
        groups: `[N]` group (person) of each sample, empty for none.
        hashes: `[N]` hash of each sample's bytes.
        official: `[N]` binding split of each sample, empty where the rule decides.
        seed: Seed of the rule.

    Returns:
        `[N]` `"train"`, `"val"`, `"test"`, or `""` for a sample that would leak.
    """
    component = _components(keys, groups, hashes)
    bound: dict[int, str] = {}
    for root, published in zip(component, official, strict=True):
        if published:
            bound[root] = min(published, bound.get(root, published), key=PRIORITY.index)
    test_share = 0.0 if "test" in official else TEST_SHARE
    val_share = 0.0 if "val" in official else VAL_SHARE
    splits = []
    for root, published in zip(component, official, strict=True):
        if root in bound:
            splits.append(published if published == bound[root] else "")
            continue
        share = hash_share(f"{seed}:{keys[root]}")
        is_train = share < 1.0 - val_share - test_share
        splits.append("train" if is_train else "val" if share < 1.0 - test_share else "test")
    return splits
