"""Predict the target of image files with the network of a run, and write a CSV file.

python scripts/predict.py run=outputs/runs/<run folder> images=scans
python scripts/predict.py run=<folder> 'images=scans/*.png' out=ages.csv
python scripts/predict.py run=<folder> images=a.png,b.jpg images=more checkpoint=last

run         a run's folder, below the current folder or the repository
images      files, patterns and folders (searched at any depth) below the current folder, with commas between;
            may be given again. An .npz file means the images in it
out         the CSV file (default predictions.csv); a file that is not one of predictions is never replaced
checkpoint  best (default; the lowest validation loss) | last
device      auto (default) | cpu | cuda | cuda:<n>
workers     processes that decode; default: as many as there is work for

Columns: path, prediction, unit (years or months, or what the data set has), error. Images are resized,
converted and scaled as the run's own data was. One that cannot be read has a row without a prediction and with
the error. Exit codes: 0 all predicted, 1 some images have an error, 2 refused and nothing written.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gramgn.app import report_errors, set_repository, tools  # noqa: E402
from gramgn.errors import ConfigError  # noqa: E402
from gramgn.progress import say  # noqa: E402

EXAMPLE = 'python scripts/predict.py "run=outputs/runs/<run folder>" images=<folder>'
DEFAULTS = {
    "run": None,
    "images": None,
    "out": "predictions.csv",
    "checkpoint": "best",
    "device": "auto",
    "workers": "auto",
}


def main(arguments: list[str]) -> int:
    """Predict, write, and return the exit code: 0 all predicted, 1 some not, 2 refused."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    set_repository(ROOT)
    code, num_bad = [0], 0
    with report_errors(code):
        words = tools.read_words(arguments, DEFAULTS, example=EXAMPLE, repeatable=("images",))
        checkpoint = tools.choice("checkpoint", words["checkpoint"][0], ("best", "last"))
        workers = num_workers(words["workers"][0])
        out = Path(words["out"][0]).expanduser()
        folder = tools.open_run(words["run"][0])
        tools.check_out(out)
        paths = tools.find_images(words["images"])
        trained = tools.load_trained(folder, checkpoint=checkpoint, device=words["device"][0])
        predictions = tools.predict_images(trained, paths, workers=workers)
        tools.write_predictions(predictions, trained.unit, out)
        bad = [each for each in predictions if each.error]
        num_bad = len(bad)
        for each in bad:
            say(f"no prediction: {each.path}: {each.error}")
        kind = trained.run["dataset"].get("kind")
        note = "; the network was trained on SYNTHETIC images" if kind == "synthetic" else ""
        print(f"{len(predictions) - num_bad} predictions in {trained.unit}, {num_bad} errors: {out}{note}")
    return code[0] or int(num_bad > 0)


def num_workers(given: str) -> int | None:
    """Return the number of processes; None for ``auto``."""
    if given == "auto":
        return None
    if not (given.isascii() and given.isdigit() and int(given) >= 1):
        raise ConfigError(f"workers={given} must be a whole number of at least 1, or auto")
    return int(given)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
