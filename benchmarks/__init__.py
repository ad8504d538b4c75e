"""Measurements of speed and memory, outside the installed package: `python benchmarks/step.py` and its neighbours.

- `step.py`: a step of Gram-Gauss-Newton relative to one of SGD, and to other ways of computing it;
- `pipeline.py`: start-up, overhead per epoch and memory of a training run;
- `prepare.py`: preparing images relative to bare decoding.

To add a way of computing the step: one function that returns a `Prepared` and one line in `paths.py`.
"""
