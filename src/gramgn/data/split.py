"""The split rule: persons and equal files stay together, and nothing but keys and a seed decides."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

TEST_SHARE = 0.1
VAL_SHARE = 0.1
PRIORITY = ("test", "val", "train")


def components(keys: Sequence[str], groups: Sequence[str], hashes: Sequence[str]) -> list[int]:
    """Join samples of one group or with equal bytes.

    Args:
        keys: `[N]` stable keys, sorted.
        groups: `[N]` group (person) of each sample, empty for none.
        hashes: `[N]` hash of each sample's bytes.

    Returns:
        `[N]` the position of the component's first sample, which has its smallest key.
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


def assign(key: str, seed: int, *, val_share: float, test_share: float) -> str:
    """Return the split of the component whose smallest key is `key`.

    The first 64 bits of sha256 of `"<seed>:<key>"` are read as a number in [0, 1).
    """
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < 1.0 - val_share - test_share:
        return "train"
    return "val" if share < 1.0 - test_share else "test"


def split_samples(
    keys: Sequence[str], groups: Sequence[str], hashes: Sequence[str], official: Sequence[str], seed: int
) -> list[str]:
    """Assign every sample to a split.

    Published splits are binding. Where one of them is the test split, the rest is split 90/10 into train and
    val, else 80/10/10. A sample that shares a person or its bytes with a binding one of another split is in
    none, so that published sets stay as they are; test goes before val, val before train.

    Args:
        keys: `[N]` stable keys, sorted.
        groups: `[N]` group (person) of each sample, empty for none.
        hashes: `[N]` hash of each sample's bytes.
        official: `[N]` binding split of each sample, empty where the rule decides.
        seed: Seed of the rule.

    Returns:
        `[N]` `"train"`, `"val"`, `"test"`, or `""` for a sample that would leak.
    """
    component = components(keys, groups, hashes)
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
        else:
            splits.append(assign(keys[root], seed, val_share=val_share, test_share=test_share))
    return splits
