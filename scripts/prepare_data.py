"""Prepare a data set: find its images, decode every one once, split, and store one array.

python scripts/prepare_data.py dataset=rsna dataset.root=/data/rsna
python scripts/prepare_data.py dataset=rsna dataset.root=/data/rsna image_size=32
python scripts/prepare_data.py dataset=afad archive=/downloads/tarball-lite    # unpacks first
python scripts/prepare_data.py dataset=rotation dataset.root=/data/hands.npz
python scripts/prepare_data.py dataset=rsna_synthetic        # draws its images itself
python scripts/prepare_data.py dataset=rsna_synthetic --check    # hashes every byte of the prepared set
python scripts/prepare_data.py --config-dir mine/conf dataset=pages    # a user-defined data set

The keys are those of train.py's `dataset` group. It may be interrupted and run again at any time. A start of a run
compares sizes and times of the prepared files only; `--check` compares their bytes with what was written.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import absolute, build_dataset, prepare_config, report_errors, set_repository  # noqa: E402
from gramgn.data import AFAD, unpack_afad  # noqa: E402
from gramgn.errors import ConfigError  # noqa: E402

CHECK = "--check"


def main(overrides: list[str]) -> int:
    """Return the exit code: 0 prepared, 2 bad input."""
    if {"-h", "--help"} & set(overrides):
        print(__doc__)
        return 0
    set_repository(ROOT)
    return report_errors(lambda: prepare(overrides), config_name="prepare")


def prepare(overrides: list[str]) -> None:
    """Prepare the data set that the overrides of `conf/prepare.yaml` choose."""
    config = prepare_config([override for override in overrides if override != CHECK])
    dataset = build_dataset(config["dataset"])
    if CHECK in overrides:
        print(f"every byte is as it was written: {dataset.verify(config['image_size'])}")
        return
    if config["archive"] is not None:
        if type(dataset) is not AFAD:
            raise ConfigError("archive=... unpacks the parts of AFAD: use it with dataset=afad")
        if not isinstance(config["archive"], str):
            raise ConfigError(f"archive={config['archive']!r} must be the path of a folder")
        checksums = ROOT / "data" / "checksums" / f"afad_{dataset.variant}_parts.sha1"
        unpack_afad(absolute(config["archive"]), dataset.root, checksums=checksums, variant=dataset.variant)
    dataset.check(config["image_size"])
    print(dataset.prepare(config["image_size"]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
