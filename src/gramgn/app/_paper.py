"""The paper's experiments as a chain of sweeps: which there are, what each needs, how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

SEEDS = (0, 1, 2)
DATA = ("synthetic", "real")
NUM_LAMBDAS, NUM_ALPHAS, NUM_CURVES = 5, 8, 5  # of conf/sweep/lambda_alpha*.yaml
GRID, CURVES = "lambda_alpha", "lambda_alpha_curves"
JOB_S = 1.0  # starting and closing a job


@dataclass(frozen=True)
class Scale:
    """How large the chain is.

    Attributes:
        name: The ``trainer=`` choice.
        epochs: Epochs of a curve; those of the figure 2c grid are ``grid_epochs``.
        grid_epochs: Epochs of a cell of the grid.
        grid_limit: Images that the grid uses; None: all.
        num_images: Images of the two data sets, AFAD-LITE's and RSNA's.
        sgd_image_s: Seconds an image and epoch with SGD on two CPU cores, evaluation included.
        ggn_image_s: The same with GGN.
        overrides: What else goes onto the command line of every step on stand-in data.
        grid_seeds: Seeds of a cell of the grid.
    """

    name: str
    epochs: int
    grid_epochs: int
    grid_limit: int | None
    num_images: tuple[int, int]
    sgd_image_s: float
    ggn_image_s: float
    overrides: tuple[str, ...] = ()
    grid_seeds: int = 1


# Measured on two cores: an epoch on 2,560 images takes 2.5 s with SGD and 4 s with GGN at laptop scale; at the paper's
# size a step of 128 images takes 1.0 s and 1.3 s (outputs/results/step_cpu_2_cores.csv), on four fifths of the images.
SCALES = {
    scale.name: scale
    for scale in (
        Scale("debug", 2, 2, 100, (160, 160), 0.0005, 0.0008),
        Scale("laptop", 20, 10, 512, (2560, 2560), 0.0010, 0.0016, grid_seeds=3),
        Scale("paper", 30, 10, None, (59344, 12611), 0.0068, 0.0086, ("dataset.num_images=full",)),
    )
}


@dataclass(frozen=True)
class Step:
    """One sweep of the chain.

    Attributes:
        name: Short name; its sweep folder is ``paper-<scale>-<data>-<name>``.
        figures: The panels that it draws, e.g. ``"1a 1b"``.
        choice: The override that says what is run, e.g. ``"experiment=fig1/afad_sgd_bn"``.
        dataset: The real data set, ``"afad"`` or ``"rsna"``.
        method: ``"sgd"`` or ``"ggn"``, for the estimate.
        seeds: Seeds it is run with.
        warm_start: The step whose networks it starts from, seed by seed.
        grid: The step whose best alpha it takes.
        cells: Jobs a seed.
    """

    name: str
    figures: str
    choice: str
    dataset: str
    method: str
    seeds: tuple[int, ...] = SEEDS
    warm_start: str | None = None
    grid: str | None = None
    cells: int = 1


def _curves() -> tuple[Step, ...]:
    bn, fixup, ggn, ours = "sgd_bn", "sgd_fixup", "ggn_fixup", "ggn_spring_gn"
    starts = {bn: f"afad_{bn}", fixup: f"afad_{ggn}", ggn: f"afad_{ggn}", ours: f"afad_{ours}"}
    return tuple(
        Step(
            f"{dataset}_{curve}",
            figures,
            f"experiment={'ours' if curve == ours else 'fig1'}/{dataset}_{curve}",
            dataset,
            curve.split("_")[0],
            warm_start=starts[curve] if dataset == "rsna" else None,
        )
        for dataset, figures in (("afad", "1a 1b"), ("rsna", "1c 1d 2a"))
        for curve in (ggn, bn, fixup, ours)
    )


STEPS = (
    *_curves(),
    Step(
        GRID,
        "2c",
        f"sweep={GRID}",
        "rsna",
        "ggn",
        warm_start="afad_ggn_fixup",
        cells=NUM_LAMBDAS * NUM_ALPHAS,
    ),
    Step(
        CURVES,
        "2b",
        f"sweep={CURVES}",
        "rsna",
        "ggn",
        seeds=SEEDS[:1],
        warm_start="afad_ggn_fixup",
        grid=GRID,
        cells=NUM_CURVES,
    ),
)


@dataclass(frozen=True)
class Chain:
    """The whole chain at one scale on one kind of data.

    Attributes:
        scale: How large.
        data: ``"synthetic"`` (the stand-ins) or ``"real"``.
        extra: Overrides of the user's that go onto every step's command line.
    """

    scale: Scale
    data: str
    extra: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """In the order in which they are run: what a step needs comes before it."""
        seeds = SEEDS[: self.scale.grid_seeds]
        return tuple(replace(step, seeds=seeds) if step.name == GRID else step for step in STEPS)

    @property
    def name(self) -> str:
        """``paper-<scale>-<data>``, what the folders of all steps begin with."""
        return f"paper-{self.scale.name}-{self.data}"

    def folder_name(self, step: str) -> str:
        """Return the name of a step's sweep folder."""
        return f"{self.name}-{step}"

    def dataset(self, step: Step) -> str:
        """Return the choice of ``dataset=`` for a step."""
        return step.dataset if self.data == "real" else f"{step.dataset}_synthetic"

    def epochs(self, step: Step) -> int:
        """Return the epochs of a step's jobs."""
        return self.scale.grid_epochs if step.name == GRID else self.scale.epochs

    def arguments(self, step: Step, seeds: Sequence[int]) -> list[str]:
        """Return what stands behind ``python train.py`` for a step.

        Args:
            step: The step.
            seeds: Its seeds: all of its own, or those that have a network to start from.
        """
        words = ["-m", step.choice, f"dataset={self.dataset(step)}", f"trainer={self.scale.name}"]
        swept = ",".join(map(str, seeds))
        # One seed of several stays an axis, so that its job has the same folder when the others follow.
        if len(seeds) == 1 < len(step.seeds):
            swept = f"choice({swept})"
        words += [f"trainer.epochs={self.epochs(step)}", f"seed={swept}"]
        if step.name == GRID and self.scale.grid_limit is not None:
            words.append(f"dataset.limit={self.scale.grid_limit}")
        if self.data == "synthetic":
            words += self.scale.overrides
        if step.warm_start is not None:
            words.append(f"warm_start.sweep={self.folder_name(step.warm_start)}")
        if step.grid is not None:
            words.append(f"best_alpha.sweep={self.folder_name(step.grid)}")
        return [*words, f"name={self.folder_name(step.name)}", *self.extra]

    def job_s(self, step: Step) -> float:
        """Return roughly how many seconds a job of a step takes on two CPU cores."""
        images = self.scale.num_images[0 if step.dataset == "afad" else 1]
        if step.name == GRID and self.scale.grid_limit is not None:
            images = min(images, self.scale.grid_limit)
        image_s = self.scale.sgd_image_s if step.method == "sgd" else self.scale.ggn_image_s
        return JOB_S + self.epochs(step) * images * image_s

    def num_jobs(self, step: Step) -> int:
        """Return how many jobs a step has; a grid's may become more where a whole lambda diverged."""
        return len(step.seeds) * step.cells
