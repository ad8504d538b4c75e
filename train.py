"""Train a network and record the run.

python train.py trainer=laptop                                # GGN on synthetic radiographs
python train.py optimizer=sgd model=resnet_bn trainer=laptop  # a baseline
python train.py optimizer=ggn dataset=afad                    # the paper's AFAD-LITE run
python train.py -m optimizer=ggn,sgd trainer=debug            # a sweep
python train.py resume=outputs/runs/<run folder>              # resume a run where it stopped
python train.py --help                                        # every choice and key
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "src"))  # this checkout's code, whatever is installed

try:
    import hydra
    from omegaconf import DictConfig

    import gramgn.app
except KeyboardInterrupt:
    sys.exit(130)  # as later, when signals are handled


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Do one job; returns its best validation loss, which Hydra's sweepers can minimise."""
    return gramgn.app.run_job(config)


if __name__ == "__main__":
    sys.exit(gramgn.app.main(main, ROOT))
