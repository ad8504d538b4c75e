"""Provenance tells where a result comes from and nothing about whose machine it was."""

from __future__ import annotations

import getpass
import platform
import subprocess
from pathlib import Path

import pytest

from gramgn.records import git_state, portable, start_record, versions


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@example.org", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "a.txt").write_text("one\n")
    git(folder, "add", "a.txt")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def test_a_clean_repository_is_its_commit(repo: Path) -> None:
    state = git_state(repo)
    assert len(state["commit"]) == 40
    assert (state["dirty"], state["diff_sha256"]) == (False, None)


def test_the_diff_hash_tells_changes_apart(repo: Path) -> None:
    hashes = []
    for name, text in (("a.txt", "two\n"), ("a.txt", "three\n"), ("new.txt", "x"), ("new.txt", "y")):
        (repo / name).write_text(text)
        state = git_state(repo)
        assert state["dirty"] is True
        hashes.append(state["diff_sha256"])
    assert len(set(hashes)) == 4
    assert git_state(repo)["diff_sha256"] == hashes[-1]


def test_a_repository_without_a_commit_is_dirty(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    state = git_state(tmp_path)
    assert (state["commit"], state["dirty"]) == (None, True)


def test_an_enclosing_repository_does_not_count(repo: Path) -> None:
    inner = repo / "site-packages"
    inner.mkdir()
    assert git_state(inner)["commit"] is None


def test_without_git_the_run_goes_on(repo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(repo) == {
        "commit": None,
        "dirty": None,
        "diff_sha256": None,
        "note": "git is not installed",
    }


def test_a_git_that_hangs_is_left_after_a_few_seconds(
    repo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert git_state(repo, timeout_s=0.2)["note"] == "git took longer than 0.2 s"


def test_versions_name_what_a_result_depends_on() -> None:
    found = versions()
    assert found["python"] == platform.python_version()
    assert set(found) >= {"gramgn", "torch", "torchvision", "numpy", "pillow", "hydra", "omegaconf", "wandb"}
    assert start_record()["versions"] == found


def test_no_host_name_in_a_start_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "secret-host")
    assert "secret-host" not in str(start_record())
    assert f"/{getpass.getuser()}/" not in str(start_record())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/repo/data/raw/rsna", "data/raw/rsna"),
        ("/repo", "."),
        ("/repository/x", "x"),
        ("/home/alice/sets/rsna", "rsna"),
        ("/home/alice", "~"),
        ("data/raw", "data/raw"),
        ("dataset.root=/home/alice/rsna", "dataset.root=rsna"),
        (
            "no folder /home/alice/rsna, see http://127.0.0.1:9/a/b",
            "no folder rsna, see http://127.0.0.1:9/a/b",
        ),
        ("cannot read '/repo/outputs/runs/x/last.pt'", "cannot read 'outputs/runs/x/last.pt'"),
        ("30 ms/step, a/b", "30 ms/step, a/b"),
        (Path("/mnt/alice/rsna"), "rsna"),
        ({"root": "/repo/a", "n": [1, 0.5, None, "/x/alice/y"]}, {"root": "a", "n": [1, 0.5, None, "y"]}),
    ],
)
def test_paths_of_the_machine_do_not_reach_the_records(given: object, expected: object) -> None:
    assert portable(given, "/repo") == expected
