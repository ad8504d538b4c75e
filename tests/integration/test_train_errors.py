"""Bad input: one message, the right exit code, and everything on disk as it was."""

from __future__ import annotations

import errno
import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from house import BLOBS, SMALL, Call, House, read_run
from hydra.core.override_parser.overrides_parser import OverridesParser

from gramgn.app import train_command
from gramgn.records import RunFolder, path_override
from gramgn.training import Reporter

CASES = {
    "a misspelt key": (["optimizer.lamda=9"], ["'optimizer.lamda'", "did you mean 'optimizer.lam'"]),
    "a misspelt key with +": (["+optimizer.lamda=9"], ["'optimizer.lamda'", "did you mean 'lam'"]),
    "a key without its section": (["lr=0.1"], ["there is no 'lr'", "did you mean 'optimizer.lr'"]),
    "a key of other packages": (["learning_rate=0.1"], ["did you mean 'optimizer.lr'"]),
    "another name of a key": (["optimizer.learning_rate=0.1"], ["did you mean 'optimizer.lr'"]),
    "a checkpoint for a run": (
        ["init_from=outputs/runs/nothing/checkpoints/last.pt"],
        ["there is no run folder"],
    ),
    "a misspelt group": (["optimiser=ggn"], ["'optimiser'", "did you mean 'optimizer'"]),
    "a misspelt group with +": (["+optimiser=ggn"], ["'optimiser'", "did you mean 'optimizer'"]),
    "a search without its extra": (
        ["sweep=optuna_alpha", "hydra/sweeper=optuna"],
        ["a search by Optuna needs the extra optuna: python -m pip install '.[optuna]'"],
    ),
    "a misspelt choice": (
        ["optimizer=gnn"],
        [
            "optimizer=gnn",
            "did you mean 'ggn'",
            "adamw, ggn, ggn_lm, ggn_recommended, ggn_spring, gradient_descent, muon, sgd",
        ],
    ),
    "a subgroup as the help lists it": (
        ["experiment/fig1=afad_ggn_fixup"],
        ["did you mean experiment=fig1/afad_ggn_fixup?"],
    ),
    "the scale of another trainer": (
        ["scale=debug", "trainer=paper"],
        ["scale=debug follows from the trainer, which is paper", "give trainer=debug"],
    ),
    "an experiment of another optimizer": (
        ["experiment=fig1/afad_ggn_fixup", "optimizer=sgd"],
        [
            "experiment=fig1/afad_ggn_fixup states the numbers of optimizer=ggn",
            "Choose an experiment of sgd (fig1/afad_sgd_bn, fig1/afad_sgd_fixup, ",
            "without experiment=",
        ],
    ),
    "an experiment of SGD for GGN": (  # would silently be GGN with SGD's learning rate and momentum
        ["experiment=fig1/afad_sgd_bn", "optimizer=ggn"],
        ["states the numbers of optimizer=sgd", "fig1/afad_ggn_fixup"],
    ),
    "an unknown size": (["+scale.depht=1"], ["'scale.depht'", "did you mean 'depth'"]),
    "an unknown tracking key": (["+tracking.projekt=x"], ["'tracking.projekt'", "did you mean 'project'"]),
    "an unknown key of torch's": (
        ["optimizer=sgd", "+optimizer.momentun=0.5"],
        ["'optimizer.momentun'", "did you mean 'momentum'"],
    ),
    "a text for a number": (["optimizer.lam=abc"], ["optimizer.lam='abc' must be a number"]),
    "a text for torch's number": (["optimizer=sgd", "optimizer.lr=abc"], ["lr='abc' must be a number"]),
    "a negative alpha": (["optimizer.alpha=-1"], ["alpha must be", "-1"]),
    "another loss": (["+optimizer.loss=cross_entropy"], ["optimizer.loss=cross_entropy", "regressions"]),
    "a target inside that is not there": (
        ["optimizer=ggn_lm", "optimizer.adaptive_damping._target_=gramgn.optim.Nothing"],
        ["gramgn.optim.Nothing"],
    ),
    "a list for a format": (["optimizer.engine.jacobian_dtype=[bfloat16]"], ["jacobian_dtype", "'bfloat16'"]),
    "a negative rate of muon": (
        ["optimizer=muon", "optimizer.adamw_lr=-1"],
        ["optimizer.adamw_lr=-1", "at least 0"],
    ),
    "a bad depth": (["model=resnet_fixup", "model.depth=33"], ["depth must be 6 n + 2", "33", "32 and 38"]),
    "several bad values": (["trainer.epochs=0", "trainer.order=x"], ["trainer.epochs=0", "order='x'"]),
    "a key given twice": (
        ["optimizer.lam=0.1", "optimizer.lam=1"],
        ["optimizer.lam is given twice: optimizer.lam=0.1 and optimizer.lam=1"],
    ),
    "an unknown schedule": (["schedule=step"], ["schedule", "one_cycle"]),
    "a wrong key of a schedule": (["+schedule.warmups=1"], ["'schedule.warmups'", "did you mean 'warmup'"]),
    "no schedule": (["schedule=null"], ["schedule must not be removed. Choices: constant, cosine"]),
    "alpha changed by two": (
        ["optimizer=ggn_lm", "schedule=linear", "schedule.alpha=3"],
        ["schedule.alpha=3", "adaptive_damping changes alpha already"],
    ),
    "momentum where there is none": (
        ["optimizer=adamw", "schedule=linear", "schedule.momentum=0.9"],
        ["AdamW has no momentum"],
    ),
    "an augmentation that makes labels wrong": (
        ["augment=crop_flip"],
        ["augment.crop", "keeps its labels under flip only"],
    ),
    "a bad average": (["trainer.average_decay=1"], ["trainer.average_decay=1 must be"]),
    "a bad seed": (["seed=-1"], ["seed=-1", "from 0 to 2^63"]),
    "a bad device": (["trainer.device=tpu"], ["trainer.device='tpu'", "auto, cpu, cuda"]),
    "missing values": (["dataset.seed=???", "model.dropout=???"], ["dataset.seed, model.dropout"]),
    "a broken override": (["optimizer=["], ["no viable alternative"]),
    "a target that is not there": (["model._target_=outside.Nothing"], ["Nothing cannot be imported"]),
    "a module that is not there": (["model._target_=nowhere.Net"], ["nowhere.Net cannot be imported"]),
    "a column of outputs": (["model.outputs=column"], ["shape [2]", "[2, 1]", ".squeeze(-1)"]),
    "wrong channels": (["model.channels=1"], ["does not take images of shape [2, 3, 16, 16]"]),
    "wrong channels of ours": (
        ["model=resnet_gn", "model.in_channels=1"],
        ["does not take images of shape [2, 3, 16, 16]", "in_channels"],
    ),
    "batch statistics": (["model=resnet_bn"], ["statistics of the batch", "ResNetFixup", "ResNetGN"]),
    "a warm start from nowhere": (["init_from=outputs/runs/nothing"], ["there is no run folder", "nothing"]),
    "a scale that is no trainer": (
        ["trainer.scale=foo"],
        ["trainer.scale is the name of the chosen trainer", "trainer=<debug | desk | laptop | paper>"],
    ),
    "an unknown policy for failures": (["on_failure=foo"], ["on_failure=foo: allowed are continue, stop"]),
    "far too many threads": (["trainer.threads=100000"], ["trainer.threads=100000 must be at most"]),
    "no model": (["model=null"], ["model=null: model must not be removed. Choices: resnet18_gn, "]),
    "an optimizer that was removed": (
        ["~optimizer"],
        ["~optimizer: optimizer must not be removed", "ggn_lm"],
    ),
    "an option of a section that is replaced": (
        ["optimizer.engine=vmap", "optimizer.engine.chunk_size=2"],
        [
            "optimizer.engine=vmap stands for the whole section that optimizer.engine.chunk_size=2 belongs to",
            "or give optimizer.engine.name=vmap",
        ],
    ),
    "a section that replaces an option": (  # would silently drop it
        ["optimizer.engine.chunk_size=2", "optimizer.engine=vmap"],
        ["optimizer.engine=vmap stands for the whole section"],
    ),
    "a key twice in braces": (["optimizer={lam:1,lam:2}"], ["gives lam twice"]),
    "a key beside its section in braces": (
        ["optimizer.lam=1", "optimizer={alpha:2}"],
        ["optimizer={alpha:2} stands for the whole section that optimizer.lam=1 belongs to"],
    ),
    "a misspelt key in braces": (
        ["optimizer={alhpa:1}"],
        ["there is no 'optimizer.alhpa' (did you mean 'optimizer.alpha'?)"],
    ),
    "a misspelt choice of a subgroup": (
        ["experiment=fig1/afad"],
        ["there is no experiment=fig1/afad (did you mean 'fig1/afad_sgd_bn'?)", "ours/afad_ggn_spring_gn"],
    ),
    "an unknown key of Hydra": (
        ["hydra.launcher.n_job=2"],
        ["there is no 'hydra.launcher.n_job' (did you mean 'launcher.n_jobs'?)", "hydra.sweep.dir"],
    ),
    "a key of Hydra that is nobody's": (
        ["+hydra.foo=1"],
        ["+hydra.foo=1 has no effect here", "hydra.run.dir"],
    ),
    "another working directory": (["hydra.job.chdir=true"], ["hydra.job.chdir=true has no effect here"]),
    "files of Hydra's": (["hydra.output_subdir=.hydra"], ["has no effect here"]),
    "Hydra's own log": (["hydra/job_logging=default"], ["has no effect here"]),
    "a variable that is not set": (["hydra.job.env_copy=[NOT_SET]"], ["has no effect here"]),
    "several jobs of one run": (
        ["hydra.launcher.n_jobs=4"],
        ["hydra.launcher.n_jobs=4 concerns a sweep, and this is a single run: add -m or sweep="],
    ),
    "an axis of no sweep": (["+hydra.sweeper.params.seed=1"], ["concerns a sweep"]),
    "several values of one run": (
        ["seed=1,2"],
        ["seed=1,2 has several values: add -m to sweep over them", "write \"seed='1,2'\""],
    ),
    "several choices of one run": (["optimizer=ggn,sgd"], ["optimizer=ggn,sgd has several values: add -m"]),
    **{
        f"a path with {path[-1]}": (
            [f"resume=outputs/{path}"],
            [f"resume=outputs/{path}: this text needs quotes: \"resume='outputs/{path}'\""],
        )
        for path in ("optimizer.lam=1-a3705c91", "lam=1,2", "it(1)", "ä", "a#1", "50%&")
    },
    "a path below the home folder": (["init_from=~/run"], ["this text needs quotes: \"init_from='~/run'\""]),
    "a path with quotes": (["resume=it's"], ["""needs quotes: 'resume='"'"'it\\'"'"'s'"'"''"""]),
    "a key that was removed": (["~seed"], ["seed must not be removed"]),
    "a setting that was removed": (["~trainer.epochs"], ["trainer.epochs must not be removed"]),
    "images of enormous size": (
        ["dataset=rsna_synthetic", "model=resnet_gn", "trainer.image_size=100000"],
        ["image_size", "2048"],
    ),
    "an enormous network": (["model=resnet_gn", "model.width=400000"], ["model (gramgn.models.ResNetGN)"]),
    "half a pair of betas": (["optimizer=adamw", "optimizer.betas=[0.9]"], ["optimizer (torch.optim.AdamW)"]),
    "a number for a folder": (["dataset=rsna", "dataset.root=5"], ["dataset.root=5 must be the path"]),
    "lr nan": (["optimizer=sgd", "optimizer.lr=nan"], ["optimizer.lr=nan must be a finite number"]),
    "a wait of nan": (["tracking.init_timeout_s=nan"], ["tracking.init_timeout_s", "number"]),
    "a command that is no override": (["=5"], ["error:"]),
    "an interpolation to nowhere": (["optimizer.alpha=${nowhere.x}"], ["cannot be resolved", "nowhere"]),
}


@pytest.mark.parametrize("path", ["a=b,c", "it's", "$HOME/(1)", 'a"b', "a b!", "~/ä", "a\\b", "plain-1.0"])
def test_the_form_that_messages_give_for_a_path_works(path: str) -> None:
    """In the shell first, then in Hydra."""
    words = shlex.split(path_override("resume", path))
    (override,) = OverridesParser.create().parse_overrides(words)
    assert override.value() == path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1\n", "mine.yaml"),
        (b"lam: 1\nlam: 2\n", "found duplicate key lam"),
        (b"\xff\xfe\x00", "codec can't decode"),
        (b"defaults: [mine]\n", "recursion"),
        (b"defaults: [ggn]\nlamda: 2\n", "did you mean 'lam'"),
        (b"", "names no _target_"),
    ],
)
def test_a_damaged_file_of_the_users_is_one_message(
    house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    (tmp_path / "conf" / "optimizer" / "mine.yaml").write_bytes(content)
    words = ["--config-dir", str(tmp_path / "conf"), "optimizer=mine", "dataset=sphere", "trainer=debug"]
    assert train_command(words, house.root) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_flags_may_follow_overrides(call: Call, house: House) -> None:
    """Hydra reads no override after a flag that follows others."""
    words = ["trainer=debug", "trainer.epochs=1", *BLOBS, "dataset=blobs", "model=tiny", "tracking=none"]
    assert train_command(words, house.root) == 0
    assert len(house.runs()) == 1


@pytest.mark.parametrize("case", CASES)
def test_one_message_and_nothing_changed(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """H09, H17, T01, G01: a wrong key, value or combination is rejected before any work, with exit code 2."""
    overrides, expected = CASES[case]
    before = house.files()
    chosen = [entry for entry in SMALL if entry.split("=")[0] not in {o.split("=")[0] for o in overrides}]
    assert call(*chosen, *overrides) == 2
    message = capsys.readouterr().err
    for words in expected:
        assert words in message
    assert "Traceback" not in message
    assert message.count("error:") == 1
    assert house.files() == before


def test_batches_of_one_are_no_batches(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """G05: batch statistics of single samples: rejected, instead of an epoch without a step and a loss of 0."""
    options = [entry for entry in SMALL if not entry.startswith("model")]
    assert call(*options, "model=resnet_bn", "optimizer=sgd", "trainer.batch_size=1") == 2
    assert "trainer.batch_size=1: one sample has no batch statistics" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_message(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    (house.root / "outputs").write_text("a file where a folder should be")
    assert call(*SMALL) == 2
    message = capsys.readouterr().err
    assert str(house.root / "outputs") in message
    assert "Traceback" not in message


def test_two_starts_at_once_and_a_reader_that_leaves(house: House) -> None:
    """H06: two processes, two folders, each a whole run, although the output of one is cut off (`2>&1 | head -1`)."""
    left, other = (house.start(*BLOBS, *SMALL, "optimizer=sgd", "trainer.epochs=1") for _ in range(2))
    assert left.stderr is not None
    left.stderr.readline()
    left.stderr.close()
    assert [process.wait(timeout=240) for process in (left, other)] == [0, 0]
    assert left.stdout is not None
    left.stdout.close()
    other.communicate()
    assert [read_run(folder)["state"] for folder in house.runs()] == ["done", "done"]


def test_ctrl_c_while_importing(house: House, tmp_path: Path) -> None:
    """Before any handler stands: no traceback, and the exit code of an interruption."""
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "hydra.py").write_text("raise KeyboardInterrupt\n")
    done = house.run(*SMALL, PYTHONPATH=str(tmp_path / "early"))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_axis_that_is_no_key(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """Said as for a single run; two sweeps apart would not help."""
    assert call(*SMALL, "sead=0,1", multirun=True) == 2
    message = capsys.readouterr().err
    assert "there is no 'sead'" in message
    assert "seed" in message
    assert "Sweep apart" not in message


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out_is_called_so(
    call: Call,
    house: House,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    """Not a wrong shape: the network is tried on two samples before there is a run."""
    outside = importlib.import_module("outside")

    def greedy(self: object, x: torch.Tensor) -> torch.Tensor:
        raise error

    monkeypatch.setattr(outside.TinyNet, "forward", greedy)
    assert call(*SMALL) == 1
    message = capsys.readouterr().err
    assert "memory ran out" in message
    assert "Traceback" not in message
    assert not house.runs()


def test_a_working_directory_that_is_gone(house: House, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, sys, runpy; os.rmdir({str(gone)!r}); sys.argv = ['train.py']; "
    code += f"runpy.run_path({str(house.root / 'train.py')!r}, run_name='__main__')"
    done = house.script("-c", code, cwd=gone)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("nan", 2, "1 targets are not finite numbers"),
        ("constant", 2, "training targets equal 7.0"),
        ("crash", 1, "RuntimeError: the plug-in's own mistake"),
    ],
)
def test_bad_data_is_recorded_as_failed(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], fault: str, code: int, words: str
) -> None:
    """H02: a user's data error is one message; somebody's bug is shown in full; both are recorded."""
    assert call(*SMALL, f"dataset.bad='{fault}'") == code
    assert words in capsys.readouterr().err
    (folder,) = house.runs()
    assert read_run(folder)["state"] == "failed"
    assert read_run(folder)["error"]["message"] in words or words in (folder / "log.txt").read_text()
    assert not (folder / "metrics.csv").exists()


@pytest.mark.parametrize("dataset", ["afad", "rsna", "retinamnist", "rotation"])
def test_missing_data_stops_at_once(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], dataset: str
) -> None:
    """H16, D01: one message at once: where to get it, what to run next, what to use meanwhile."""
    assert call(f"dataset={dataset}") == 2
    message = capsys.readouterr().err
    assert message.count("error:") == 1
    assert f"dataset={dataset}" in message
    assert "scripts/prepare_data.py" in message
    assert "_synthetic" in message
    assert str(house.root / "data" / "raw" / dataset) in message
    assert "Traceback" not in message
    assert not house.runs()


def test_a_sweep_key_that_one_optimizer_lacks(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """H03: rejected before the first job, with the form that works."""
    assert call(*SMALL, "optimizer=ggn,sgd", "optimizer.lam=0.5", multirun=True) == 2
    message = capsys.readouterr().err
    assert "'optimizer.lam'" in message
    assert "python train.py -m optimizer=ggn optimizer.lam=" in message
    assert not house.runs()
    assert not [path for path in (house.root / "outputs").rglob("*") if path.is_file()]


def test_a_run_folder_is_never_shared(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """H06: a folder that holds something is rejected and left alone."""
    folder = house.root / "outputs" / "mine"
    folder.mkdir(parents=True)
    (folder / "note.txt").write_text("keep me")
    before = house.files()
    assert call(*SMALL, f"hydra.run.dir={folder}") == 2
    assert "is not empty" in capsys.readouterr().err
    assert house.files() == before


def test_a_warm_start_must_fit(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL) == 0
    (folder,) = house.runs()
    options = [entry for entry in SMALL if not entry.startswith("model")]
    assert call(*options, "model=resnet_gn", f"init_from={folder}") == 2
    message = capsys.readouterr().err
    assert "weights do not fit" in message
    assert "Choose the same model, depth, width and channels" in message
    assert len(house.runs()) == 1


def test_a_warm_start_from_a_run_that_is_running(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last weights would be those of whatever epoch it is in."""
    assert call(*SMALL) == 0
    (folder,) = house.runs()
    with RunFolder(folder).lock():
        assert call(*SMALL, f"init_from={folder}") == 2
    assert "is still running" in capsys.readouterr().err
    assert call(*SMALL, f"init_from={folder}") == 0


def test_several_processes_are_rejected(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """G22: one line, before any work, for every optimizer."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert call(*SMALL, "optimizer=sgd") == 2
    assert "WORLD_SIZE=2" in capsys.readouterr().err


def test_a_full_disk_is_one_message(
    call: Call, house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """T06: the disk fills up while a checkpoint is written: exit 2, the epochs before it are whole."""
    save, calls = torch.save, []

    def full_at_the_second(content: object, path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(content, path)

    monkeypatch.setattr(torch, "save", full_at_the_second)
    assert call(*SMALL) == 2
    message = capsys.readouterr().err
    assert "No space left on device" in message
    assert "Traceback" not in message
    (folder,) = house.runs()
    assert read_run(folder)["state"] == "failed"
    monkeypatch.undo()
    assert torch.load(folder / "checkpoints" / "last.pt")["epoch"] == 1


class SmallDisk:
    """Lets files of a folder grow until it is full; from then on only what was deleted can be written again."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.capacity = folder, float("inf")
        self.write, self.open = Path.write_bytes, Path.open
        disk = self

        def write_bytes(path: Path, data: bytes) -> int:
            disk.check(path, len(data))
            return disk.write(path, data)

        def open_(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
            if "a" in mode:
                disk.check(path, 1)
            return disk.open(path, mode, *more, **options)

        monkeypatch.setattr(Path, "write_bytes", write_bytes)
        monkeypatch.setattr(Path, "open", open_)

    @property
    def used(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def check(self, path: Path, num_bytes: int) -> None:
        if path.is_relative_to(self.folder) and self.used + num_bytes > self.capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write does: without a name


@pytest.mark.parametrize("first", ["metrics.csv", "log.txt"])
def test_a_disk_that_stays_full_is_recorded_with_what_is_left(
    call: Call, house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first: str
) -> None:
    """T06: run.json reports the failure, and the message names the file that could not be written."""
    disk = SmallDisk(house.root / "outputs", monkeypatch)
    append, epoch = RunFolder.append_metrics, Reporter.epoch

    def fill(*_: Any) -> None:
        disk.capacity = disk.used

    monkeypatch.setattr(
        RunFolder, "append_metrics", lambda *a: (append(*a), fill() if first == "log.txt" else None)
    )
    monkeypatch.setattr(Reporter, "epoch", lambda *a: (epoch(*a), fill() if first == "metrics.csv" else None))
    assert call(*SMALL) == 2
    message = capsys.readouterr().err
    (folder,) = house.runs()
    assert f"error: cannot write {folder / 'metrics.csv'}: No space left on device" in message
    assert "Traceback" not in message
    record = read_run(folder)
    assert (record["state"], "No space left" in record["error"]["message"]) == ("failed", True)
    assert not (folder / ".reserve").exists()
    disk.capacity = float("inf")
    assert call(f"resume={folder}") == 0
    assert read_run(folder)["state"] == "done"


def test_a_full_disk_under_a_sweep_names_the_file(
    call: Call, house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = SmallDisk(house.root / "outputs", monkeypatch)
    disk.capacity = 0
    monkeypatch.setattr(Path, "write_text", lambda path, text: path.write_bytes(text.encode()))
    assert call(*SMALL, "seed=0,1", "name=full", multirun=True) == 2
    message = capsys.readouterr().err
    assert f"cannot write {house.root / 'outputs/sweeps/full/sweep.json'}: No space left on device" in message


def test_a_run_whose_messages_go_to_a_full_disk_works(house: House) -> None:
    """Messages are not worth more than the run; its records are elsewhere."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs Linux's /dev/full")
    with full.open("w") as stream:
        process = subprocess.run(
            [sys.executable, str(house.root / "train.py"), *BLOBS, *SMALL, "trainer.epochs=1"],
            cwd=house.root,
            env=house.environment(),
            stderr=stream,
            check=False,
        )
    assert process.returncode == 0
    assert read_run(house.runs()[0])["state"] == "done"
