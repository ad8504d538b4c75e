"""Draw a contact sheet of a data set, prepared first where needed: what a network will see, sorted by target.

python scripts/contact_sheet.py dataset=rsna_synthetic image_size=64
python scripts/contact_sheet.py dataset=rsna dataset.root=/data/rsna image_size=128 columns=8 rows=6
python scripts/contact_sheet.py dataset=rotation dataset.root=/data/images.npz out=rotation.png

Everything but out (default outputs/contact_sheets/<data set>-<pixels>.png), columns and rows is an override
of the configuration (and --config-dir), as for scripts/prepare_data.py. A relative out is below the current folder.
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
    read_words,
    report_errors,
    set_repository,
    shown,
)
from gramgn.data import save_contact_sheet  # noqa: E402
from gramgn.errors import checked_whole  # noqa: E402

DEFAULTS = {"out": "", "columns": "12", "rows": "8"}
MOST_TILES = 100


def main(words: list[str]) -> int:
    """Return the exit code: 0 drawn, 2 bad input."""
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    set_repository(ROOT)
    return report_errors(lambda: draw(words), config_name="prepare")


def draw(words: list[str]) -> None:
    """Draw one sheet and print where it is."""
    own = [word for word in words if word.partition("=")[0] in DEFAULTS]
    given = read_words(own, DEFAULTS, example=str(__doc__).splitlines()[2])
    out, columns, rows = (given[key][0] for key in DEFAULTS)
    tiles = [
        checked_whole(key, int(value) if value.isdecimal() else -1, minimum=1, maximum=MOST_TILES)
        for key, value in (("columns", columns), ("rows", rows))
    ]
    config = prepare_config([word for word in words if word not in own])
    dataset = build_dataset(config["dataset"])
    dataset.check(config["image_size"])
    data = dataset.load(config["image_size"])
    default = absolute(f"outputs/contact_sheets/{data.name}-{data.images.shape[-1]}.png")
    path = Path(out).expanduser().absolute() if out else default
    save_contact_sheet(data, path, *tiles)
    print(shown(path))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
