"""Draw a contact sheet of a data set, prepared first where needed: what a network will see, sorted by target.

python scripts/contact_sheet.py dataset=rsna_synthetic image_size=64
python scripts/contact_sheet.py dataset=rsna dataset.root=/data/rsna image_size=128 columns=8 rows=6
python scripts/contact_sheet.py dataset=rotation dataset.root=/data/images.npz out=rotation.png

Everything but out (default outputs/contact_sheets/<data set>-<pixels>.png), columns and rows is an override
of the configuration, as for scripts/prepare_data.py. A relative out is below the current folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import (  # noqa: E402
    absolute,
    build_dataset,
    prepare_config,
    report_errors,
    set_repository,
    shown,
)
from gramgn.data import save_contact_sheet  # noqa: E402
from gramgn.errors import ConfigError  # noqa: E402

DEFAULTS = {"out": "", "columns": "12", "rows": "8"}
MOST_TILES = 100


def main(arguments: list[str]) -> None:
    """Draw one sheet and print where it is; exits with 2 on bad input.

    Args:
        arguments: The command line without the program's name.
    """
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    set_repository(ROOT)
    with report_errors(config_name="prepare"):
        own, overrides = split_arguments(arguments)
        columns, rows = tiles("columns", own["columns"]), tiles("rows", own["rows"])
        config = prepare_config(overrides)
        dataset = build_dataset(config["dataset"])
        dataset.check(config["image_size"])
        data = dataset.load(config["image_size"])
        default = absolute(f"outputs/contact_sheets/{data.name}-{data.images.shape[-1]}.png")
        path = Path(own["out"]).expanduser().absolute() if own["out"] else default
        save_contact_sheet(data, path, columns, rows)
        print(shown(path))


def split_arguments(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return this script's own options, defaults filled in, and the overrides of the configuration."""
    own, overrides = dict(DEFAULTS), []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in DEFAULTS:
            overrides.append(argument)
        elif not value:
            raise ConfigError(f"{argument}: write {key}=<value>")
        else:
            own[key] = value
    return own, overrides


def tiles(name: str, given: str) -> int:
    """Return a number of tiles; raise ConfigError unless it is a whole number from 1 to 100."""
    if not (given.isascii() and given.isdigit() and 1 <= int(given) <= MOST_TILES):
        raise ConfigError(f"{name}={given}: must be a whole number from 1 to {MOST_TILES}")
    return int(given)


if __name__ == "__main__":
    main(sys.argv[1:])
