"""The theory's files as anybody may leave them: damaged, mixed, doubled, made of numbers that no study gives."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gramgn.app._theory import SMOKE, run_studies
from theory_rows import SETTING

from gramgn.errors import InputError
from gramgn.figures import (
    Epoch,
    Theory,
    TheoryRun,
    make_figures,
    read_table,
    read_theory,
    theory_claims,
    theory_title,
    write_theory,
)

RESIDUALS = [0.9, 0.3, 0.03, 0.0003]


def run_of(residuals: list[float] | None = None, *, drift: float = 1.0, **more: Any) -> TheoryRun:
    values = residuals or RESIDUALS
    setting = replace(SETTING, epochs=len(values) - 1, **more)
    rho = None if setting.order == "shuffle" else 0.5
    epochs = (
        Epoch(t, value, None if rho is None else rho**t, 1.0, drift, drift, drift)
        for t, value in enumerate(values)
    )
    return TheoryRun(setting, tuple(epochs))


def written(folder: Path, *runs: TheoryRun, name: str = "theory_runs.csv") -> Path:
    (folder / "theory").mkdir(parents=True, exist_ok=True)
    write_theory(Theory(runs), folder / "theory" / name)
    return folder / "theory" / name


def drawn(folder: Path) -> tuple[list[str], list[str]]:
    """Return the stems of what is drawn, with any warning an error, and the lines about what is left out."""
    lines: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, shown = read_table(folder, report=lines.append)
        files = make_figures(shown, folder / "figures", report=lines.append)
        theory_claims(shown.theory)
    return [path.stem for path in files[::2]], lines


CYCLIC: dict[str, Any] = {"study": "cyclic", "b": 20, "rho": 0.8}
METHODS: dict[str, Any] = {"study": "methods"}


@pytest.mark.parametrize(
    "run",
    [
        run_of([0.9, 0.0, 0.0, 0.0]),
        run_of([0.9, 0.3, 0.0, 0.0], drift=0.0, kernel_gap=0.0),
        run_of([1.0, 1.0, 1.0]),
        run_of([1.0, 1e30, 1e60, 1e90]),
        run_of(RESIDUALS, **CYCLIC),
        run_of([1.0, 0.5, 0.25], **(CYCLIC | {"rho": 1.0})),
        run_of([1.0, 0.5, 0.25], **(CYCLIC | {"rho": 1.5})),
        run_of([1.0, 0.5, 0.25], **(CYCLIC | {"rho": 1e-90})),
        run_of([1.0, 0.5, 0.25], **(CYCLIC | {"order": "shuffle", "rho": None})),
        run_of([1.0, 0.5, 0.25], **METHODS, rho=1e6),
        run_of([1.0, 0.5, 0.25], **METHODS, lam=2.0, rho=0.5),
        run_of([1.0, 0.5, 0.25], **METHODS, method="gd", lam=None, alpha=None, lr=0.1),
        run_of(dataset=r"$\frac$ cost $"),
        run_of(activation=r"$\x$"),
        run_of(device="日本語"),
    ],
    ids=lambda run: f"{run.setting.study}",
)
def test_one_run_of_any_numbers_is_drawn(tmp_path: Path, run: TheoryRun) -> None:
    written(tmp_path, run)
    stems, lines = drawn(tmp_path)
    assert stems
    assert not lines


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("residual", "nan", "not a finite number"),
        ("residual", "1e400", "not a finite number"),
        ("residual", "-1", "below zero"),
        ("rho", "1e9", "beyond 1e\\+06"),
        ("M", "0", "not at least 1"),
        ("M", "1" + "0" * 400, "larger than anything"),
        ("M", "１２", "not a whole number"),
        ("M", "1_0", "not a whole number"),
        ("b", "101", "a batch of 101 out of 100"),
        ("lam", "", "lam of method ggn is empty"),
        ("study", "quadradic", "not one of quadratic, cyclic, methods"),
        ("kind", "fake", "not one of synthetic, real"),
        ("device", "\x07", "cannot be printed"),
        ("git", "x" * 3000, "more than 2000 characters"),
        ("git", "x" * 200_000, "field limit"),
    ],
)
def test_cells(tmp_path: Path, column: str, cell: str, message: str) -> None:
    """Named by line and column where the file is given; a line, and all else drawn, where it is found."""
    path = written(tmp_path, run_of())
    lines = [line.replace('"sphere, wave targets"', "sphere") for line in path.read_text().splitlines()]
    place = lines[0].split(",").index(column)
    body = [line.split(",") for line in lines[1:]]
    for cells in body:
        cells[place] = cell
    path.write_text("\n".join([lines[0], *(",".join(cells) for cells in body)]) + "\n")
    with pytest.raises(InputError, match=message) as caught:
        read_table(path)
    assert f"{path.name}, line 2" in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))
    written(tmp_path, run_of(**METHODS), name="theory_methods.csv")
    stems, told = drawn(tmp_path)
    assert stems == ["theory-T4-methods"]
    assert len(told) == 1
    assert path.name in told[0]


@pytest.mark.parametrize("content", [b"", b"\n", b"study\n", b"\xff\xfe", b'study,"', b"\x00"])
def test_a_file_with_a_studys_name_is_never_passed_over(tmp_path: Path, content: bytes) -> None:
    written(tmp_path, run_of(**METHODS), name="theory_methods.csv")
    (tmp_path / "theory" / "theory_quadratic.csv").write_bytes(content)
    (tmp_path / "theory" / "theory_cyclic.csv").mkdir()
    stems, told = drawn(tmp_path)
    assert stems == ["theory-T4-methods"]
    assert [name in line for name, line in zip(("cyclic", "quadratic"), sorted(told), strict=True)]
    assert len(told) == 2


def test_saved_by_a_spreadsheet(tmp_path: Path) -> None:
    path = written(tmp_path, run_of())
    expected = read_theory([path])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    for source in (path, tmp_path):
        assert read_table(source)[1].theory == expected


def test_mixed_data_is_not_one_figure(tmp_path: Path) -> None:
    """The most runs are shown; a line names the others; one case made twice counts once, and the last."""
    runs = [run_of(seed=seed) for seed in range(3)]
    again = run_of([0.8, 0.2, 0.02, 0.0002], git="ffffffffffff")
    others = [run_of(n=50, b=50), run_of(activation="gelu"), run_of([*RESIDUALS, 1e-8], seed=4)]
    written(tmp_path, *runs, *others)
    written(tmp_path, again, name="theory_s.csv")
    stems, told = drawn(tmp_path)
    assert stems == ["theory-T1-quadratic", "theory-T2-width"]
    assert any("n = 50" in line for line in told)
    assert any("gelu" in line for line in told)
    assert any("1 runs of 4 epochs in 5 rows" in line for line in told)
    assert any("made twice" in line for line in told)


def test_rows_stand_equally_far_apart(tmp_path: Path) -> None:
    path = written(tmp_path, run_of([*RESIDUALS, 1e-8]))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], *lines[5:]]))
    with pytest.raises(
        InputError, match="line 5: epoch 4 is doubled or out of order, or one before it is missing"
    ):
        read_theory([path])


def test_rule_names_the_largest_width() -> None:
    runs = tuple(run_of([1.0, 0.5, 0.25], **(CYCLIC | {"M": M})) for M in (128, 2048))
    (claim,) = (claim for claim in theory_claims(Theory(runs)) if claim.key == "contraction")
    assert "at the largest width, 2,048; c is" in claim.rule


def test_title_says_what_the_data_was(tmp_path: Path) -> None:
    assert theory_title(Theory((run_of(),))) == "The theory: SYNTHETIC sphere, wave targets"
    assert theory_title(Theory((run_of(kind="real", dataset="digits"),))) == "The theory: digits (real)"


@pytest.mark.parametrize("study", ["quadratic", "cost"])
def test_other_settings_are_not_thrown_away(tmp_path: Path, study: str) -> None:
    """A smoke test into a folder of full studies, or the other way round, stops; --force replaces."""
    results = Path(__file__).resolve().parents[2] / "outputs" / "results" / f"theory_{study}.csv"
    file = tmp_path / results.name
    file.write_bytes(results.read_bytes())
    with pytest.raises(InputError, match="--force"):
        run_studies([study], tmp_path, scale=SMOKE)
    assert file.read_bytes() == results.read_bytes()
