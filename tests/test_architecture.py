"""The rules of the house: who may import whom, and how large things may grow."""

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "upcycle_core").rglob("*.py"))
PACKAGES = ("upcycle_core", "tasks", "flows", "infra", "benchmarks")
SOURCES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
KNOWN = frozenset(SOURCES)
PAPERS = ("dume", "symphony", "ders", "simoe")
ALLOWED = {
    "upcycle_core": {"upcycle_core"},
    "infra": {"infra", "upcycle_core"},
    "tasks": {"tasks", "infra", "upcycle_core"},
    "flows": {"flows", "tasks", "infra", "upcycle_core"},
}
ONLY_IN = {
    "ray": {
        "infra/cluster/answers.py",
        "infra/cluster/compute.py",
        "infra/cluster/connection.py",
        "infra/cluster/distributed.py",
        "infra/cluster/private.py",
        "infra/cluster/servers.py",
    },
    "mlflow": {
        "infra/readers/ask/ask_mlflow.py",
        "infra/tracking/descriptions.py",
        "infra/tracking/private.py",
        "infra/tracking/registry.py",
        "infra/tracking/renaming.py",
        "infra/tracking/retention.py",
        "infra/tracking/runs.py",
        "infra/tracking/served.py",
    },
    "dvc": {"infra/versioning/dvc_command.py"},
    "lm_eval": {
        "upcycle_core/evaluation/tasks/adapter.py",
        "upcycle_core/evaluation/tasks/tasks.py",
    },
}
# Names that start with an underscore, or that are no part's public face.
PRIVATE = re.compile(r"(ray|mlflow)(\.\w+)*\.(_\w*|v2)(\.|$)")
PRIVATE_IN = {
    "infra/cluster/private.py",
    "infra/cluster/servers.py",
    "infra/tracking/private.py",
}
# What is run as a command, in the only room that may.
COMMANDS = {"dvc": "infra/versioning/", "git": "infra/versioning/"}
DVC = {"str(COMMAND)": "dvc"}
"""How its command is written where it is run."""
LIBRARY_NEVER = {"prefect", "ray", "mlflow", "dvc", "pydantic", "yaml"}
# The harness's task definitions are YAML.
READS_YAML = "upcycle_core/evaluation/tasks/definitions.py"
# Files that lie beside weights: transformers finds what else to copy by relative imports alone.
COPIED = {
    str(file.relative_to(ROOT))
    for paper in ("ders", "simoe")
    for file in (ROOT / "upcycle_core" / paper / "model").glob(f"*_{paper}.py")
}
# Sections of a recipe that are one method's, and where it may be asked whether they are given.
METHOD_SECTIONS = ("symphony", "simoe", "compression")
METHODS_AT_HOME = (
    *(f"tasks/{method}/" for method in PAPERS),
    *(f"flows/{method}.py" for method in PAPERS),
    *(f"flows/making/{method}.py" for method in PAPERS),
    "tasks/methods.py",  # whether DeRS is asked for, which is no method but an addition
)
# Folders whose own folders are rooms.
FLOORS = ("flows", "infra", "tasks", "upcycle_core", "upcycle_core/evaluation")
LINES = 400
FUNCTION_LINES = 60


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(file: Path) -> set[str]:
    """Dotted names of every module that ``file`` imports, at the top or inside functions."""
    found = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level and name_of(file) in COPIED:
                found.add(f"{name_of(file.parent).replace('/', '.')}.{node.module}")
                continue
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module)
    return found


@cache
def imported_files(file: Path) -> dict[str, int]:
    """Files of ours that ``file`` imports, and where: inside functions and for type checkers too.

    A package that is imported for a module of it does not count: it holds its modules.
    """
    places: dict[str, int] = {}
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            candidates = [(ROOT / alias.name.replace(".", "/"), None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = file.parents[node.level - 1] if node.level else ROOT
            module = start / (node.module or "").replace(".", "/")
            candidates = [(module / alias.name, module) for alias in node.names]
        else:
            continue
        for paths in candidates:
            modules = [path.with_suffix(".py") for path in paths if path is not None]
            modules += [path / "__init__.py" for path in paths if path is not None]
            target = next((path for path in modules if path in KNOWN and path != file), None)
            if target is not None:
                places.setdefault(name_of(target), node.lineno)
    return places


def roots(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(file)}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_run_one_way(package):
    for file in (ROOT / package).rglob("*.py"):
        foreign = (roots(file) & set(PACKAGES)) - ALLOWED[package]
        assert not foreign, f"{name_of(file)} imports {foreign}"


def test_no_circle_of_files():
    try:
        TopologicalSorter({name_of(f): set(imported_files(f)) for f in SOURCES}).prepare()
    except CycleError as error:
        circle = error.args[1][::-1]
        pytest.fail(f"a circle of imports: {' -> '.join(circle)}", pytrace=False)


@pytest.mark.parametrize("floor", FLOORS)
def test_no_two_rooms_point_at_each_other(floor):
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file in SOURCES:
        for target, line in imported_files(file).items():
            rooms = (room_of(name_of(file), floor), room_of(target, floor))
            if None not in rooms and rooms[0] != rooms[1]:
                arrows[rooms].append(f"{name_of(file)}:{line} imports {target}")
    both_ways = [
        line
        for (here, there), lines in sorted(arrows.items())
        if (there, here) in arrows
        for line in (f"{floor}/{here} points at {floor}/{there} and back:", *lines)
    ]
    if both_ways:
        pytest.fail("\n".join(both_ways), pytrace=False)


@pytest.mark.parametrize("module", sorted(ONLY_IN))
def test_each_service_is_imported_in_one_place(module):
    users = {
        name_of(file)
        for file in SOURCES
        if module in roots(file) and not name_of(file).startswith("benchmarks")
    }
    assert users <= ONLY_IN[module]


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an expression that is one, or nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_private_names_of_services_are_in_one_place_each():
    for file in SOURCES:
        used = {dotted(node) for node in ast.walk(tree_of(file)) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
        found = sorted(filter(PRIVATE.match, used))
        assert not found or name_of(file) in PRIVATE_IN, f"{name_of(file)} names {found}"


def commands_in(file: Path) -> dict[str, int]:
    """Programs and modules that ``file`` starts, and where: the beginning of an argument list."""
    places = {}
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.List | ast.Tuple) and node.elts:
            words = [ast.unparse(word).strip("'\"") for word in node.elts]
            by_name = words[1:2] in (["-m"], ["-P"]) and len(words) > 2
            module = DVC.get(words[2], words[2]) if by_name else None
            places |= {words[0]: node.lineno} | ({module: node.lineno} if module else {})
        elif isinstance(node, ast.Call) and dotted(node.func) in {"os.system", "subprocess.run"}:
            text = ast.unparse(node.args[0]).strip("'\"") if node.args else ""
            places[text.split(" ")[0]] = node.lineno
    return places


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_is_called_in_one_room(command):
    callers = [
        f"{name_of(file)}:{commands_in(file)[command]}"
        for file in SOURCES
        if command in commands_in(file)
    ]
    assert callers, f"nobody calls {command}: this test looks for it in another way than it is run"
    assert all(caller.startswith(COMMANDS[command]) for caller in callers), callers


def room_of(name: str, floor: str) -> str | None:
    """The direct folder of ``floor`` that a file lies in, if it lies in one."""
    inside, _, file = name.removeprefix(f"{floor}/").partition("/")
    return inside if name.startswith(f"{floor}/") and file else None


def reads_environment(node: ast.AST) -> bool:
    """Also where the name is imported by itself, or ``os`` by another."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(a.name in {"environ", "getenv"} for a in node.names)
    if isinstance(node, ast.Import):
        return any(a.name == "os" and a.asname for a in node.names)
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
            for node in ast.walk(tree_of(file))
            if (isinstance(node, ast.Name) and node.id == "print") or reads_environment(node)
        ]
        assert not calls, f"{name_of(file)}:{calls[0].lineno}"


@pytest.mark.parametrize(
    "line", ["os.environ", "os.getenv(name)", "from os import environ", "import os as system"]
)
def test_a_reader_of_the_environment_is_recognised(line):
    assert any(reads_environment(node) for node in ast.walk(ast.parse(line)))
    assert not any(reads_environment(node) for node in ast.walk(ast.parse("from os import fsync")))


def test_only_settings_read_the_environment():
    for file in SOURCES:
        readers = [n for n in ast.walk(tree_of(file)) if reads_environment(n)]
        allowed = name_of(file) == "infra/settings.py" or name_of(file).startswith("benchmarks")
        assert allowed or not readers, name_of(file)


def test_papers_do_not_import_each_other():
    for paper in PAPERS:
        for file in (ROOT / "upcycle_core" / paper).rglob("*.py"):
            others = {f"upcycle_core.{other}" for other in PAPERS if other != paper}
            crossing = [name for name in imports(file) if name.startswith(tuple(others))]
            assert not crossing, name_of(file)


def test_methods_are_asked_for_at_home_alone():
    """Whoever else needs to know what a method does reads it from ``METHODS``."""
    for file in (f for f in SOURCES if name_of(f).startswith(("infra/", "tasks/", "flows/"))):
        if name_of(file).startswith(METHODS_AT_HOME):
            continue
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Compare):
                asked = {dotted(part).rpartition(".")[2] for part in (node.left, *node.comparators)}
                names = {*METHOD_SECTIONS} & asked
                if dotted(node.left).endswith("recipe.method") and not is_membership(node):
                    names.add("method")
                assert not names, f"{name_of(file)}:{node.lineno} asks for {names}"


def is_membership(node: ast.Compare) -> bool:
    return all(isinstance(kind, ast.In | ast.NotIn) for kind in node.ops)


def test_files_and_functions_stay_small():
    for file in SOURCES:
        assert len(file.read_text().splitlines()) <= LINES, name_of(file)
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= FUNCTION_LINES, f"{name_of(file)}:{node.lineno} {node.name}"


def test_no_file_is_named_after_a_dependency():
    names = {"datasets", "ray", "mlflow", "prefect", "dvc", "torch", "transformers", "tokenizers"}
    ours = {path.name.removesuffix(".py") for path in ROOT.iterdir()}
    assert not names & ours
