"""Sweeps: many jobs from one command, each in a process of its own, which the same command again completes.

``_launcher`` and ``_sweeper`` meet Hydra, ``_session`` is one command's work on a sweep, ``_server`` and ``_child`` are
its processes. Importing this package imports none of them.
"""
