"""Rows of the theory's files as no study made them."""

from __future__ import annotations

from gramgn.figures import Setting

SETTING = Setting(
    study="quadratic",
    method="ggn",
    order="cyclic",
    dataset="sphere, wave targets",
    kind="synthetic",
    activation="erf",
    n=100,
    d=20,
    M=128,
    b=100,
    lam=1.0,
    alpha=0.0,
    lr=None,
    seed=0,
    epochs=3,
    lambda_0=0.1,
    kernel_gap=0.5,
    rho=0.0,
    device="a processor",
    torch="2.0",
    git="0123456789ab",
)
