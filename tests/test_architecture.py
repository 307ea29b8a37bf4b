"""The rules of the house: who may import whom, and how large things may grow."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "upcycle_core").rglob("*.py"))
PACKAGES = ("upcycle_core", "tasks", "flows", "infra", "benchmarks")
SOURCES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
PAPERS = ("dume", "symphony", "ders", "simoe")
ALLOWED = {
    "upcycle_core": {"upcycle_core"},
    "infra": {"infra", "upcycle_core"},
    "tasks": {"tasks", "infra", "upcycle_core"},
    "flows": {"flows", "tasks", "infra", "upcycle_core"},
}
ONLY_IN = {
    "ray": {"infra/cluster/compute.py", "infra/cluster/distributed.py"},
    "mlflow": {
        "infra/tracking/runs.py",
        "infra/tracking/registry.py",
        "infra/tracking/retention.py",
    },
    "dvc": {"infra/versioning/versions.py"},
    "lm_eval": {
        "upcycle_core/evaluation/tasks/adapter.py",
        "upcycle_core/evaluation/tasks/tasks.py",
    },
}
LIBRARY_NEVER = {"prefect", "ray", "mlflow", "dvc", "pydantic", "yaml"}
# The harness's task definitions are YAML.
READS_YAML = "upcycle_core/evaluation/tasks/definitions.py"
# Files that lie beside weights: transformers finds what else to copy by relative imports alone.
COPIED = {
    str(file.relative_to(ROOT))
    for paper in ("ders", "simoe")
    for file in (ROOT / "upcycle_core" / paper / "model").glob(f"*_{paper}.py")
}
LINES = 400
FUNCTION_LINES = 60


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def imports(file: Path) -> set[str]:
    """Dotted names of every module that ``file`` imports, at the top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level and name_of(file) in COPIED:
                found.add(f"{name_of(file.parent).replace('/', '.')}.{node.module}")
                continue
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module)
    return found


def roots(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(file)}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_run_one_way(package):
    for file in (ROOT / package).rglob("*.py"):
        foreign = (roots(file) & set(PACKAGES)) - ALLOWED[package]
        assert not foreign, f"{name_of(file)} imports {foreign}"


@pytest.mark.parametrize("module", sorted(ONLY_IN))
def test_each_service_is_imported_in_one_place(module):
    users = {
        name_of(file)
        for file in SOURCES
        if module in roots(file) and not name_of(file).startswith("benchmarks")
    }
    assert users <= ONLY_IN[module]


def reads_environment(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("os", "environ"), ("os", "getenv")}
    )


def test_library_knows_no_service_and_no_environment():
    for file in LIBRARY:
        allowed = {"yaml"} if name_of(file) == READS_YAML else set()
        assert not roots(file) & LIBRARY_NEVER - allowed, name_of(file)
        calls = [
            node
            for node in ast.walk(ast.parse(file.read_text()))
            if (isinstance(node, ast.Name) and node.id == "print") or reads_environment(node)
        ]
        assert not calls, f"{name_of(file)}:{calls[0].lineno}"


def test_only_settings_read_the_environment():
    for file in SOURCES:
        readers = [n for n in ast.walk(ast.parse(file.read_text())) if reads_environment(n)]
        allowed = name_of(file) == "infra/settings.py" or name_of(file).startswith("benchmarks")
        assert allowed or not readers, name_of(file)


def test_papers_do_not_import_each_other():
    for paper in PAPERS:
        for file in (ROOT / "upcycle_core" / paper).rglob("*.py"):
            others = {f"upcycle_core.{other}" for other in PAPERS if other != paper}
            crossing = [name for name in imports(file) if name.startswith(tuple(others))]
            assert not crossing, name_of(file)


def test_files_and_functions_stay_small():
    for file in SOURCES:
        text = file.read_text()
        assert len(text.splitlines()) <= LINES, name_of(file)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= FUNCTION_LINES, f"{name_of(file)}:{node.lineno} {node.name}"


def test_no_file_is_named_after_a_dependency():
    names = {"datasets", "ray", "mlflow", "prefect", "dvc", "torch", "transformers", "tokenizers"}
    ours = {path.name.removesuffix(".py") for path in ROOT.iterdir()}
    assert not names & ours
