"""Which networks work: runs each and writes `compatibility.md`.

`PYTHONPATH=tests python docs/make_compatibility.py [--only torch.nn MaxViT] [--missing]`. Networks are small and have
random weights: those of `tests/networks/registry`, and those of other libraries in `library_networks.py`.
"""

import argparse
import time
from pathlib import Path

from library_networks import NETWORKS
from networks.registry.compatibility import Outcome, run

PAGE = Path(__file__).parent / "compatibility.md"
START = "## Networks that work\n"
FAST = "at full speed"
SLOW = {
    "take one datum at a time": "Jacobians take one datum at a time",
    "two reverse passes are taken instead": "a product takes two reverse passes",
}


def way(outcome: Outcome) -> str:
    """How a network works, in words, or what failed."""
    if not outcome.works:
        return "**fails**: " + outcome.notices[-1].replace("|", "\\|").replace("\n", " ")
    said = " ".join(outcome.notices)
    return ", ".join(words for notice, words in SLOW.items() if notice in said) or FAST


def ways_of_page() -> dict[tuple[str, str], str]:
    """What the present page says of each network, by library and name."""
    ways: dict[tuple[str, str], str] = {}
    for line in PAGE.read_text().partition(START)[2].splitlines():
        if line.startswith("| ") and not line.startswith("| library"):
            library, names, said = (cell.strip() for cell in line.strip("|").split(" | ", 2))
            ways |= {(library, name): said for name in names.split(" · ")}
    return ways


def write(ways: dict[tuple[str, str], str]) -> None:
    """Writes the tables, in the order of `NETWORKS`; networks of a library that work alike share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for library, name, _ in NETWORKS:
        if (library, name) in ways:
            rows.setdefault((library, ways[library, name]), []).append(name)
    table = [f"| {library} | {' · '.join(names)} | {said} |" for (library, said), names in rows.items()]
    works = sum(not said.startswith("**fails**") for said in ways.values())
    end = ["", f"{works} of {len(ways)} work.", ""]
    text = PAGE.read_text().partition(START)[0]
    PAGE.write_text(text + "\n".join([START, "| library | networks | they work |", "|---|---|---|", *table, *end]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="libraries, or names of networks")
    parser.add_argument("--missing", action="store_true", help="only what is not in the page yet")
    args = parser.parse_args()
    ways = ways_of_page()
    for library, name, build in NETWORKS:
        if (args.only and not {library, name} & set(args.only)) or (args.missing and (library, name) in ways):
            continue
        started = time.perf_counter()
        outcome = run(library, name, build)
        print(f"{outcome.row()} {time.perf_counter() - started:.1f} s", flush=True)
        ways[library, name] = way(outcome)
        write(ways)


if __name__ == "__main__":
    main()
