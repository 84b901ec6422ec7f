"""Pages of the documentation's site that no file of docs/ holds: the README's, notebooks', and one a room of the code.

mkdocs.yml names this file under ``hooks``. A room is a package below ``mofa``, whose page shows all its public names; a
new one gets its page without being listed anywhere.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "reference"
"""Where the pages of the rooms are on the site."""
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files at the top of the repository to the pages that show them."""


def rooms() -> dict[str, list[str]]:
    """Packages below ``mofa`` to the modules directly in them, by dotted names; ``mofa`` itself has the lone modules.

    >>> "mofa.units" in rooms()["mofa"]
    True
    >>> "mofa.cost.kernels.collectives" in rooms()["mofa.cost.kernels"]
    True
    """
    packages: dict[str, list[str]] = {}
    for path in sorted((ROOT / "mofa").rglob("*.py")):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.name == "__init__.py":
            packages.setdefault(dotted.removesuffix(".__init__"), [])
        else:
            packages.setdefault(dotted.rpartition(".")[0], []).append(dotted)
    return packages


def public_names() -> dict[str, str]:
    """What ``import mofa`` offers, to the modules that hold it: the imports that ``mofa/__init__.py`` shows checkers.

    >>> public_names()["find_plans"]
    'mofa.search.entry_points'
    """
    tree = ast.parse((ROOT / "mofa" / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: node.module
        for node in imports
        if node.module is not None and node.module.startswith("mofa.")
        for alias in node.names
    }


def room_page(package: str, modules: list[str]) -> str:
    """Markdown of a room's page: what the package says of itself, then its modules."""
    own = [f"::: {package}\n    options: {{members: false}}"]
    if package == "mofa":
        links = (f"- [`mofa.{name}`][{home}.{name}]" for name, home in sorted(public_names().items()))
        own = ["# mofa", "What `import mofa` offers:", "\n".join(links)]
    return "\n\n".join([*own, *(f"::: {name}" for name in modules)]) + "\n"


def notebooks() -> list[Path]:
    """The notebooks, in order of their names."""
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def notebook_page(path: Path) -> str:
    """Markdown of a notebook as a page: its text, and its code in fences; outputs are made where it runs.

    >>> notebook_page(ROOT / "notebooks" / "first_plan.ipynb").splitlines()[0]
    '# A first plan'
    """
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"]).strip()
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def page_of_top_file(text: str) -> str:
    """Markdown of a file at the top of the repository as a page: its links to docs/ and to its neighbours hold.

    What lies elsewhere in the repository is no part of the site; its name stays, without a link.

    >>> page_of_top_file("[JSON](docs/json.md), [changes](CHANGELOG.md), [first](notebooks/first.ipynb)")
    '[JSON](json.md), [changes](changelog.md), first'
    """

    def moved(link: re.Match[str]) -> str:
        shown, target = link.group(1), link.group(2)
        if target.startswith(("http:", "https:", "#")):
            return link.group()
        if target in TOP:
            return f"[{shown}]({TOP[target]})"
        return f"[{shown}]({target.removeprefix('docs/')})" if target.startswith("docs/") else shown

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", moved, text)


def on_config(config: Any) -> Any:
    """Append the notebooks and the pages of the rooms to the navigation that mkdocs.yml has."""
    titles = {path: notebook_page(path).splitlines()[0].removeprefix("# ") for path in notebooks()}
    config.nav.append({"Notebooks": [{title: f"notebooks/{path.stem}.md"} for path, title in titles.items()]})
    config.nav.append({"Code": [{name: f"{FOLDER}/{name}.md"} for name in rooms()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the top files, of the notebooks and of the rooms to the site's files."""
    from mkdocs.structure.files import File

    for name, page in TOP.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=page_of_top_file(text)))
    for path in notebooks():
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook_page(path)))
    for name, modules in rooms().items():
        files.append(File.generated(config, f"{FOLDER}/{name}.md", content=room_page(name, modules)))
    return files
