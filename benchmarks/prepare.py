"""Measure the preparation of images relative to bare decoding by Pillow, in images per second.

python benchmarks/prepare.py                                # synthetic images of about 1,300 x 1,600
python benchmarks/prepare.py --images /data/rsna --num 100    # real images

One core is measured in processor time, several processes in elapsed time, so run it on an idle machine. The
processes take about a second to start, which shows in the last line if there are few images.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from gramgn.data import RSNA, load_image  # noqa: E402

GOAL = 0.85
REPEATS = 5
DISTINCT = 24


def main() -> None:
    """Print decode and prepare throughput on one core, and of the whole prepare on several."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=Path, help="folder of PNG files (default: synthetic images)")
    parser.add_argument("--num", type=int, default=120, help="number of images")
    parser.add_argument("--workers", type=int, default=2, help="processes of the second measurement")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "raw"
        root.mkdir()
        if given.images:
            for number, file in enumerate(sorted(given.images.rglob("*.png"))[: given.num], start=1):
                shutil.copyfile(file, root / f"{number}.png")
        else:
            draw(root, min(given.num, DISTINCT))
        # The same files under further names: decoding them costs as much as decoding others.
        num_distinct = len(list(root.glob("*.png")))
        for number in range(num_distinct, given.num):
            (root / f"{number + 1}.png").hardlink_to(root / f"{number % num_distinct + 1}.png")
        files = sorted(root.glob("*.png"))
        (root / "labels.csv").write_text("id,boneage,male\n" + "".join(f"{f.stem},100,True\n" for f in files))
        report(root, files, given.workers)


def report(root: Path, files: list[Path], workers: int) -> None:
    """Time the same files both ways and print the result."""
    sizes = np.array([Image.open(file).size for file in files])
    mebibytes = sum(file.stat().st_size for file in files) / 2**20
    print(
        f"{len(files)} images, mean {sizes[:, 0].mean():.0f} x {sizes[:, 1].mean():.0f}, {mebibytes:.1f} MiB"
    )
    decode_s, load_s, prepare_s = best(
        time.process_time,
        lambda: list(map(decode, files)),
        lambda: [load_image(file, 64, channels=1) for file in files],
        lambda: prepare(root, 1),
    )
    show("bare Pillow decode, one core", len(files), decode_s, decode_s)
    show("read, decode and resize, one core", len(files), load_s, decode_s)
    show("whole prepare, one core", len(files), prepare_s, decode_s)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(decode, files[:workers]))  # not to measure the start of the processes
        pooled_s, started_s = best(
            time.perf_counter,
            lambda: list(pool.map(decode, files, chunksize=4)),
            lambda: prepare(root, workers),
        )
    show(f"bare Pillow decode, {workers} processes", len(files), pooled_s, pooled_s)
    show(f"whole prepare, {workers} processes, their start included", len(files), started_s, pooled_s)


def show(what: str, num: int, seconds: float, reference_s: float) -> None:
    """Print one line; the share is that of the bare decode's throughput."""
    share = reference_s / seconds
    verdict = "" if share >= GOAL else "  below the goal of 85 %"
    print(f"{what:<52} {num / seconds:8.1f} images/s  {share:6.1%}{verdict}")


def best(clock: Callable[[], float], *works: Callable[[], object]) -> list[float]:
    """Return the shortest of several durations in seconds of each function; they take turns."""
    durations: list[list[float]] = [[] for _ in works]
    for _ in range(REPEATS):
        for work, times in zip(works, durations, strict=True):
            start = clock()
            work()
            times.append(clock() - start)
    return [min(times) for times in durations]


def decode(file: Path) -> None:
    """Decode a file and nothing else."""
    Image.open(io.BytesIO(file.read_bytes())).load()


def prepare(root: Path, workers: int) -> None:
    """Prepare all images into a temporary folder."""
    with tempfile.TemporaryDirectory() as prepared:
        RSNA(root, prepared_root=prepared, workers=workers).prepare(64)


def draw(root: Path, num: int) -> None:
    """Write grey PNG files of a radiograph's size and compressibility: smooth fields with a little noise."""
    rng = np.random.default_rng(0)
    for number in range(1, num + 1):
        width, height = int(rng.integers(1200, 1400)), int(rng.integers(1500, 1700))
        field = Image.fromarray(rng.integers(20, 230, (9, 7), dtype=np.uint8)).resize((width, height))
        noisy = np.asarray(field) + rng.normal(0.0, 1.5, (height, width))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(root / f"{number}.png")


if __name__ == "__main__":
    main()
