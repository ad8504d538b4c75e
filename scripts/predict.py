"""Predict the target of image files with the network of a run, and write a CSV file.

python scripts/predict.py run=outputs/runs/<run folder> images=scans
python scripts/predict.py run=<folder> 'images=scans/*.png' out=ages.csv
python scripts/predict.py run=<folder> images=a.png,b.jpg images=more checkpoint=last

run         a run's folder, below the current folder or the repository
images      files, patterns and folders (searched at any depth) below the current folder, separated by commas;
            may be given again. An .npz file stands for the images in it
out         the CSV file (default predictions.csv); a file that does not hold predictions is never replaced
checkpoint  best (default; the lowest validation loss) | last | average (of the last, with trainer.average_decay)
device      auto (default) | cpu | cuda | cuda:<n>
workers     processes that decode; default: as many as there is work for

Columns: path, prediction, unit (years or months, or the data set's own), error. Images are resized, converted and
scaled as the run's own data was. One that cannot be read has a row without a prediction and with the error. Exit
codes: 0 all predicted, 1 some images have an error, 2 rejected and nothing written.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import open_run, run_tool  # noqa: E402
from gramgn.errors import ConfigError  # noqa: E402
from gramgn.progress import say  # noqa: E402

DEFAULTS = {
    "run": None,
    "images": None,
    "out": "predictions.csv",
    "checkpoint": "best",
    "device": "auto",
    "workers": "auto",
}


def main(words: list[str]) -> int:
    """Return the exit code: 0 all predicted, 1 some not, 2 rejected."""
    return run_tool(predict, words, DEFAULTS, root=ROOT, usage=str(__doc__))


def predict(words: dict[str, list[str]]) -> int:
    """Predict and write; return 1 if an image has no prediction."""
    given = {key: values[0] for key, values in words.items()}
    workers, out, folder = given["workers"], Path(given["out"]).expanduser(), open_run(given["run"])
    if workers != "auto" and not (workers.isascii() and workers.isdigit() and int(workers) >= 1):
        raise ConfigError(f"workers={workers} must be a whole number of at least 1, or auto")
    from gramgn.app import check_out, find_images, load_trained, predict_images  # loads torch

    check_out(out)
    paths = find_images(words["images"])
    trained = load_trained(folder, checkpoint=given["checkpoint"], device=given["device"])
    errors = predict_images(trained, paths, out, workers=None if workers == "auto" else int(workers))
    for path, error in errors.items():
        say(f"no prediction: {path}: {error}")
    is_synthetic = trained.run["dataset"].get("kind") == "synthetic"
    note = "; the network was trained on SYNTHETIC images" if is_synthetic else ""
    print(f"{len(paths) - len(errors)} predictions in {trained.unit}, {len(errors)} errors: {out}{note}")
    return int(bool(errors))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
