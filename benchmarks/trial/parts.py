"""The parts of the trial by name."""

import random
import time
from importlib import import_module

import torch

from benchmarks.trial.report import Report

__all__ = ["COUNTS", "run"]

# How many trials a part makes at scale one.
COUNTS = {
    "random_networks": 500,
    "bad_inputs": 300,
    "kills": 100,
    "threads": 200,
    "interrupts": 500,
    "foreign_suites": 600,
}


def run(part: str, count: int, seed: int) -> tuple[Report, float]:
    """The report of a part, and how many seconds it took."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    report = (
        bad_inputs(count, seed) if part == "bad_inputs" else import_module(f"benchmarks.trial.{part}").run(count, seed)
    )
    return report, time.perf_counter() - started


def bad_inputs(count: int, seed: int) -> Report:
    """So many kinds of bad input, chosen at random if there are more."""
    try:
        inputs = import_module("benchmarks.trial.bad_inputs")
    except ModuleNotFoundError:
        return Report(skipped="there is no `benchmarks/trial/bad_inputs.py`")
    names = list(inputs.BAD_INPUTS)
    report = Report()
    for name in random.Random(seed).sample(names, min(count, len(names))):
        report.trials += 1
        defect = inputs.check(name)
        if defect is not None:
            report.defects.append(f"{name}: {defect}")
    return report
