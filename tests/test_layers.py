"""The list is the architecture: a file may import only files above it."""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ORDER = """
    errors store.files store.secrets interrupt units recipe.yaml_text recipe.options recipe.mistakes recipe.sections recipe.recipe progress
    stats.intervals stats.bootstrap stats.comparison stats.curve metrics.text metrics.choice sweep.axes sweep.sweep sweep.pruning sweep.search results.compare results.suspects
    data.rows data.lines data.json_file data.table_file data.files data.turns data.one_object data.shapes data.load
    data.control data.turn_ends data.template data.render data.encode data.gguf_once data.tokenizer data.token_cache data.token_faults data.tokens data.batches data.flat data.questions
    splits.fold_units splits.leaks splits.splits
    memory.shape memory.gpus memory.precision memory.visible memory.block memory.estimate memory.layout memory.speed memory.allocator memory.replay memory.widths memory.spare memory.peaks memory.ways memory.plan memory.config memory.picture memory.explain
    data.lint.fault data.lint.faults_file data.lint.faults_rows data.lint.faults_tokens data.lint.faults_template data.lint.faults_folds data.lint.faults_settings
    data.lint.catalogue data.lint.turns data.lint.text data.lint.marks data.lint.kept data.lint.duplicates data.lint.lengths
    data.lint.balance data.lint.embedding data.lint.base data.lint.settings data.lint.folds data.lint.report data.lint.rowpass
    data.lint.tokenpass data.lint.onepass
    store.journal store.lock store.same store.state store.writers store.tables store.run results.scores results.review
    model.device model.triton_kernels model.triton_nf4 model.triton_head model.elementwise model.lanes model.lora model.repeatable model.attention model.packed model.decoder model.spread model.base model.shards model.initial model.frozen_int8 model.frozen model.bundle model.block model.launches model.warm model.fuse model.targets model.attach model.head
    train.lane train.recover train.events train.optimizer train.spread_optimizer train.cutting train.step train.ahead train.graph train.evaluate train.generate train.choice train.exam train.checkpoint train.state train.trace train.kernels train.quantized train.drill train.rehearse train.fault train.split train.once train.room train.wave train.run_wave
    workers.waves workers.local workers.worker workers.cluster workers.ray workers.examine workers.schedule
    export.folder export.card export.weights export.turns export.serve export.adapter export.changes export.saved export.merger
    export.companions export.verify export.quantize export.origin export.merge export.answer export.gguf_tokens export.gguf export.average
    recipe.asked record results.result report.chart report.report inputs resources crossval nested fitting.fitted fitting.task fitting.record fitting.fit deploy report.table report.score_table report.ranking_table doctor demo_model demo init
    verbs.words verbs.train verbs.look verbs.deploy cli
""".split()  # noqa: SIM905
NEEDS_TORCH = ("model", "train", "workers", "export", "record", "fitting.record")
PACKAGE = Path(__file__).parent.parent / "crosstune"
FILES = {".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in PACKAGE.rglob("*.py") if p.name[:2] != "__"}


def imported(module):
    """Every crosstune module that `module` imports, inside functions too: 'data.load', or 'stats' for its __init__."""
    tree = ast.parse(PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "crosstune":
                yield longest_module(rest)


def longest_module(name):
    """'recipe.Data' → 'recipe'; 'stats.Interval' → 'stats'; '__version__' → ''."""
    while name and name not in FILES and not PACKAGE.joinpath(*name.split(".")).is_dir():
        name = name.rpartition(".")[0]
    return name


def place(module):
    """Where `module` stands; a package's __init__ stands where its last file does."""
    return max(at for at, name in enumerate(ORDER) if name == module or name.startswith(f"{module}."))


def test_the_list_names_every_file():
    assert sorted(ORDER) == sorted(set(ORDER)), "a file is listed twice"
    assert set(ORDER) == FILES, "list the new file at its place in ORDER, or take the old one out"


@pytest.mark.parametrize("module", sorted(FILES & set(ORDER)))
def test_a_file_imports_only_files_above_it(module):
    below = [name for name in imported(module) if name and place(name) >= place(module)]
    assert not below, f"{module} imports {below}"


def test_half_of_the_package_never_loads_torch():
    free = [module for module in FILES if not {module, module.split(".")[0]} & set(NEEDS_TORCH)]
    code = "; ".join(f"import crosstune.{m}" for m in sorted(free))
    code += "; import sys; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_help_loads_neither_torch_nor_the_recipe():
    code = "from crosstune.cli import main; main(['--help']); import sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy", "pydantic", "rich"} & set(done.stderr.split())


def test_public_names_are_sorted_complete_and_lazy():
    import crosstune

    assert crosstune.__all__ == sorted(crosstune.__all__) == sorted(crosstune._HOMES)
    assert all(crosstune.__getattr__(name).__module__.startswith("crosstune.") for name in crosstune.__all__)


def test_the_readme_names_every_file_beside_its_folders():
    tree = (PACKAGE.parent / "README.md").read_text(encoding="utf-8").partition("## The tree")[2]
    beside = {name for name in FILES if "." not in name}
    assert not {name for name in beside if f"{name}.py" not in tree} - {"interrupt", "units", "record", "resources"}
    assert not {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists() and f"{p.name}/" not in tree}


def test_the_page_of_files_is_current():
    page = runpy.run_path(str(PACKAGE.parent / "docs" / "write_files_page.py"))["files_page"]()
    written = (PACKAGE.parent / "docs" / "files.md").read_text(encoding="utf-8")
    assert written == page, "python docs/write_files_page.py"
