"""A hook of MkDocs: it generates pages of the API and of notebooks, and pictures, and checks what pages name.

- `api/index.md` documents the names that `laplace_sampling/__init__.py` imports, under their public path.
- Each module of `MODULES`, which needs another library, has a page of its own.
- `[text][Name]` and `[text][Name.attribute]` lead to a public class or function wherever it is defined. Of one that is
  not public the text alone stays.
- A name or a path in backticks, such as `laplace_sampling/laplace.py`, that does not exist is a warning, and so an
  error of `mkdocs build --strict`.
- Pictures of `plots.md` are drawn by the examples on that page (`page_pictures.py`).
- A page `gallery/name.md` that has a block of `python` shows `images/gallery/name.png`, which this script draws, and
  what it prints below it. Scripts run while the site is built.
- Each of `notebooks/` becomes a page, without outputs, and a link at the end of `gallery/index.md`.
- Formulas, `$…$` in LaTeX, become MathML, which browsers set without a script.
"""

import ast
import html
import json
import logging
import re
from functools import cache
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from page_pictures import pictures_of, run_script, script_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "laplace_sampling"
MODULES = {
    "Plots": "plots/pictures.py",
    "Plots of what one does with predictions": "plots/decisions.py",
    "Plots of fits and scores": "plots/fits.py",
    "Where to measure next": "design.py",
    "GPyTorch": "gp/tangent_kernel.py",
    "BoTorch": "gp/botorch.py",
    "Kernels at scale": "kernels/conditioned.py",
    "Kernels at scale: hyperparameters": "kernels/tuning.py",
    "Kernels at scale: BoTorch": "kernels/botorch.py",
    "Kernels at scale: samples as functions": "kernels/paths.py",
    "Tanimoto kernel": "kernels/tanimoto.py",
    **{path.stem: f"integrations/{path.name}" for path in sorted((PACKAGE / "integrations").glob("[a-z]*.py"))},
}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
INDEX = """# Public names

Everything on this page is imported from `laplace_sampling`. Names that need other libraries have pages of their own:
kernels for GPyTorch, a model for BoTorch, [plots](../plots.md), and callbacks and estimators. Modules that are on none
of these pages may change between minor versions; [Design](../design.md) describes them.
"""

log = logging.getLogger("mkdocs.plugins.api_pages")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def page_of(module: str) -> str:
    return f"api/{Path(module).with_suffix('').as_posix()}.md"


@cache
def public_names() -> dict[str, list[str]]:
    """Names that the package imports, by the module that defines them."""
    names: dict[str, list[str]] = {}
    for node in ast.walk(tree(PACKAGE / "__init__.py")):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laplace_sampling."):
            names.setdefault(str(node.module), []).extend(alias.name for alias in node.names)
    return names


@cache
def definitions() -> dict[str, str | None]:
    """The documented path of each class and function of the package by its name; `None` for those without a page."""
    shown = {name: f"laplace_sampling.{name}" for names in public_names().values() for name in names}
    paths: dict[str, str | None] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        has_page = path.relative_to(PACKAGE).as_posix() in MODULES.values()
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                paths[node.name] = f"{dotted(path)}.{node.name}" if has_page else paths.get(node.name)
    return paths | shown


def index_page() -> str:
    """The public names: first those of the front, then those of each room in the order of the package's imports."""
    by_room: dict[str, list[str]] = {"front": []}
    for source, names in public_names().items():
        _, *parts = source.split(".")
        by_room.setdefault(parts[0] if len(parts) > 1 else "front", []).extend(names)
    parts = [INDEX]
    for room, names in by_room.items():
        parts.append(f"## {room.upper() if len(room) == 2 else room.replace('_', ' ').capitalize()}\n")
        # What a prediction or a fit offers is in part defined in its base classes.
        parts += [
            f"::: laplace_sampling.{name}\n    options:\n      heading_level: 3\n"
            f"      inherited_members: {str(room in ('predictions', 'front')).lower()}\n"
            for name in names
        ]
    return "\n".join(parts)


def module_page(title: str, module: str) -> str:
    name = dotted(PACKAGE / module)
    return (
        f"# {title}\n\n::: {name}\n    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"
        f"      filters: {['!^_', *(f'!^{public}$' for public in public_names().get(name, []))]}\n"
    )


def notebook_page(notebook: Path) -> str:
    """The cells of a notebook, with a link to the file after its title."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, f"[The notebook]({notebook.name}), here without outputs.", rest.strip(), *parts[1:]])


def on_pre_build(config: MkDocsConfig) -> None:
    for function in (tree, public_names, definitions):  # `mkdocs serve` builds many times in one process
        function.cache_clear()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages into the section `API` of the navigation, which is within another one."""
    for section in config.nav or []:
        for entry in (entry for entries in section.values() if isinstance(entries, list) for entry in entries):
            if isinstance(entry, dict) and "API" in entry:
                entry["API"] = ["api/index.md", *({title: page_of(module)} for title, module in MODULES.items())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "api/index.md", content=index_page()))
    for title, module in MODULES.items():
        files.append(File.generated(config, page_of(module), content=module_page(title, module)))
    for path, picture in pictures_of(ROOT / "docs" / "plots.md").items():
        files.append(File.generated(config, path, content=picture))
    for page in sorted((ROOT / "docs" / "gallery").glob("*.md")):
        if script := script_of(page.read_text()):
            picture, _ = run_script(script)
            files.append(File.generated(config, f"images/gallery/{page.stem}.png", content=picture))
    for notebook in NOTEBOOKS:
        path = f"notebooks/{notebook.name}"
        files.append(File.generated(config, path, abs_src_path=str(notebook)))
        text = notebook_page(notebook)
        path = path.replace(".ipynb", ".md")
        files.append(File.generated(config, path, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolve links to names of the package, and check paths of its files."""

    def link(match: re.Match[str]) -> str:
        text, full, attribute = match[1], match[2], match[3] or ""
        name = full.rpartition(".")[2]
        if name not in definitions():
            log.warning("%s: nothing is called %s.", page.file.src_uri, full)
        path = definitions().get(name)
        return f"[{text}][{path}{attribute}]" if path else text

    if page.file.src_uri == "gallery/index.md":
        titles = {notebook: notebook_page(notebook).partition("\n")[0].lstrip("# ") for notebook in NOTEBOOKS}
        links = [f"- [{title}](../notebooks/{notebook.stem}.md)" for notebook, title in titles.items()]
        markdown = "\n".join([markdown, "", *links, ""])
    elif page.file.src_uri.startswith("gallery/") and (script := script_of(markdown)):
        _, printed = run_script(script)
        markdown += f"\n\nIt prints:\n\n```text\n{printed}```\n" if printed else ""
    for path in re.findall(r"(?<!\[)`(laplace_sampling/[\w/]*(?:\.py)?)`", markdown):
        if not (ROOT / path).exists():
            log.warning("%s: `%s` is no file or folder of the package.", page.file.src_uri, path)
    return re.sub(r"\[([^\[\]]+)\]\[((?:laplace_sampling(?:\.[a-z_]\w*)*\.)?\w+)((?:\.\w+)+)?\]", link, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    r"""Set the formulas, which `pymdownx.arithmatex` leaves between `\(` and `\)`."""
    formula = r'<span class="arithmatex">\\\((.*?)\\\)</span>'
    return re.sub(formula, lambda match: convert(html.unescape(match[1])), content)
