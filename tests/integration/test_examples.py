"""The examples run as written, in seconds, with torch alone, and learn what they say they learn."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("own_network", "classification")


def output_of(repository: Path, name: str, code: str = "") -> str:
    """Run an example in a process of its own, after ``code``, with this repository's package."""
    script = repository / "examples" / f"{name}.py"
    run = f"{code}\nimport runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", run],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_short_and_say_which_convention(repository: Path, name: str) -> None:
    """At most 25 lines of code; what alpha stands beside is written and explained in a comment."""
    text = (repository / "examples" / f"{name}.py").read_text()
    code = [line for line in ast.unparse(ast.parse(text)).splitlines() if line.strip()]
    assert len(code) <= 26  # with the docstring
    assert 'damping_convention="mean"' in text
    assert re.search(r"#.*alpha is added to the mean", text)


def test_own_network(repository: Path) -> None:
    """Only torch is there: the pipeline's packages cannot be imported."""
    absent = (
        "import sys\nfor name in ('hydra', 'omegaconf', 'wandb', 'pandas', 'PIL'): sys.modules[name] = None"
    )
    losses = [
        float(loss)
        for loss in re.findall(r"mean squared error (\S+),", output_of(repository, NAMES[0], absent))
    ]
    assert len(losses) == 10
    assert losses[-1] < 1e-3


def test_classification(repository: Path) -> None:
    accuracies = re.findall(r"test accuracy (\S+)%", output_of(repository, NAMES[1]))
    assert len(accuracies) == 10
    assert float(accuracies[-1]) > 95.0


def test_every_example_is_run(repository: Path) -> None:
    assert sorted(path.stem for path in (repository / "examples").glob("*.py")) == sorted(NAMES)
