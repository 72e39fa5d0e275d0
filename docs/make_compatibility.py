"""Which networks work: runs each and writes the table of `compatibility.md`.

`PYTHONPATH=tests python docs/make_compatibility.py [--only torch.nn MaxViT] [--missing]`. Networks are small and have
random weights: those of `tests/networks/registry`, and those of other libraries in `library_networks.py`.
"""

import argparse
import time
from pathlib import Path

from library_networks import NETWORKS
from networks.registry.compatibility import TOLERANCE, run

TABLE = Path(__file__).parent / "compatibility.md"
HEAD = """# Which networks work

Each network of this table is built with random weights and run. Jacobian-vector products are compared in float64 with
central differences, or with two reverse passes where a kink of the network lies within the step. `error` is relative to
the largest entry; a network passes up to 1e-5. Vector-Jacobian products equal the gradient of `loss.backward()` to
1e-9. Then `LinearisedLaplace` is fitted on a few data and predicts, and the module is the same afterwards, bit for bit.
The last column names the slower way that is taken, or what failed. The command that writes this page is
`docs/make_compatibility.py`; its networks need timm, transformers, peft and torch_geometric.

| library | network | weights | against | error | fit and prediction | unchanged | notice or error |
|---|---|---|---|---|---|---|---|
"""


def rows_of_page() -> dict[tuple[str, str], str]:
    """The rows of the present page, by library and name."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    cells = {line: [cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| ")}
    return {(c[1], c[2]): line for line, c in cells.items()}


def write(rows: dict[tuple[str, str], str]) -> None:
    """Writes the page, in the order of `NETWORKS`."""
    lines = [rows[library, name] for library, name, _ in NETWORKS if (library, name) in rows]
    works = sum(float(row.split("|")[5]) <= TOLERANCE and "**no**" not in row for row in lines)
    TABLE.write_text(HEAD + "\n".join(lines) + f"\n\n{works} of {len(lines)} work.\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="libraries, or names of networks")
    parser.add_argument("--missing", action="store_true", help="only what is not in the page yet")
    args = parser.parse_args()
    rows = rows_of_page()
    for library, name, build in NETWORKS:
        if (args.only and not {library, name} & set(args.only)) or (args.missing and (library, name) in rows):
            continue
        started = time.perf_counter()
        outcome = run(library, name, build)
        print(f"{outcome.row()} {time.perf_counter() - started:.1f} s", flush=True)
        rows[library, name] = outcome.row()
        write(rows)


if __name__ == "__main__":
    main()
