"""The documentation is true: its commands and code run as written, and nothing a user meets is missing from it.

Commands run in a copy of the repository's layout, at the debug scale where there is a scale to choose. A command that
cannot run here is listed in EXCEPTIONS with the reason and a cheaper check; a new command that is neither run nor
listed fails.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from data_cases import picture, write_afad, write_kaggle, write_png
from house import REPOSITORY, House, read_run
from torch import nn

from benchmarks.ranks import print_formula
from gramgn import GramGaussNewton
from gramgn.records import METRIC_COLUMNS

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((REPOSITORY / "docs").glob("*.md"))),
    "outputs/results/README.md",
)
TEXTS = {page: (REPOSITORY / page).read_text(encoding="utf-8") for page in PAGES}
DOCS = "\n".join(TEXTS.values())
RESULTS = REPOSITORY / "outputs" / "results"
LANGUAGES = {"bash", "python", "yaml", "text", "bibtex"}
COMMAND = re.compile(r"(make|python|conda|source|pip|wandb) \S")
FILE_NAME = re.compile(r"# (mine/\S+)\n")


def blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, content) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Return every command line once: those of the bash blocks, and those in the running text."""
    lines = [line for block in of("bash", text) for line in block.splitlines()]
    lines = [re.sub(r"\s+# .*$", "", line) for line in lines]
    spans = re.findall(r"`([^`\n]+)`", prose(text))
    inline = [span for span in spans if COMMAND.match(span) and not re.search(r"\.\.\.|=$|=<", span)]
    return list(dict.fromkeys([line for line in lines if line.strip()] + inline))


def of(language: str, text: str = DOCS) -> list[str]:
    return [block for name, block in blocks(text) if name == language]


class Reader:
    """Somebody who follows the documentation in a house of their own.

    Attributes:
        house: Small data of every kind, a copy of the published results, and one finished run.
        finished: The finished run's folder.
        checked: The cheaper checks made so far.
    """

    def __init__(self, root: Path) -> None:
        self.house = House(root)
        self.checked: set[Callable[[Reader, str], None]] = set()
        shutil.copytree(RESULTS, root / "outputs" / "results", ignore=shutil.ignore_patterns("figures"))
        self.elsewhere = root / "elsewhere"
        write_afad(root / "data" / "raw" / "afad" / "AFAD-Lite", 60)
        write_kaggle(root / "data" / "raw" / "rsna", 80)
        write_kaggle(self.elsewhere / "rsna")
        write_png(self.elsewhere / "images", range(40))
        splits = {"train": 40, "val": 8, "test": 8}
        arrays: dict[str, Any] = {
            f"{split}_images": np.stack([np.asarray(picture(i, (28, 28))) for i in range(num)])
            for split, num in splits.items()
        }
        arrays |= {f"{split}_labels": np.arange(num) % 5 for split, num in splits.items()}
        np.savez(self.elsewhere / "retinamnist.npz", **arrays)
        for block in (*of("python"), *of("yaml")):
            if match := FILE_NAME.match(block):
                path = root / match.group(1)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block)
        done = self.run("python train.py trainer=debug")
        assert done.returncode == 0, done.stderr
        (self.finished,) = self.house.runs()

    def written_for_here(self, command: str) -> str:
        """Replace the placeholders of the documentation by what is here."""
        command = command.replace("/data/", f"{self.elsewhere}/")
        command = command.replace("outputs/sweeps/mine", str(self.finished))
        # Other commands read the published file.
        command = command.replace("--out outputs/results/paper", "--out outputs/results/exported")
        return command.replace("outputs/runs/<run folder>", str(self.finished))

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command line in bash, with ``python`` being this one."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.house.root,
            env=self.house.environment(PATH=path, PYTHONPATH=str(REPOSITORY / "src")),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def reduced(self, command: str) -> str:
        """Return the command at the smallest scale it knows; all its other words stay as they are."""
        words = shlex.split(self.written_for_here(command))
        if "train.py" in words and not {"--help", "--cfg"} & set(words):
            fewer = {"trainer.epochs=40": "trainer.epochs=3"}
            words = [fewer.get(word, word) for word in words if not word.startswith("trainer=")]
            if not any(word.startswith("resume=") for word in words):
                words.append("trainer=debug")
        if "scripts/contact_sheet.py" in words or ("--check" in words and "dataset=rsna_synthetic" in words):
            words.append("dataset.num_images=160")
        return " ".join(word if re.match(r"^[A-Z]+=|.*\*", word) else shlex.quote(word) for word in words)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tmp_path_factory.mktemp("docs") / "house")


# --- Commands that cannot run here as written, each with a cheaper check. ---


def plan_of_make(reader: Reader, command: str) -> None:
    """Minutes: make knows the target and has a plan for it."""
    done = subprocess.run(
        ["make", "-n", *shlex.split(command)[1:]], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def chain_listed(reader: Reader, command: str) -> None:
    """Most of an hour: make knows the target, and the chain behind it its sweeps."""
    plan_of_make(reader, command)
    done = reader.run("python scripts/paper.py --list")
    assert done.returncode == 0, done.stderr
    assert "afad_ggn_fixup" in done.stdout


def small_demo(reader: Reader, command: str) -> None:
    """Minutes at its own scale: seconds at the debug scale; a table and the figures must be there."""
    plan_of_make(reader, command)
    done = reader.run("python scripts/demo.py --scale debug --epochs 1")
    assert done.returncode == 0, done.stdout + done.stderr
    for label in ("GGN on ResNetFixup", "SGD on ResNetBN", "SGD on ResNetFixup"):
        assert label in done.stdout
    figures = reader.house.root.glob("outputs/demo/*/figures/loss-*")
    assert {path.suffix for path in figures} == {".pdf", ".png"}


def helped(reader: Reader, command: str) -> None:
    """Minutes, and tested in test_theory_studies.py: the command line knows the words."""
    (script,) = re.findall(r"scripts/\w+\.py", command)
    done = reader.run(f"python {script} --help")
    assert done.returncode == 0, done.stderr
    for option in re.findall(r"--\w+", command):
        assert option in done.stdout


def default_environment(reader: Reader, command: str) -> None:
    """The tests' own environment may be elsewhere: the path is the one that make builds."""
    assert command == "source .venv/bin/activate"
    assert re.search(r"^VENV \?= \.venv$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)


def conda_file(reader: Reader, command: str) -> None:
    """No conda here: the file is there and names the lock."""
    environment = yaml.safe_load((REPOSITORY / shlex.split(command)[-1]).read_text())
    assert {"pip": ["-r requirements.lock"]} in environment["dependencies"]


def installation(reader: Reader, command: str) -> None:
    """Needs a package index: the project asks for torch alone and has the extra, if one is named."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) == 1
    for extra in re.findall(r"\[(\w+)\]", command):
        assert project["optional-dependencies"][extra]


def short_benchmark(reader: Reader, command: str) -> None:
    """Minutes: the same over two tiny batches."""
    done = reader.run(f"{command} --smoke --batches 2 4 --rounds 1")
    assert done.returncode == 0, done.stderr
    assert "t(b) = " in done.stdout


def small_benchmark(reader: Reader, command: str) -> None:
    """Minutes: the same with tiny networks."""
    done = reader.run(f"{command} --smoke")
    assert done.returncode == 0, done.stderr
    assert done.stdout


def short_comparison(reader: Reader, command: str) -> None:
    """Minutes to hours: a tenth of a second per run, and the tables of that."""
    done = reader.run(
        "python examples/physics/compare.py heat --seconds 0.1 --seeds 1 --out outputs/physics\n"
        "python examples/physics/report.py --runs outputs/physics"
    )
    assert done.returncode == 0, done.stderr
    assert "| `heat` | Gram-Gauss-Newton, alpha " in done.stdout


def account(reader: Reader, command: str) -> None:
    """Asks for a key or a server: W&B has such a command."""
    done = reader.run(f"python -m {command} --help")
    assert done.returncode == 0, done.stderr


def archive_parts(reader: Reader, command: str) -> None:
    """The parts are gigabytes under terms: the command reads our list of them and says which are missing."""
    done = reader.run(f"{reader.reduced(command)} dataset.root=nowhere")
    assert done.returncode == 2, done.stderr
    assert "28 of 28 archive parts are missing" in done.stderr


def upload_to_files(reader: Reader, command: str) -> None:
    """Needs an account: the same upload into files."""
    done = reader.run(f"{reader.reduced(command)} --mode offline")
    assert done.returncode == 0, done.stderr


def composed(reader: Reader, command: str) -> None:
    """Runs of minutes, much like other commands here: the configuration composes."""
    done = reader.run(f"{reader.written_for_here(command).removesuffix(' --cfg job')} --cfg job")
    assert done.returncode == 0, done.stderr
    assert "optimizer:" in done.stdout


def without_cluster(reader: Reader, command: str) -> None:
    """Needs Slurm, and is run with one in test_sweep_slurm.py: the same sweep composes."""
    words = [
        word for word in shlex.split(command) if "launcher" not in word and "," not in word and word != "-m"
    ]
    done = reader.run(f"{shlex.join(words)} --cfg job")
    assert done.returncode == 0, done.stderr


# By the beginning of a command; the first that fits.
EXCEPTIONS: dict[str, Callable[[Reader, str], None]] = {
    "make demo PYTHON": plan_of_make,
    "make demo": small_demo,
    "make paper": chain_listed,
    "python scripts/theory.py": helped,
    "python scripts/first_epochs": helped,
    "python train.py sweep=lambda_alpha": composed,
    "python train.py -m hydra/launcher=slurm": without_cluster,
    "make ": plan_of_make,
    "source ": default_environment,
    "conda ": conda_file,
    "python -m pip install ": installation,
    "python benchmarks/step.py --sweep": short_benchmark,
    "python benchmarks/memory.py": small_benchmark,
    "python benchmarks/ranks.py": small_benchmark,
    "python examples/physics/": short_comparison,
    "wandb ": account,
    "python scripts/prepare_data.py dataset=afad archive=": archive_parts,
    "python scripts/upload_runs.py": upload_to_files,
    "python train.py dataset=rotation dataset.root=/data/hands.npz": composed,
}


def exception(command: str) -> Callable[[Reader, str], None] | None:
    return next((check for start, check in EXCEPTIONS.items() if command.startswith(start)), None)


# The same check for many commands is made once.
@pytest.mark.parametrize("command", commands(DOCS))
def test_every_command_works(reader: Reader, command: str) -> None:
    """H03: every command of the documentation, sweeps included; none ends in an error or a traceback."""
    if (check := exception(command)) is not None:
        if check not in reader.checked or check in (plan_of_make, small_benchmark):
            check(reader, command)
            reader.checked.add(check)
        return
    before = len(reader.house.runs())
    done = reader.run(reader.reduced(command))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    states = {read_run(folder)["state"] for folder in reader.house.runs()}
    assert states <= {"done", "diverged"}
    trains = "train.py" in command and not {"--help", "--cfg"} & set(command.split())
    if trains and "resume=" not in command:
        assert len(reader.house.runs()) > before


def test_no_exception_outlives_its_command() -> None:
    used = {exception(command) for command in commands(DOCS)}
    assert set(EXCEPTIONS.values()) <= used


def test_no_block_escapes() -> None:
    """A block in another language would not be run; so would one that is not closed."""
    for page, text in TEXTS.items():
        assert {language for language, _ in blocks(text)} <= LANGUAGES, page
        assert text.count("```") == 2 * len(blocks(text)), page
    for block in of("yaml"):
        assert FILE_NAME.match(block) or block.startswith("# conf/"), (
            "a yaml block begins with its file's name"
        )


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if of("python", text)])
def test_every_python_block_runs(
    reader: Reader, page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(reader.house.root)
    for block in of("python", TEXTS[page]):
        # What "your own network" and "your loop" stand for.
        model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(start_dim=0))
        names: dict[str, Any] = {
            "__name__": "documentation",
            "model": model,
            "loader": [(torch.ones(4, 3), torch.ones(4))],
        }
        exec(compile(block.replace("outputs/results", str(RESULTS)), page, "exec"), names)
        if "loader" in block:
            # One linear model, alpha small relative to G: the residuals of equal samples all but vanish.
            assert float((model(torch.ones(4, 3)) - 1).detach().abs().max()) < 0.2
        if "for epoch in" in block:
            assert names["info"].loss < 0.01
            assert capsys.readouterr().out.count("epoch ") == 10
        if 'runs("outputs")' in block:
            assert "ggn" in capsys.readouterr().out


def test_the_example_is_the_file() -> None:
    """The page shows examples/own_network.py itself."""
    shown = [block for block in of("python") if "for epoch in" in block]
    assert shown == [(REPOSITORY / "examples" / "own_network.py").read_text(encoding="utf-8")]


def test_the_readme_is_a_front_door() -> None:
    readme = TEXTS["README.md"]
    assert len(readme.splitlines()) <= 180
    assert "SYNTHETIC" in readme
    for page in PAGES:
        if page.startswith("docs/") and page != "docs/index.md":
            assert f"({page})" in readme, f"{page} is not linked from README.md"
    nav = (REPOSITORY / "zensical.toml").read_text(encoding="utf-8")
    for page in (REPOSITORY / "docs").rglob("*.md"):
        assert f'"{page.relative_to(REPOSITORY / "docs").as_posix()}"' in nav, f"{page} is not in the site"


def test_every_option_of_the_optimizer_is_named() -> None:
    options = set(inspect.signature(GramGaussNewton).parameters) - {"model", "params"}
    assert len(options) > 10
    page = TEXTS["docs/optimizer.md"]
    missing = {option for option in options if not re.search(rf"(?<!\w){option}(?!\w)", page)}
    assert not missing


def conf_files() -> list[Path]:
    """Return the choices that a user makes; the other files are read through them."""
    derived = ("hydra", "dataset_optimizer", "experiment_optimizer", "scale", "local")
    conf = REPOSITORY / "conf"
    return sorted(path for path in conf.glob("*/**/*.yaml") if path.relative_to(conf).parts[0] not in derived)


def test_every_choice_is_named() -> None:
    """A new file in conf/ needs its word in the documentation."""
    assert conf_files()
    for path in conf_files():
        assert f"`{path.stem}`" in DOCS or f"/{path.stem}`" in DOCS, f"{path.relative_to(REPOSITORY)}"


def known_options() -> set[str]:
    """Return every dotted key that some file of conf/ has."""
    found = set()
    conf = REPOSITORY / "conf"
    for path in [conf / "train.yaml", *conf.glob("hydra/launcher/*.yaml"), *conf_files()]:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        whole = "@package _global_" in text or path.name == "train.yaml"
        place = ".".join(path.relative_to(conf).parent.parts)
        for section, entries in content.items() if whole else [(place, content)]:
            if isinstance(entries, dict):
                found |= {f"{section}.{key}" for key in entries}
                found |= {
                    f"{section}.{key}.{name}"
                    for key, value in entries.items()
                    if isinstance(value, dict)
                    for name in value
                }
    return found


def test_every_option_that_is_named_exists() -> None:
    options = known_options()
    groups = "|".join(sorted({option.split(".")[0] for option in options}))
    for page, text in TEXTS.items():
        named = set(re.findall(rf"(?<![\w./`])`?((?:{groups})(?:\.[a-z_0-9]+)+)(?=[`= ,;])", text))
        named -= {"dataset.unit", "optimizer.experimental_capture"}
        assert named <= options, (page, named - options)
    assert "optimizer.damping_convention" in options


def test_every_column_is_explained() -> None:
    section = TEXTS["docs/records.md"].split("## Columns of metrics.csv")[1].split("\n## ")[0]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    for column in METRIC_COLUMNS:
        assert f"`{column}`" in table, column


def test_the_tables_of_ranks_are_those_of_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    print_formula()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ResNet")]
    assert rows
    assert [row for row in rows if row not in DOCS] == []


def test_every_exit_code_is_explained() -> None:
    (paragraph,) = re.findall(r"^\*\*Exit codes\*\*: (.*?)\n\n", DOCS, re.MULTILINE | re.DOTALL)
    codes = re.findall(r"(?:^|· )(\d+)\s", paragraph)
    assert codes == ["0", "1", "2", "3", "130", "143"]


def test_every_target_and_script_is_named() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE)
    page = TEXTS["docs/configuration.md"]
    assert len(targets) > 5
    for target in targets:
        assert f"`make {target}`" in page, target
    for script in sorted((REPOSITORY / "scripts").glob("*.py")):
        assert f"`scripts/{script.name}`" in page, script.name
    for name, text in TEXTS.items():
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
            assert target in targets, (name, target)


def test_every_message_of_the_troubleshooting_page_exists() -> None:
    messages = re.findall(r"^\| `([^`]+)`", TEXTS["docs/troubleshooting.md"], re.MULTILINE)
    assert len(messages) > 5
    files = sorted((REPOSITORY / "src").rglob("*.py"))
    source = " ".join(path.read_text(encoding="utf-8") for path in files)
    source = re.sub(r'"\s*f?"', "", re.sub(r"\{[^{}\n]*\}", "...", source))  # adjacent texts are one
    for message in messages:
        for part in message.split(": "):
            assert part in source, message


@pytest.mark.parametrize("page", [*PAGES, "data/README.md", "outputs/README.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (REPOSITORY / page).parent / name if name else REPOSITORY / page
        assert target.exists(), (page, link)
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(target.read_text(encoding="utf-8")), re.MULTILINE)
            slugs = [re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in headings]
            assert anchor in slugs, (page, link, slugs)


def test_make_and_bash_are_here() -> None:
    """What the documentation asks for in addition to Python."""
    assert shutil.which("make")
    assert shutil.which("bash")
