"""What we use of MLflow and Ray beyond their public interface is still there.

Read from the sources: a module whose imports an upgrade has broken cannot be imported.
"""

import ast
import pkgutil
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from infra.cluster.worker import TRAIN_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "infra/tracking/private.py": "mlflow",
    "infra/cluster/private.py": "ray",
    "infra/cluster/servers.py": "ray",
    "infra/versioning/dvc_command.py": "dvc",
}
"""{module of ours: whose names it uses}."""
MODULES = sorted(PACKAGES)
TESTS = {
    "dvc": "tests/infra/versioning",
    "mlflow": "tests/infra/tracking",
    "ray": "tests/infra/cluster",
}
REMEDY = """
{package} {version} has no {name} any more ({error}).
{module} uses it for this: {use}.
Find what does that in {package} {version}, change {module} and its USES, and run {tests}.
Until then hold the version back: the bounds of {package} in pyproject.toml and constraints.txt.
"""


def tree_of(module):
    return ast.parse((ROOT / module).read_text())


def uses_of(module):
    """USES as it is written, its sentences with names in them resolved."""
    constants = {
        node.targets[0].id: node.value
        for node in tree_of(module).body
        if isinstance(node, ast.Assign)
    }
    table = constants["USES"]
    uses = [constants[v.id] if isinstance(v, ast.Name) else v for v in table.values]
    return dict(zip(map(ast.literal_eval, table.keys), map(ast.literal_eval, uses), strict=True))


NAMES = [
    pytest.param(module, name, use, id=name.split(":")[-1])
    for module in MODULES
    for name, use in uses_of(module).items()
]


def check(module, name, use):
    package = PACKAGES[module]
    try:
        pkgutil.resolve_name(name.replace(":", "."))  # it may be a module
    except (ImportError, AttributeError) as error:
        facts = {"package": package, "name": name, "use": use, "error": error}
        facts |= {"version": version(package), "module": module, "tests": TESTS[package]}
        pytest.fail(REMEDY.format(**facts), pytrace=False)


@pytest.mark.parametrize(("module", "name", "use"), NAMES)
def test_a_private_name_is_still_there(module, name, use):
    check(module, name, use)


def test_a_name_that_is_gone_is_told_with_its_use_and_its_remedy():
    gone = "ray.train.v2._internal.exceptions:Gone"
    with pytest.raises(pytest.fail.Exception) as told:
        check("infra/cluster/private.py", gone, "tells a killed worker")
    for words in ("Gone", "infra/cluster/private.py", "tells a killed worker", "pyproject.toml"):
        assert words in str(told.value)


@pytest.mark.parametrize("module", MODULES)
def test_what_is_imported_there_says_what_it_is_for(module):
    imported = {
        f"{node.module}:{alias.name}"
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == PACKAGES[module]
        for alias in node.names
    }
    public = {"ray.train.torch:TorchConfig"}
    assert imported - public <= set(uses_of(module))


@pytest.mark.parametrize("module", MODULES)
def test_they_were_checked_with_the_version_that_is_pinned(module):
    """Whoever moves the pin looks at the private names again, and says so there."""
    package = PACKAGES[module]
    [checked] = re.findall(r"Checked with \w+ (\d+)\.(\d+)\.", ast.get_docstring(tree_of(module)))
    major, minor = map(int, checked)
    constraints = (ROOT / "constraints.txt").read_text()
    assert re.search(rf"(?m)^{package}=={major}\.{minor}\.", constraints), (
        f"{module} was checked with {package} {major}.{minor}, constraints.txt pins "
        f"another: run {TESTS[package]} with it, then say so in that module's docstring"
    )
    bounds = f">={major}.{minor},<{major}.{minor + 1}"
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert re.findall(rf'"{package}(?:\[\w+\])?(>=[^"]*)"', pyproject) == [bounds]


def test_ray_train_knows_the_variables_that_we_set():
    from ray.train import constants
    from ray.train.v2._internal import constants as private

    values = [value for module in (constants, private) for value in vars(module).values()]
    known = {value for value in values if isinstance(value, str)}
    unknown = set(TRAIN_ENVIRONMENT) - known
    assert not unknown, (
        f"infra/cluster/worker.py sets {unknown}, which Ray {version('ray')} ignores"
    )
