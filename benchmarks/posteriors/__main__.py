"""`python -m benchmarks.posteriors --data DIR --parts {gap,uci,ranking,toy}`: other posteriors on the same networks.

Hamiltonian Monte Carlo as the reference, Gaussian processes on features, mean-field and global inducing posteriors with
their bounds, and stochastic gradients with noise, beside linearised Laplace. `gap` leaves out the middle third of an
input, `uci` has standard splits, `ranking` asks which score of twelve networks predicts their test log-likelihood, and
`toy` is a cubic function. Each method of each split is a line of JSON in `--out`, and a second run continues there.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison.run import append
from benchmarks.posteriors.contenders import contenders, result
from benchmarks.posteriors.report import report
from benchmarks.posteriors.studies import SETS, quick_studies, studies


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.posteriors", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="with uci")
    parser.add_argument("--parts", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="fewer of the UCI sets")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the methods")
    parser.add_argument("--out", type=Path, metavar="FILE", help="lines of JSON; by default results/posteriors.jsonl")
    parser.add_argument("--quick", action="store_true", help="few made-up data and steps")
    options = parser.parse_args(arguments)
    if options.data is None and not options.quick and options.parts != ["toy"]:
        parser.error("give --data DIR, or --quick, or --parts toy")
    out: Path = options.out or Path("results") / "posteriors.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)

    def there() -> list[dict[str, Any]]:
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    done = [(row["key"], row["contender"]) for row in there()]
    if options.quick:
        planned = quick_studies(options.parts)
    else:
        kept = out.with_suffix("") / "networks"
        planned = studies(options.parts, options.sets, options.splits, options.data or Path(), kept)
    for study in planned:
        for name in contenders(study):
            if (study.key, name) in done or (options.only and name not in options.only):
                continue
            found = result(study, name)
            append(out, {"key": study.key, "contender": name} | found)
            shown = f"log-likelihood {found['test']['ll']:.3f}, {found['seconds']:.1f} s"
            print(*study.key.values(), name, shown, sep=", ", flush=True)
    print(report(there()))


if __name__ == "__main__":
    main()
