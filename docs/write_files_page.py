"""Write docs/files.md, every file of the package with its own first sentence: `python docs/write_files_page.py`."""

import ast
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "files.md"
HEAD = """# Every file, in the order of imports

A file may import only files above it: `tests/test_layers.py` holds this list, [architecture.md](architecture.md) says
why. Each line is the first sentence of the file itself; this page is written by `python docs/write_files_page.py`.

| file | |
|---|---|
"""


def files_page() -> str:
    """The whole page."""
    order = runpy.run_path(str(ROOT / "tests" / "test_layers.py"))["ORDER"]
    return HEAD + "".join(f"| `{name.replace('.', '/')}.py` | {first_sentence(name)} |\n" for name in order)


def first_sentence(module: str) -> str:
    """The first line of a module's docstring, made safe for a table."""
    text = (ROOT / "crosstune").joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    lines = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].splitlines()
    return " ".join(lines).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(files_page(), encoding="utf-8")
