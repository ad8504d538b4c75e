"""docs/results.md: its tables and figures are the committed files, by the rules of docs/protocol.md."""

from __future__ import annotations

import csv
import math
import re
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from evidence_cases import script, write_block

from gramgn.errors import InputError
from gramgn.figures import house_style
from gramgn.records import at_end, baselines, runs, verdicts, write_results

OURS = "GGN, recommended on ResNetGN"


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    """Yield scripts/evidence.py and scripts/results.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        for name in ("evidence", "results"):
            patch.setitem(sys.modules, name, None)
        yield script("evidence"), script("results")


def on_one_data_set(evidence: ModuleType, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let all blocks have one data set, for speed, and their files in a folder."""
    blocks = {block: (("rsna_synthetic",), *others) for block, (_, *others) in evidence.BLOCKS.items()}
    patch.setattr(evidence, "BLOCKS", blocks)
    patch.setattr(evidence, "RESULTS", folder)


@pytest.fixture(scope="module")
def written(modules: tuple[ModuleType, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of made-up results."""
    evidence, folder = modules[0], tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        on_one_data_set(evidence, folder, patch)
        for block in evidence.BLOCKS:
            write_block(evidence, block)
    return folder


@pytest.fixture
def pages(
    modules: tuple[ModuleType, ModuleType], written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """Return scripts/results.py on a copy of the made-up results."""
    evidence, results = modules
    on_one_data_set(evidence, shutil.copytree(written, tmp_path / "results"), monkeypatch)
    return results


def section(page: str, name: str) -> str:
    (found,) = re.findall(rf"<!-- begin {name}: .*?-->\n(.*?)<!-- end {name} -->", page, re.DOTALL)
    return found


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    """Yield the last epoch of each run of a file, as plain text."""
    with path.open(newline="") as file:
        yield from (row for row in csv.DictReader(file) if row["epoch"] == row["epochs"])


def test_the_committed_pages_are_those_of_the_committed_files(
    modules: tuple[ModuleType, ModuleType], repository: Path
) -> None:
    """Whoever edits a number by hand, or commits runs without `make results`, fails here."""
    _, results = modules
    texts = results.sections(results.Evidence())
    for name in results.PAGES:
        page = (repository / name).read_text(encoding="utf-8")
        assert results.filled(page, texts) == page, f"{name}: run make results"
    page = (repository / "docs" / "results.md").read_text(encoding="utf-8")
    for name in texts:
        if not name.startswith("readme"):
            assert section(page, name)
    for figure in set(re.findall(r"outputs/results/figures/([\w-]+\.png)", page)):
        assert (repository / "outputs" / "results" / "figures" / figure).is_file()


def test_prose_holds_no_number_of_a_run(modules: tuple[ModuleType, ModuleType], repository: Path) -> None:
    page = (repository / "docs" / "results.md").read_text(encoding="utf-8")
    prose = re.sub(r"<!-- begin .*?<!-- end \w+ -->", "", page, flags=re.DOTALL)
    assert re.findall(r"\d+\.\d+", re.sub("`[^`]*`", "", prose)) == []
    assert "SYNTHETIC" in prose
    assert "make paper SCALE=paper DATA=real" in prose


def test_prose_on_losses_says_what_the_files_say(modules: tuple[ModuleType, ModuleType]) -> None:
    evidence, results = modules
    third, half, whole = evidence.BUDGETS["laptop"]
    spring, recipe = evidence.OURS_AND_RECIPE
    at_the_end, best = {}, {}
    for (name, _), rows in results.Evidence().of("final").items():
        ends = at_end(rows)
        strongest, _ = baselines(ends, ours=evidence.OURS_AND_RECIPE)[0]
        curves = rows[rows["epochs"] == whole]
        curves = curves.groupby(["epoch", curves["optimizer"] + " on " + curves["model"]])
        for column, last in (("test_loss", 10), ("val_loss", 6)):
            assert set(curves[column].median().unstack().loc[:last].idxmin(axis=1)) <= {spring, recipe}
        medians = ends.groupby(["epochs", "method"])["val_loss"].median().unstack()
        assert medians.loc[third].idxmin() == strongest
        assert min(medians.loc[third, [spring, recipe]]) > medians[strongest].min()
        at_the_end[name] = [
            verdicts(ends, each, ours=evidence.OURS_AND_RECIPE)[2].answer for each in (spring, recipe)
        ]
        best[name] = strongest, *(int(medians[each].idxmin()) for each in (strongest, spring, recipe))
    assert at_the_end == {
        "Turned radiographs": ["behind", "even"],
        "RetinaMNIST": ["even", "even"],
        "SYNTHETIC bone age": ["even", "ahead"],
        "SYNTHETIC faces": ["even", "even"],
    }
    assert [name for name, (strongest, *_) in best.items() if "muon" not in strongest] == ["RetinaMNIST"]
    assert best["RetinaMNIST"] == ("sgd on resnet_gn", whole, third, third)
    assert best["SYNTHETIC faces"][1:] == (third, half, third)


def test_prose_on_the_paper_says_what_the_file_says(modules: tuple[ModuleType, ModuleType]) -> None:
    evidence, results = modules
    claims = results.sections(results.Evidence())["claims"]
    paper = runs(evidence.RESULTS / "evidence_paper.csv")
    assert paper[paper["epoch"] == 1]["step"].dropna().between(9, 17).all()
    ends = paper[(paper["damping_convention"] == "sum") & (paper["epoch"] == paper["epochs"])]
    good = ends[ends["train_loss"] < 10]
    assert len(good) < 10, "of 20"
    assert set(good["dataset"]) == {"rotation"}
    medians = (
        paper[paper["damping_convention"] == "mean"].groupby(["epoch", "dataset"])["train_loss"].median()
    )
    losses = medians.unstack()
    assert (losses < 0.9).idxmax()["afad_synthetic"] == (losses < 0.9).idxmax().max() > 10
    assert losses["rotation"][2] < 0.4
    assert losses["retinamnist"][1] > 1.1 * losses["retinamnist"][2]
    assert losses["retinamnist"][2:6].max() < 1.05 * losses["retinamnist"][2:6].min()
    assert losses["retinamnist"][10:].median() > 1.1 * losses["retinamnist"][2]
    holding = re.findall(r"^\| (.*?) \| (\w+) \|.*\*\*yes\*\*: [^|]* \|$", claims, re.MULTILINE)
    assert holding == [
        ("SYNTHETIC faces", "laptop"),
        ("SYNTHETIC bone age", "desk"),
        ("SYNTHETIC faces", "desk"),
    ]
    assert claims.count("**yes**") == len(holding), "only that the test loss ends lower"
    behind = re.findall(
        r"^\| .* \| desk \| [^|]*\|[^|]*\| \*\*no\*\*: [^|]*\| \*\*no\*\*", claims, re.MULTILINE
    )
    assert len(behind) == 2
    desk = runs(evidence.RESULTS / "evidence_desk_paper.csv")
    losses = desk.pivot(
        index="epoch", columns=["dataset", "optimizer", "model", "seed"], values="train_loss"
    ).sort_index(axis=1)
    for dataset in evidence.SYNTHETIC:
        ggn, on_bn, on_fixup = (
            losses[dataset, optimizer, f"resnet_{model}"]
            for optimizer, model in (("ggn", "fixup"), ("sgd", "bn"), ("sgd", "fixup"))
        )
        assert ggn.loc[10].max() < 0.6
        assert (on_bn.loc[30] < ggn.loc[30]).all()
        assert on_fixup.loc[30].min() > 2 / 3
    first = pd.read_csv(evidence.RESULTS / "first_epochs.csv")
    plain = first[(first["dataset"] == "rotation") & (first["variant"] == "plain")]
    growth = plain.groupby("step")["mean_eigenvalue"].median()
    assert growth[:17].max() > 20 * growth[1]


def test_prose_on_the_recipe_says_what_the_file_says(modules: tuple[ModuleType, ModuleType]) -> None:
    evidence, _ = modules
    losses = evidence.results("recipe")
    assert len(losses) == 59

    def mean(words: str, batch: int, alpha: float, seeds: Sequence[int] = (100, 101, 102)) -> float:
        """Return the mean validation loss of a setting over those of the seeds that it was run with."""
        words = f"optimizer=ggn_spring model=resnet_gn schedule={words} trainer.batch_size={batch}"
        setting = evidence.varied(words, f"optimizer.alpha={alpha:g}")
        keys = [evidence.key(evidence.job("rsna_synthetic", "laptop", setting, 6, seed)) for seed in seeds]
        return statistics.mean(losses[key] for key in keys if key in losses)

    falling, recipe = "schedule.alpha=0.1", mean("one_cycle schedule.alpha=0.03", 64, 4.8)
    assert sum(loss < recipe for loss in losses.values()) == 2, "two of its own three seeds"
    for words, *setting in (
        ("linear", 64, 1.6),
        ("linear", 64, 4.8),
        ("linear", 256, 1.2),
        ("one_cycle", 64, 1.6),
    ):
        assert recipe < mean(f"{words} {falling}", *setting) < mean(words, *setting)
    for after, *setting in ((falling, 128, 0.8), (falling, 64, 1.6), ("", 64, 1.6)):
        assert recipe < mean(f"one_cycle {after}", *setting) < mean(f"linear {after}", *setting)
    plain = {setting: mean("linear", *setting) for setting in ((64, 1.6), (256, 1.2))}
    for setting, least in plain.items():
        assert mean("linear optimizer.momentum=0.95", *setting) > least
    assert mean("linear optimizer.damping_convention=trace", 256, 0.3) > 0.98 * plain[256, 1.2]
    for words in ("linear schedule.momentum=0.98", "linear schedule.alpha=10", "cosine"):
        assert mean(words, 256, 1.2) > 0.98 * plain[256, 1.2]
    assert mean(f"one_cycle {falling}", 256, 0.8) > mean(f"one_cycle {falling}", 128, 0.8)
    before = "one_cycle schedule.alpha=0.03"
    for words in ("model.num_groups=2", "model.num_groups=16", "schedule.warmup=0.15"):
        assert mean(f"{before} {words}", 128, 2.4, (100,)) > mean(before, 128, 2.4, (100,))


def test_prose_on_seconds_says_what_the_files_say(modules: tuple[ModuleType, ModuleType]) -> None:
    evidence, results = modules
    for rows in results.Evidence().of("final").values():
        for method in evidence.OURS_AND_RECIPE:
            per_epoch, per_second, _ = verdicts(at_end(rows), method, ours=evidence.OURS_AND_RECIPE)
            assert (per_epoch.answer, per_epoch.epochs) == (per_second.answer, per_second.epochs) or not (
                per_epoch.differences or per_second.differences
            )
    lines = results.cost(results.Evidence()).splitlines()[2:]
    ratios = [
        float(line.split(" | ")[6].split()[0])
        for line in lines
        if "ResNetFixup" not in line and "laptop" in line
    ]
    assert 1.12 < min(ratios) < max(ratios) < 1.38


def test_prose_on_desk_size_says_what_the_file_says(modules: tuple[ModuleType, ModuleType]) -> None:
    ends = at_end(runs(modules[0].RESULTS / "evidence_desk.csv"))
    medians = ends.groupby(["dataset", "epochs", "optimizer"]).median(numeric_only=True)
    faces, bone_age = (medians.loc[each] for each in ("afad_synthetic", "rsna_synthetic"))
    for column in ("val_loss", "test_loss"):
        losses = faces[column].unstack()
        assert set(losses.idxmin(axis=1)) == {"ggn_recommended"}
        assert set(losses.idxmin()[["muon", "ggn_recommended"]]) <= {10}
        losses = bone_age[column].unstack()
        assert losses.min().idxmin() == "ggn_recommended"
        assert (losses["ggn_recommended"].idxmin(), losses["muon"].idxmin()) == (15, 10)
        assert 0.95 * losses.loc[10, "muon"] < losses.loc[15, "ggn_recommended"]
        assert losses.loc[30].idxmin() == "adamw"
    losses = faces["val_loss"].unstack()
    assert losses.loc[15, "ggn_recommended"] < losses.loc[10, "muon"] < 0.9 * losses.loc[15, "muon"]
    for own, budget in ((faces, 10), (bone_age, 15)):
        losses = own["train_loss"].unstack()
        assert losses.loc[budget, "ggn_recommended"] > losses.loc[10, "muon"]


def test_prose_on_sensitivity_says_what_the_file_says(modules: tuple[ModuleType, ModuleType]) -> None:
    evidence, results = modules
    table = runs(evidence.RESULTS / "evidence_sensitivity.csv")
    ends = {
        study: {line: own.set_index(["lam", "alpha"]) for line, own in lines.items()}
        for study, lines in results.study_lines(at_end(table)).items()
    }
    medians = {line: own.groupby("batch_size")["val_loss"].median() for line, own in ends["batch"].items()}
    mean, total = medians["the same α in the mean"], medians["the same α in the sum"]
    assert max(mean.loc[:128].max(), total.loc[:128].max()) < 1.1 * min(
        mean.loc[:128].min(), total.loc[:128].min()
    )
    assert (total.loc[256:] > 1.05 * total[128]).all()
    assert (mean[[256, 1024]] > 1.2 * total[[256, 1024]]).all()
    plain, recipe = (ends[study][""]["train_loss"] for study in ("grid-plain", "grid-recipe"))
    assert recipe[1.0].max() < 1.5 * recipe[1.0].min()
    assert set(plain[plain < 0.95].index) == {(2.0, 0.01), (2.0, 0.1), (4.0, 0.01), (4.0, 0.1)}
    assert plain[0.25, 0.01] > 1e6 < recipe[0.25, 0.048]
    assert recipe.idxmin()[0] == 4
    assert 0.8 < recipe.min() / recipe[1.0].min() < 0.87
    of_labels = {line: own["val_mae"].fillna(math.inf) for line, own in ends["labels"].items()}
    assert (of_labels["recipe, in months"] < 14).sum() == 2
    assert (of_labels["plain, in months"] > 30).all()
    of_layer = {line: own["train_loss"] for line, own in ends["last-layer"].items()}
    assert of_layer["recipe, zero"].median() < 1.1 * of_layer["recipe, random"].median()
    third = {
        line: own.loc[own["epoch"] == 3, "train_loss"].median()
        for line, own in results.study_lines(table)["last-layer"].items()
    }
    assert third["recipe, zero"] < 1.15 * third["recipe, random"]
    assert min(of_layer["plain, zero"].min(), of_layer["plain, random"].min()) > 0.5
    seeds = {line: own["train_loss"] for line, own in ends["seeds"].items()}
    assert seeds["recipe"].max() < 1.2 * seeds["recipe"].min()
    assert seeds["plain"].max() > 10 * seeds["plain"].min()


def test_tables_hold_the_numbers_of_the_file(pages: ModuleType) -> None:
    """Medians and ranges are computed here once more, from the text of the CSV."""
    texts = pages.sections(pages.Evidence())
    ends = list(rows_of(pages.evidence.RESULTS / "evidence_final.csv"))
    own = [row for row in ends if row["optimizer"] == "ggn_recommended" and row["epochs"] == "6"]
    assert len(own) == 5
    values = sorted(float(row["test_mae"]) for row in own)
    expected = f"{values[2]:.3g} ({values[0]:.3g} to {values[-1]:.3g})"
    (line,) = re.findall(
        rf"^\| {OURS} \| 6 \| 5 .*$", texts["details"].split("bone age, desk")[0], re.MULTILINE
    )
    assert expected in line
    # The clock: 1.4 s for a first epoch, 1 s for each other, 1.5 times as long for GGN, 10 % longer with each seed.
    assert line.endswith(f"| {1.65 * (1.4 + 5):.3g} ({1.5 * (1.4 + 5):.3g} to {1.8 * (1.4 + 5):.3g}) |")
    costs = [line.strip("| ").split(" | ")[4:] for line in texts["cost"].splitlines() if "SYNTHETIC" in line]
    assert costs == [["1.65 (1.5 to 1.8)", "1.1 (1 to 1.2)", "1.5", "0.66 (0.6 to 0.72)"]] * len(costs)
    assert len(costs) == 5, "two of ours at laptop size, one at desk size, the paper's GGN at both"
    assert "SYNTHETIC bone age" in texts["summary"]
    best = min(
        float(row["val_loss"])
        for row in rows_of(pages.evidence.RESULTS / "evidence_tune.csv")
        if (row["optimizer"], row["model"]) == ("muon", "resnet_bn")
    )
    (line,) = re.findall(r"^\| muon on resnet_bn .*$", texts["trials"], re.MULTILINE)
    assert f"{best:.3g}" in line


def test_a_run_that_is_not_in_the_plan_counts_nowhere(pages: ModuleType) -> None:
    """Such as one of a recipe that was changed afterwards."""
    before = pages.sections(pages.Evidence())["summary"]
    path = pages.evidence.RESULTS / "evidence_final.csv"
    table = runs(path)
    stray = table[table["run"] == table["run"].iloc[-1]]
    stray = stray.assign(run=stray["run"].str[:-8] + "01234567", val_loss=stray["val_loss"] / 9)
    write_results(pd.concat([table, stray]), path)
    assert pages.sections(pages.Evidence())["summary"] == before


def test_verdicts_reach_the_page(pages: ModuleType) -> None:
    for factor, words in ((0.5, "ahead"), (2, "behind")):
        write_block(pages.evidence, "final", ggn_recommended=factor)
        summary = pages.sections(pages.Evidence())["summary"]
        (line,) = re.findall(rf"^.*\| laptop \|.*{OURS}.*$", summary, re.MULTILINE)
        assert f"**{words}** (6 epochs" in line
        assert f"**{words}** (18 epochs" in line


def test_a_diverged_seed_is_not_averaged_away(pages: ModuleType) -> None:
    """It stays in the tables, decides against a method, and its budget has no point in the figure."""
    path = pages.evidence.RESULTS / "evidence_final.csv"
    write_block(pages.evidence, "final", ggn_recommended=0.5)
    table = runs(path)
    own = (table["optimizer"] == "ggn_recommended") & (table["epochs"] == 6) & (table["seed"] == 0)
    table.loc[own, "state"] = "diverged"
    write_results(table[~(own & (table["epoch"] > 4))], path)
    found = pages.Evidence()
    texts = pages.sections(found)
    (line,) = re.findall(
        rf"^\| {OURS} \| 6 \| 5 .*$", texts["details"].split("bone age, desk")[0], re.MULTILINE
    )
    assert line.count(" to diverged)") == 4
    (line,) = re.findall(rf"^.*\| laptop \|.*{OURS}.*$", texts["summary"], re.MULTILINE)
    assert "**even** (6 epochs" in line
    with house_style():
        figure = next(each for each in pages.drawings(found) if each.stem == "evidence-budgets-laptop").draw()
    assert (9.0, 18.0) in {tuple(line.get_xdata()) for line in figure.axes[0].lines}


def test_what_is_missing_is_named_and_left_out(pages: ModuleType) -> None:
    for block in ("clock", "desk", "paper"):
        (pages.evidence.RESULTS / f"evidence_{block}.csv").unlink()
    texts = pages.sections(pages.Evidence())
    assert "its seconds are not measured" in texts["summary"]
    assert "desk size" not in texts["details"]
    path = pages.evidence.RESULTS / "evidence_refine.csv"
    table = runs(path)
    last = table["run"].iloc[-1]
    lines = [line for line in path.read_text().splitlines(keepends=True) if last not in line]
    path.write_text("".join(lines))
    texts = pages.sections(pages.Evidence())
    assert "; `paper`; `desk`.\n" in texts["status"]
    assert "`refine` on `rsna_synthetic` (23 of 24 runs)" in texts["status"]
    assert "No seconds are measured yet" in texts["status"]
    assert "`final` on `rsna_synthetic` (0 of 65 runs)" in texts["status"]
    assert "not there yet" in texts["trials"]
    assert "not there yet" in texts["summary"]
    for block in pages.evidence.BLOCKS:
        (pages.evidence.RESULTS / f"evidence_{block}.csv").unlink(missing_ok=True)
    texts = pages.sections(pages.Evidence())
    assert not {"readme-picture", "readme-results"} & set(texts)
    assert {text for name, text in texts.items() if name != "status"} == {
        "The runs of this section are not there yet.\n"
    }


def test_only_generated_sections_change(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a damaged file leaves the pages as they are."""
    for name in pages.PAGES:
        page = "before\n<!-- begin claims: x -->\nold\n<!-- end claims -->\nafter \\1\n"
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(page)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "drawings", lambda found: [])
    assert pages.main([]) == 0
    page = (tmp_path / pages.PAGES[0]).read_text()
    assert page.startswith("before\n<!-- begin claims: x -->\n\n| data set |")
    assert page.endswith("<!-- end claims -->\nafter \\1\n")
    path = pages.evidence.RESULTS / "evidence_final.csv"
    path.write_text(path.read_text()[:-20])
    (tmp_path / pages.PAGES[0]).write_text("kept")
    assert pages.main([]) == 2
    assert (tmp_path / pages.PAGES[0]).read_text() == "kept"
    with pytest.raises(InputError, match="cut in mid-line"):
        pages.Evidence()


def test_figures_show_the_values_of_the_file(pages: ModuleType) -> None:
    """F: the drawn medians, ranges, seconds and the target are those of the CSV."""
    drawn = {drawing.stem: drawing for drawing in pages.drawings(pages.Evidence())}
    assert {f"evidence-{study}" for study in pages.STUDIES} < set(drawn)
    ends = list(rows_of(pages.evidence.RESULTS / "evidence_final.csv"))

    def values(optimizer: str, epochs: int, column: str = "val_loss") -> list[float]:
        return sorted(
            float(row[column])
            for row in ends
            if (row["optimizer"], row["epochs"]) == (optimizer, str(epochs))
            and row["model"] != "resnet_fixup"
            and (optimizer != "adamw" or row["model"] == "resnet_bn")
        )

    with house_style():
        figure = drawn["evidence-budgets-laptop"].draw()
        lengths = drawn["evidence-lengths-laptop"].draw()
        batch = drawn["evidence-batch"].draw()
    against_epochs, against_seconds = figure.axes
    medians = [values("ggn_recommended", epochs)[2] for epochs in (6, 9, 18)]
    shown = {tuple(line.get_xdata()): list(line.get_ydata()) for line in against_epochs.lines}
    lines = [list(line.get_ydata()) for line in against_epochs.lines]
    assert medians in lines
    assert [values("adamw", 18)[2]] * 2 in lines  # the target
    assert (6.0, 9.0, 18.0) in shown
    bars = [tuple(path.vertices[:, 1]) for each in against_epochs.collections for path in each.get_paths()]
    assert (values("ggn_recommended", 6)[0], values("ggn_recommended", 6)[-1]) in bars
    seconds = [pytest.approx([1.65 * (1.4 + epochs - 1) for epochs in (6, 9, 18)])]
    assert any(list(line.get_xdata()) in seconds for line in against_seconds.lines)
    (test_losses,) = lengths.axes[1:]
    last = [line.get_ydata()[-1] for line in test_losses.lines if len(line.get_ydata()) == 18]
    assert values("ggn_recommended", 18, "test_loss")[2] in last
    (axes,) = batch.axes
    assert [line.get_xdata().tolist() for line in axes.lines[:2]] == [
        [32, 64, 128, 256, 512, 1024],
        [32, 64, 128, 256, 1024],
    ]
    with (pages.evidence.RESULTS / "evidence_sensitivity.csv").open(newline="") as file:
        own = [row for row in csv.DictReader(file) if row["batch_size"] == "1024" and row["epoch"] == "6"]
    mean = [float(row["val_loss"]) for row in own if row["damping_convention"] == "mean"]
    assert axes.lines[0].get_ydata()[-1] == statistics.median(mean)
