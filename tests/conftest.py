"""What every test may use."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _torch_settings_stay() -> Iterator[None]:
    """Put torch's process-wide switches back: a run sets them, and the next test must not see that."""
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else None
    _set_torch_defaults()  # a fixture of the whole module may have made a run before
    yield
    _set_torch_defaults()
    if torch is not None:
        torch.set_num_threads(threads)


def _set_torch_defaults() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        cuda.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = False, True, False, False
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real images beside the checkout, or skip the test where it is absent."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real images are not at {folder}")
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end which tests were skipped and how to have them, where a newcomer sees it."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        if isinstance(report.longrepr, tuple):
            reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("skipped tests, and how to have them")
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{count} skipped: {reason}")
