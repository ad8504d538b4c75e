"""Start a short run on three ranks again and again and count how often all of them end with exit code 0.

python benchmarks/rank_ends.py            # 20 times
python benchmarks/rank_ends.py --times 5 --ranks 4
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = ("optimizer=ggn", "model=resnet_gn", "trainer=debug", "trainer.epochs=1", "tracking=none")


def main() -> int:
    """Run the command line; the exit code is 0 if every start ended well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="default: 20")
    parser.add_argument("--ranks", type=int, default=3, help="default: 3")
    given = parser.parse_args()
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | os.environ
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    good = 0
    for number in range(1, given.times + 1):
        with tempfile.TemporaryDirectory() as folder:
            words = [*launcher, f"--nproc-per-node={given.ranks}", str(ROOT / "train.py"), *RUN]
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, *words, f"hydra.run.dir={folder}/run"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        good += done.returncode == 0
        print(f"{number}: exit code {done.returncode}, {time.perf_counter() - start:.1f} s", flush=True)
        if done.returncode:
            print(done.stderr)
    print(f"{good} of {given.times} starts on {given.ranks} ranks ended with exit code 0")
    return int(good < given.times)


if __name__ == "__main__":
    raise SystemExit(main())
