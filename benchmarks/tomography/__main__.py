"""`python -m benchmarks.tomography {letters,phantom,tooth}`: error bars of images from few angles, scored by the truth.

`letters` are five letters and five digits of 28 × 28 pixels, from 20 angles with 5 and 10 % noise; `phantom` are drawn
images of 128 × 128; `tooth` is a real sinogram (`DIR/ct/tooth.h5`) at `--side` 128 or 320, from 12, 20 and 36 angles.
Each contender of each problem is a line of JSON in `--out`, and a second run continues there. The means are printed.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.tomography.scores import draw, scores
from benchmarks.tomography.studies import studies

COLUMNS = (
    "psnr",
    "ll",
    "ll_object",
    "ll_patches",
    "rank",
    "coverage_object",
    "coverage_edges",
    "coverage_outside",
    "coverage_held_out",
    "factor",
    "ll_factor",
    "seconds",
)


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Means over images by contender, for each setting, and the gain of the first one with its standard error."""
    settings: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = row["key"]
        name = key["name"] if key["name"].startswith("tooth") else "mean"
        settings[f"{name}, {key['angles']} angles, noise {key.get('noise', 'unknown')}"][row["contender"]].append(row)
    lines = []
    for setting, contenders in settings.items():
        lines += [f"\n{setting}", "| | " + " | ".join(COLUMNS) + " | gain in ll |", "|---" * (len(COLUMNS) + 2) + "|"]
        first = {row["key"]["name"]: row["ll"] for row in next(iter(contenders.values()))}
        for name, found in contenders.items():
            values = [[row[column] for row in found if row.get(column) is not None] for column in COLUMNS]
            cells = [f"{np.mean(v):.2f}" if v else "" for v in values]
            gains = [first[row["key"]["name"]] - row["ll"] for row in found if row["key"]["name"] in first]
            error = f" ± {np.std(gains, ddof=1) / len(gains) ** 0.5:.2f}" if len(gains) > 1 else ""
            gain = f"{np.mean(gains):+.2f}{error}" if gains else ""
            lines.append(f"| {name} ({len(found)}) | " + " | ".join(cells) + f" | {gain} |")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Appends a line for each contender of each problem that the file does not have."""

    def there() -> list[dict[str, Any]]:
        return [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []

    done = [(row["key"], row["contender"]) for row in there()]
    for study in studies(options):
        drawn = {}
        for name, make in study.contenders().items():
            if (study.key, name) in done or (options.only and name not in options.only):
                continue
            estimate = make()
            if estimate.deviations.ndim == 3:
                drawn[name] = estimate
            found = estimate.facts | scores(study.problem, estimate)
            found["seconds"] = sum(v for k, v in estimate.facts.items() if k.startswith("seconds"))
            with options.out.open("a") as file:
                file.write(json.dumps({"key": study.key, "contender": name} | found) + "\n")
            print(study.key, name, f"psnr {found['psnr']:.1f}, log-likelihood {found['ll']:.2f}", flush=True)
        if drawn and options.pictures:
            options.pictures.mkdir(parents=True, exist_ok=True)
            name = "-".join(str(value) for value in study.key.values()).replace(" ", "-")
            draw(options.pictures / f"{name}.png", study.problem, drawn)
    print(report(there()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tomography", description=__doc__)
    parser.add_argument("what", choices=("letters", "phantom", "tooth"))
    parser.add_argument("--data", type=Path, metavar="DIR", help="with images/mnist.npz and ct/tooth.h5")
    parser.add_argument("--quick", action="store_true", help="few small images and short training")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="lines of JSON")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="where to draw each problem")
    parser.add_argument("--side", type=int, help="of phantoms and of the tooth")
    parser.add_argument("--angles", type=int, nargs="+", default=[12, 20, 36], help="of the tooth")
    parser.add_argument("--small", action="store_true", help="a network of 20,313 weights for the tooth, not 116,013")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.what == "tooth" and options.data is None:
        parser.error("the tooth needs --data DIR")
    torch.set_num_threads(options.threads)
    run(options)


if __name__ == "__main__":
    main()
