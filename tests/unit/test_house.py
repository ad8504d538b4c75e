"""The rules of the house that a machine can check."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

PACKAGE = "gramgn"
ROOT_MODULES = {
    "damping",
    "errors",
    "files",
    "locks",
    "physics",
    "progress",
    "scheduler",
    "stopping",
    "workers",
    "world",
}
# Who may import whom (besides itself and the root modules). optim and models import torch and gramgn.damping alone.
ALLOWED = {
    "optim": set(),
    "models": set(),
    "data": {"records"},
    "synthetic": {"data"},
    "records": set(),
    "tracking": {"records"},
    "training": {"optim", "records"},
    "theory.rates": set(),
    "theory": {"optim", "models", "theory.rates"},
    "figures": {"records", "theory.rates"},
    "report": {"figures", "records"},
    "app": {
        "optim",
        "models",
        "data",
        "synthetic",
        "tracking",
        "records",
        "training",
        "figures",
        "theory",
        "theory.rates",
    },
}
# Above all others: jobs import most packages once, in the process that they are forked from.
ALLOWED["sweep"] = set(ALLOWED) - {"bench", "report", "theory", "sweep"}
ONLY_IN = {
    "hydra": ("src/gramgn/app/", "src/gramgn/sweep/", "src/hydra_plugins/", "scripts/", "train.py"),
    "omegaconf": ("src/gramgn/app/", "src/hydra_plugins/", "scripts/", "train.py"),
    "wandb": ("src/gramgn/tracking/client.py",),
    "matplotlib": ("src/gramgn/figures/",),
    "pandas": (
        *(
            f"src/gramgn/{room}/"
            for room in ("records", "sweep", "tracking", "figures", "report", "data", "app", "theory")
        ),
        "scripts/results.py",  # names its types only
    ),
    "PIL": ("src/gramgn/data/", "src/gramgn/synthetic/", "scripts/"),
    "scipy": ("src/gramgn/theory/",),
    "sklearn": ("src/gramgn/data/",),
    "jinja2": ("src/gramgn/report/",),
}
# Parts of packages that others may import from by their own names.
SEAMS = {"theory.rates", "optim.kernels", "optim.ranks", "optim.stream"}
TORCH_ALONE = ("optim", "models")
OF_TORCH_ALONE = ("gramgn.damping",)
# Extras that make env does not install: packages that the step benchmark only compares with.
UNPINNED = {"bench", "optuna"}


def imports(path: Path, module: str) -> set[str]:
    """Return the absolute names of all modules that a file imports, anywhere in it."""
    found: set[str] = set()
    parent = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = parent[: len(parent) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return found


def package_of(dotted: str) -> str | None:
    """Return the package of ours that a module belongs to, None for others' and for the root modules."""
    parts = dotted.split(".")
    if (
        parts[0] != PACKAGE
        or len(parts) < 2
        or parts[1] in ROOT_MODULES
        or f"{parts[1]}" not in {name.split(".")[0] for name in ALLOWED}
    ):
        return None
    # Parts that need no torch, for figures and status.
    return ".".join(parts[1:3]) if parts[1:3] == ["theory", "rates"] else parts[1]


def modules(repository: Path) -> list[tuple[Path, str]]:
    source = repository / "src"
    files = sorted((source / PACKAGE).rglob("*.py"))
    names = [
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for path in files
    ]
    return list(zip(files, names, strict=True))


def test_imports_go_one_way(repository: Path) -> None:
    wrong = []
    for path, module in modules(repository):
        own = package_of(module)
        if own is None:
            continue
        for imported in imports(path, module):
            other = package_of(imported)
            if other is not None and other not in ALLOWED[own] | {own}:
                wrong.append(f"{module} imports {imported}")
            root = imported.split(".")[0] == PACKAGE and other is None
            if own in TORCH_ALONE and root and not imported.startswith(OF_TORCH_ALONE):
                wrong.append(f"{module} imports {imported}: {own} depends on torch alone")
    assert wrong == []


def test_other_packages_are_imported_by_their_names(repository: Path) -> None:
    """Outside a package everyone imports from the package, never from a module in it: modules may move."""
    wrong = []
    for path in code(repository):
        place = path.relative_to(repository)
        own = place.parts[2] if place.parts[:2] == ("src", PACKAGE) and len(place.parts) > 3 else ""
        for imported in imported_modules(path, repository / "src"):
            package = imported.split(".")[1]
            if package == own or imported.removeprefix(f"{PACKAGE}.") in SEAMS:
                continue
            wrong.append(f"{place} imports {imported}")
    assert wrong == []


def test_a_package_has_one_module_and_one_class_of_a_name(repository: Path) -> None:
    """And its modules have no underscore: the package's `__init__` says what is public. Imports are absolute."""
    wrong = []
    for package in sorted((repository / "src" / PACKAGE).iterdir()):
        if not (package / "__init__.py").exists():
            continue
        files = list(package.rglob("*.py"))
        names = [path.stem for path in files if path.stem != "__init__"]
        wrong += [f"{package.name}: module {name}" for name in names if name.startswith("_")]
        classes: list[str] = []
        for path in files:
            tree = ast.parse(path.read_text())
            classes += [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
            if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)):
                wrong.append(f"{path.relative_to(repository)} has a relative import")
        for kind, found in (("module", names), ("class", [each for each in classes if each[0] != "_"])):
            wrong += [f"{package.name}: two of {kind} {each}" for each in set(found) if found.count(each) > 1]
    assert wrong == []


def code(repository: Path) -> list[Path]:
    """Return all of our Python files."""
    folders = ("src", "scripts", "tests", "benchmarks", "examples")
    return [
        repository / "train.py",
        *(path for name in folders for path in sorted((repository / name).rglob("*.py"))),
    ]


def imported_modules(path: Path, source: Path) -> set[str]:
    """Return the modules inside packages of ours that a file imports, e.g. `gramgn.optim.solve`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {str(node.module)}
    return {
        name
        for name in found
        if name.split(".")[0] == PACKAGE
        and name.count(".") > 1
        and (source / Path(*name.split(".")[:2]) / "__init__.py").exists()
    }


def test_others_packages_stay_in_their_rooms(repository: Path) -> None:
    files = [
        *(repository / "src").rglob("*.py"),
        *(repository / "scripts").glob("*.py"),
        repository / "train.py",
    ]
    wrong = []
    for path in files:
        place = path.relative_to(repository).as_posix()
        for imported in imports(path, "x.y"):
            rooms = ONLY_IN.get(imported.split(".")[0])
            if rooms is not None and not place.startswith(rooms):
                wrong.append(f"{place} imports {imported}")
    assert wrong == []


def test_every_room_of_the_house_is_known(repository: Path) -> None:
    """A new package must be given its place in ALLOWED, or nothing checks it."""
    rooms = {
        path.name for path in (repository / "src" / PACKAGE).iterdir() if (path / "__init__.py").exists()
    }
    assert rooms <= set(ALLOWED)


def test_train_py_is_small_and_holds_hydra_main(repository: Path) -> None:
    text = (repository / "train.py").read_text()
    assert "@hydra.main" in text  # tab completion looks for it
    assert len(text.splitlines()) < 40


def pins(repository: Path) -> dict[str, str]:
    lines = (repository / "requirements.lock").read_text().splitlines()
    found = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found.items()}


def test_lock_and_environment_agree(repository: Path) -> None:
    """H27: conda's environment takes its pins from the lock and from nowhere else."""
    text = (repository / "environment.yml").read_text()
    assert "- -r requirements.lock" in text
    assert not re.search(r"^\s*-\s*(torch|numpy|hydra)", text, re.MULTILINE)
    (python,) = re.findall(r"- python=(3\.\d+)", text)
    assert python in ("3.11", "3.12", "3.13")
    assert "conda-forge" in text


def test_lock_satisfies_pyproject(repository: Path) -> None:
    """H26, H27: everything that pyproject asks for is pinned, in the range it allows; Python is bounded."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    locked = pins(repository)
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(entry for name, extra in extras.items() if name not in UNPINNED for entry in extra),
    ]
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(locked[requirement.name.lower()]), requirement
    for requirement in map(Requirement, (entry for name in UNPINNED for entry in extras[name])):
        assert requirement.name.lower() not in locked, requirement
    assert locked["torch"] == "2.14.1"
    assert locked["torchvision"] == "0.29.1"
    python = SpecifierSet(project["requires-python"])
    assert [
        version for version in ("3.10", "3.11.3", "3.11.4", "3.12", "3.13", "3.14") if version in python
    ] == [
        "3.11.4",
        "3.12",
        "3.13",
    ]


def test_importing_the_package_is_light() -> None:
    """Public names are lazy: no torch for figures, --help or the status of runs."""
    import subprocess
    import sys

    code = (
        "import gramgn, sys; assert 'torch' not in sys.modules\n"
        "gramgn.GramGaussNewton; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    code = (
        "import sys; from gramgn.optim import GramGaussNewton\n"
        "heavy = {'hydra', 'omegaconf', 'wandb', 'PIL', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    code = (
        "import sys, gramgn.records\n"
        "heavy = {'torch', 'numpy', 'pandas', 'hydra', 'wandb', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("folder", ["src", "scripts", "conf", "tests"])
def test_nothing_names_a_machine(repository: Path, folder: str) -> None:
    """Nothing that is committed holds an absolute home or temporary path."""
    pattern = re.compile(r"(?<![\w.])/(home|Users|root)/\w+")
    for path in (repository / folder).rglob("*"):
        if path.suffix in (".py", ".yaml", ".md", ".csv") and path.name != Path(__file__).name:
            found = [
                match.group(0)
                for match in pattern.finditer(path.read_text())
                if "person" not in match.group(0)
            ]
            assert not found or path.name.startswith(("test_tracking", "test_records")), (path, found)
