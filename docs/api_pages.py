"""A hook of MkDocs: it generates the pages of the API and the pictures of plots, and resolves links to names and files.

Pages, so that no list of modules is kept by hand:

- `api/index.md` documents the public names, those that `laplace_sampling/__init__.py` imports, under their public path.
- Every folder has a page with the docstring of its `__init__` and a table of its modules.
- Every module has a page with the names that are not public. A name is documented once, since its links would be
  ambiguous otherwise.

Links, so that a page need not change when a name moves to another module:

- `[text][Name]` and `[text][Name.attribute]` lead to a class or function of the package wherever it is defined.
- A path in backticks, such as `laplace_sampling/laplace.py` or `laplace_sampling/solvers/`, leads to the page of that
  file or folder. A path that does not exist is a warning, and so an error of `mkdocs build --strict`.

Pictures of `plots.md` are drawn by the examples on that page (`page_pictures.py`).

This is a hook because the plugins for it, mkdocs-gen-files and mkdocs-literate-nav, now install a fork of MkDocs.
"""

import ast
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from page_pictures import pictures_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "laplace_sampling"
INDEX = """# Public names

Everything on this page is imported from `laplace_sampling`. The other pages of this section are the modules behind it.
You can build on them, but they may change between minor versions.

Names that need other libraries are imported from their modules: [`TangentKernel`][TangentKernel],
[`TangentGP`][TangentGP] and [`NetworkMean`][NetworkMean] for GPyTorch, [`TangentSurrogate`][TangentSurrogate] for
BoTorch, [plots](../plots.md) from `laplace_sampling/plots/`, and callbacks and estimators for other libraries from
`laplace_sampling/integrations/`.
"""

log = logging.getLogger("mkdocs.plugins.api_pages")


def modules(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]


def folders(folder: Path) -> list[Path]:
    """Its packages, lowest first: by how many of their neighbours each imports, also by way of others."""
    packages = {path.parent.name: path.parent for path in sorted(folder.glob("*/__init__.py"))}
    below = {name: imported(path, folder) for name, path in packages.items()}
    for _ in packages:
        below = {name: direct.union(*(below.get(other, set()) for other in direct)) for name, direct in below.items()}
    return [packages[name] for name in sorted(packages, key=lambda name: (len(below[name] - {name}), name))]


def imported(package: Path, folder: Path) -> set[str]:
    """The first names below `folder` of what the files of a package import."""
    prefix = dotted(folder) + "."
    nodes = [node for path in package.rglob("*.py") for node in ast.walk(tree(path))]
    sources = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {source.removeprefix(prefix).split(".")[0] for source in sources if source.startswith(prefix)}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def page_of(path: Path) -> str:
    """The page of a module or a folder, in the folder of the documentation."""
    path = path.parent if path.name == "__init__.py" else path
    if path == PACKAGE:
        return "api/index.md"
    name = path.relative_to(PACKAGE).as_posix()
    return f"api/{name}/index.md" if path.is_dir() else f"api/{name.removesuffix('.py')}.md"


@cache
def public_names() -> dict[str, list[str]]:
    """Names that the package imports, by the module that defines them."""
    names: dict[str, list[str]] = {}
    for node in ast.walk(tree(PACKAGE / "__init__.py")):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laplace_sampling."):
            names.setdefault(str(node.module), []).extend(alias.name for alias in node.names)
    return names


@cache
def definitions() -> dict[str, list[str]]:
    """Full names of the classes and functions of the package by their last part; public ones by their public path."""
    public = {name for names in public_names().values() for name in names}
    paths = {name: [f"laplace_sampling.{name}"] for name in public}
    for path in PACKAGE.rglob("*.py"):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name not in public:
                paths.setdefault(node.name, []).append(f"{dotted(path)}.{node.name}")
    return paths


def index_page() -> str:
    """The public names: first those of the front, then those of each room."""
    by_room: dict[str, list[str]] = {}
    for source, names in public_names().items():
        _, *parts = source.split(".")
        by_room.setdefault(parts[0] if len(parts) > 1 else "front", []).extend(names)
    parts = [INDEX]
    for room in sorted(by_room, key=["front", *(folder.name for folder in folders(PACKAGE))].index):
        parts.append(f"## {room.upper() if len(room) == 2 else room.replace('_', ' ').capitalize()}\n")
        # What a prediction offers is mostly defined in its base classes.
        inherited = str(room == "predictions").lower()
        parts += [
            f"::: laplace_sampling.{name}\n    options:\n      heading_level: 3\n      inherited_members: {inherited}\n"
            for name in by_room[room]
        ]
    return "\n".join(parts)


def module_page(path: Path) -> str:
    name = dotted(path)
    public = public_names().get(name, [])
    filters = ["!^_", *([f"!^({'|'.join(public)})$"] if public else [])]
    links = ", ".join(f"[`{n}`][laplace_sampling.{n}]" for n in public)
    return (
        f"# `{path.stem}`\n\n`{path.relative_to(ROOT)}`\n\n::: {name}\n    options:\n      show_root_heading: false\n"
        f"      show_root_toc_entry: false\n      filters: {filters}\n"
        + (f"\nThe page of public names documents {links}.\n" if public else "")
    )


def folder_page(folder: Path) -> str:
    """The docstring of a folder, and a table of what it holds with the first paragraph of each docstring."""

    def row(path: Path, target: str) -> str:
        docstring = ast.get_docstring(tree(path)) or ""
        summary = " ".join(docstring.split("\n\n")[0].split()).replace("|", "&#124;")
        return f"| [`{target.partition('/')[0].removesuffix('.md')}`]({target}) | {summary} |"

    rows = [row(path, f"{path.stem}.md") for path in modules(folder)]
    rows += [row(below / "__init__.py", f"{below.name}/index.md") for below in folders(folder)]
    docstring = ast.get_docstring(tree(folder / "__init__.py")) or ""
    return "\n".join([f"# `{folder.name}`", "", docstring, "", "| module | holds |", "|---|---|", *rows, ""])


def pages(folder: Path = PACKAGE) -> Iterator[tuple[str, str]]:
    """Path and text of every page of the API."""
    yield page_of(folder), index_page() if folder == PACKAGE else folder_page(folder)
    yield from ((page_of(path), module_page(path)) for path in modules(folder))
    for below in folders(folder):
        yield from pages(below)


def navigation(folder: Path = PACKAGE) -> list[str | dict[str, str | list]]:
    return [
        page_of(folder),
        *({path.stem: page_of(path)} for path in modules(folder)),
        *({below.name: navigation(below)} for below in folders(folder)),
    ]


def on_pre_build(config: MkDocsConfig) -> None:
    for function in (tree, public_names, definitions):  # `mkdocs serve` builds many times in one process
        function.cache_clear()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages into the sections `API` and `Decisions` of the navigation."""
    for entry in config.nav or []:
        if isinstance(entry, dict) and "API" in entry:
            entry["API"] = navigation()
        if isinstance(entry, dict) and "Decisions" in entry:
            names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
            entry["Decisions"] = [f"decisions/{name}" for name in sorted(names, key=lambda name: name != "index.md")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    for path, picture in pictures_of(ROOT / "docs" / "plots.md").items():
        files.append(File.generated(config, path, content=picture))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolve links to names of the package, and to its files."""

    def name_link(match: re.Match[str]) -> str:
        paths = definitions().get(match[1], [])
        if len(paths) > 1:
            log.warning("%s: %s may be any of %s.", page.file.src_uri, match[1], ", ".join(paths))
        return f"][{paths[0]}{match[2] or ''}]" if paths else match[0]

    def file_link(match: re.Match[str]) -> str:
        path = ROOT / match[1]
        target = files.get_file_from_path(page_of(path)) if path.exists() else None
        if target is None:
            log.warning("%s: `%s` is no file or folder of the package.", page.file.src_uri, match[1])
            return match[0]
        link = get_relative_url(target.src_uri, page.file.src_uri)
        return match[0] if target is page.file else f"[`{match[1]}`]({link})"

    markdown = re.sub(r"\]\[(\w+)((?:\.\w+)+)?\]", name_link, markdown)
    return re.sub(r"(?<!\[)`(laplace_sampling/[\w/]*(?:\.py)?)`", file_link, markdown)
