"""The parts of the trial by name."""

import random
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.trial.report import Report

__all__ = ["COUNTS", "run"]

# How many trials a part makes at scale one.
COUNTS = {
    "random_networks": 500,
    "bad_inputs": 300,
    "damaged_files": 100,
    "kills": 100,
    "resumed_fits": 100,
    "killed_trainings": 30,
    "killed_ranks": 20,
    "threads": 200,
    "interrupts": 500,
    "foreign_suites": 600,
}


def run(part: str, count: int, seed: int) -> tuple[Report, float]:
    """The report of a part, and how many seconds it took."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    make = {"bad_inputs": bad_inputs, "damaged_files": damaged_files}.get(part)
    report = make(count, seed) if make else import_module(f"benchmarks.trial.{part}").run(count, seed)
    return report, time.perf_counter() - started


def bad_inputs(count: int, seed: int) -> Report:
    """So many kinds of bad input, chosen at random if there are more."""
    inputs = _module("bad_inputs")
    if inputs is None:
        return Report(skipped="there is no `benchmarks/trial/bad_inputs.py`")
    report, names = Report(), list(inputs.BAD_INPUTS)
    for name in random.Random(seed).sample(names, min(count, len(names))):
        report.trials += 1
        defect = inputs.check(name)
        if defect is not None:
            report.defects.append(f"{name}: {defect}")
    return report


def damaged_files(count: int, seed: int) -> Report:
    """Files with a flipped bit, and files that are cut off, half of each."""
    damages = _module("damaged_files")
    if damages is None:
        return Report(skipped="there is no `benchmarks/trial/damaged_files.py`")
    half = max(1, count // 2)
    return Report(2 * half, [*damages.flipped_bits(half, seed), *damages.cut_files(half, seed)])


def _module(name: str) -> Any:
    path = f"benchmarks.trial.{name}"
    return import_module(path) if find_spec(path) else None
