"""make theory: its files, how it goes on after a stop, what it refuses; figures, claims and report from its files."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from theory_rows import SETTING

from gramgn.errors import InputError
from gramgn.figures import (
    Cost,
    Epoch,
    Setting,
    Theory,
    TheoryRun,
    make_figures,
    read_runs,
    read_theory,
    theory_claims,
    write_theory,
)
from gramgn.report import make_report

STUDIES = ("quadratic", "cyclic", "methods", "cost")
REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, str(REPOSITORY / "scripts" / "theory.py"), "--smoke"]


def theory(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of all studies at the smoke scale, and what was printed."""
    out = tmp_path_factory.mktemp("made") / "theory"
    done = theory("--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.csv")}


def test_files_and_numbers(made: tuple[Path, str]) -> None:
    out, printed = made
    assert sorted(contents(out)) == sorted(f"theory_{study}.csv" for study in STUDIES)
    found = read_theory(sorted(out.glob("*.csv")))
    assert {run.setting.study for run in found.runs} == set(STUDIES) - {"cost"}
    assert {run.setting.order for run in found.study("cyclic")} == {"cyclic", "shuffle"}
    for run in found.runs:
        assert run.setting.kind == "synthetic"
        assert run.epochs[0].distance == run.epochs[0].drift_G == 0
        assert run.setting.lambda_0 > 0
        assert (run.setting.rho is None) == (run.setting.order == "shuffle")
    for cost in found.costs:
        parts = (cost.forward_s, cost.backward_s, cost.blocks_s, cost.gram_s, cost.solve_s, cost.update_s)
        assert 0 < sum(parts) <= cost.step_s
        assert cost.gram_ops == cost.b**2 * cost.m
    assert "SYNTHETIC" in printed
    assert "Theorem 1" in printed


def test_again_keeps_everything(made: tuple[Path, str]) -> None:
    out, printed = made
    before = contents(out)
    done = theory("--out", out)
    assert (done.returncode, done.stdout) == (0, printed)
    assert contents(out) == before
    for kept in ("quadratic: 4 kept", "cyclic: 10 kept", "methods: 12 kept", "cost: 8 kept"):
        assert kept in done.stderr


def test_goes_on_where_it_was(made: tuple[Path, str], tmp_path: Path) -> None:
    """A file that holds the first runs only is completed, to the bit."""
    out, _ = made
    source = out / "theory_quadratic.csv"
    whole = read_theory([source])
    write_theory(Theory(whole.runs[:1]), tmp_path / source.name)
    done = theory("quadratic", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "quadratic: 1 kept" in done.stderr
    assert (tmp_path / source.name).read_bytes() == source.read_bytes()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_and_repeated(made: tuple[Path, str], tmp_path: Path, how: signal.Signals) -> None:
    out, _ = made
    process = subprocess.Popen(
        [*SCRIPT, "cyclic", "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    file = tmp_path / "theory_cyclic.csv"
    end = time.monotonic() + 120
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-9 if how == signal.SIGKILL else 130)
    assert b"Traceback" not in errors
    begun = len(read_theory([file]).runs)
    assert 1 <= begun <= 10
    done = theory("cyclic", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert file.read_bytes() == (out / file.name).read_bytes()


def test_refusals(made: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = made
    done = theory("quadradic", "--out", tmp_path)
    assert done.returncode == 2
    assert "there is no study quadradic" in done.stderr
    (tmp_path / "file").write_text("")
    done = theory("quadratic", "--out", tmp_path / "file")
    assert (done.returncode, "cannot make the folder" in done.stderr) == (2, True)
    file = tmp_path / "theory_quadratic.csv"
    cut = (out / file.name).read_text()[:-10]
    file.write_text(cut)
    done = theory("quadratic", "--out", tmp_path)
    assert (done.returncode, "cut in mid-line" in done.stderr) == (2, True)
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    assert file.read_text() == cut


def test_damaged_files(made: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = made
    lines = (out / "theory_quadratic.csv").read_text().splitlines(keepends=True)
    names, cells = lines[0].split(","), lines[2].split(",")
    # From the end: names of data and processor hold commas, in quotes.
    cells[names.index("residual") - len(names)] = "much"
    broken = ",".join(cells)
    for message, content in {
        "line 3, column residual: could not convert": [*lines[:2], broken, *lines[3:]],
        "line 4: 2 cells, expected": [*lines[:3], "1,2\n"],
        "its columns are others": ["study,method,colour\n"],
        "ends at epoch 5 of 6": lines[:7],
        "doubled or out of order": [*lines[:3], lines[2], *lines[3:]],
        "column method: 'newton' is not one of ggn, gd": [lines[0], lines[1].replace("ggn", "newton")],
    }.items():
        file = tmp_path / "damaged.csv"
        file.write_text("".join(content))
        with pytest.raises(InputError, match=re.escape(message)):
            read_runs(file)


def test_two_at_once(made: tuple[Path, str]) -> None:
    import fcntl

    out, _ = made
    with (out / ".theory.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate()
        lock.write(str(__import__("os").getpid()))
        lock.flush()
        done = theory("quadratic", "--out", out)
    assert done.returncode == 2
    assert "is running already" in done.stderr


def test_figures(made: tuple[Path, str], tmp_path: Path) -> None:
    """From the folder and from results files, the same bytes."""
    out, _ = made
    shutil.copytree(out, tmp_path / "outputs" / "theory")
    shown = read_runs(tmp_path / "outputs")
    files = make_figures(shown, tmp_path / "a", report=lambda line: None)
    assert [path.stem for path in files[::2]] == [
        "theory-T1-quadratic",
        "theory-T2-width",
        "theory-T3-cyclic",
        "theory-T4-methods",
        "theory-T5-cost",
    ]
    again = read_runs(*sorted(out.glob("*.csv")))
    others = make_figures(again, tmp_path / "b", report=lambda line: None)
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in others]


def test_drawn_without_torch(made: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = made
    code = (
        "import sys; from pathlib import Path\n"
        "from gramgn.figures import make_figures, read_runs\n"
        f"make_figures(read_runs(*sorted(Path({str(out)!r}).glob('*.csv'))), Path({str(tmp_path)!r}))\n"
        "assert not {'torch', 'hydra', 'wandb', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_report(made: tuple[Path, str], tmp_path: Path) -> None:
    """With nothing but the theory there is a page: its statements, and its figures with words beside them."""
    out, _ = made
    shutil.copytree(out, tmp_path / "theory")
    page = make_report(tmp_path, out=tmp_path / "index.html", report=lambda line: None)
    html = page.read_text()
    for number in range(1, 6):
        assert f"T{number}: " in html
    assert len(re.findall(r'<img src="data:image/png[^>]* alt="[^"]{40,}"', html)) == 5
    assert "Theorem 2: with fixed mini-batches" in html
    assert "2 rounds" in html


def run_of(setting: Setting, residuals: list[float], *, drift: float = 1.0) -> TheoryRun:
    """Return a run with given residuals."""
    epochs = [
        Epoch(
            t, value, None if setting.rho is None else residuals[0] * setting.rho**t, 1.0, drift, drift, drift
        )
        for t, value in enumerate(residuals)
    ]
    return TheoryRun(replace(setting, epochs=len(residuals) - 1), tuple(epochs))


def quadratic_runs(power: float, slope: float) -> Theory:
    """Return runs of the given order whose constant and drifts fall as M^slope."""
    runs = []
    for seed in range(3):
        for M in (128, 512, 2048):
            residuals = [0.9]
            for _ in range(4):
                residuals.append(0.8 * (M / 128) ** slope * residuals[-1] ** power)
            setting = replace(SETTING, M=M, seed=seed, kernel_gap=(M / 128) ** slope)
            runs.append(run_of(setting, residuals, drift=(M / 128) ** slope))
    return Theory(tuple(runs))


@pytest.mark.parametrize(
    ("power", "slope", "expected"),
    [
        (
            2.0,
            -0.5,
            {"order": "yes", "constant": "yes", "drift_G": "yes", "drift_J": "yes", "kernel_gap": "yes"},
        ),
        (
            2.0,
            -1.0,
            {"order": "yes", "constant": "yes", "drift_G": "yes", "drift_J": "no", "kernel_gap": "no"},
        ),
        (1.5, -0.3, {"order": "no", "drift_G": "no", "drift_J": "no", "kernel_gap": "no"}),
    ],
)
def test_verdicts_about_the_full_batch(power: float, slope: float, expected: dict[str, str]) -> None:
    claims = {claim.key: claim for claim in theory_claims(quadratic_runs(power, slope))}
    assert {key: claims[key].verdict for key in expected} == expected
    assert claims["order"].measurements[0].median == pytest.approx(power)
    assert claims["kernel_gap"].measurements[0].median == pytest.approx(slope)
    assert claims["contraction"].verdict == claims["cost_A"].verdict == "not measured"


@pytest.mark.parametrize(("c", "verdict"), [(0.8, "yes"), (0.805, "yes"), (0.75, "no"), (0.85, "no")])
def test_verdicts_about_mini_batches(c: float, verdict: str) -> None:
    setting = replace(SETTING, study="cyclic", b=20, rho=0.8)
    theory = Theory(
        tuple(run_of(replace(setting, seed=seed), [3 * c**t for t in range(40)]) for seed in range(3))
    )
    claim = {claim.key: claim for claim in theory_claims(theory)}["contraction"]
    assert claim.verdict == verdict
    assert claim.measurements[0].median == pytest.approx((1 - c) / 0.2 - 1, abs=1e-9)


def test_contraction_counts_epochs_not_rows() -> None:
    setting = replace(SETTING, study="cyclic", b=20, rho=0.9, epochs=30)
    epochs = tuple(Epoch(t, 0.9**t, 0.9**t, 1.0, 1.0, 1.0, 1.0) for t in range(0, 31, 3))
    run = TheoryRun(setting, epochs)
    assert run.contraction == pytest.approx(0.9)
    assert run.linear_contraction == pytest.approx(0.9)


def test_fitted_costs() -> None:
    """Exponents of made-up times come out as they were put in."""
    costs = tuple(
        Cost(
            network=name,
            pixels=32,
            b=b,
            m=m,
            round=turn,
            step_s=1.0,
            forward_s=b * 1e-4,
            backward_s=b * 1e-4,
            blocks_s=b * 1e-4,
            gram_s=1e-12 * b**2 * m,
            solve_s=1e-9 * b**3,
            update_s=1e-4,
            sgd_s=2e-4 * b,
            forward_ops=1.0,
            gram_ops=1.0,
            solve_ops=1.0,
            device="a processor",
            torch="2.0",
            git="0123456789ab",
        )
        for turn in (1, 2)
        for name, m, b in [("resnet32", 400_000, b) for b in (16, 64, 128)] + [("resnet8", 80_000, 128)]
    )
    claims = {claim.key: claim for claim in theory_claims(Theory(costs=costs))}
    medians = {each.name: each.median for each in claims["exponents"].measurements}
    assert medians["exponent of b in the time of (A), forward and per-sample backward"] == pytest.approx(1)
    assert medians["exponent of b in the time of the Gram product"] == pytest.approx(2)
    assert medians["exponent of b in the time of the solve"] == pytest.approx(3)
    assert medians["exponent of m in the time of the Gram product"] == pytest.approx(1)
    assert claims["cost_A"].measurements[0].median == pytest.approx(1.5)
    assert claims["cost_B"].verdict == "yes"


def test_two_kinds_are_two_files(tmp_path: Path, made: tuple[Path, str]) -> None:
    found = read_theory(sorted(made[0].glob("*.csv")))
    with pytest.raises(ValueError, match="two files"):
        write_theory(found, tmp_path / "both.csv")
    with pytest.raises(InputError, match="there is no results file"):
        read_theory([tmp_path / "none.csv"])
