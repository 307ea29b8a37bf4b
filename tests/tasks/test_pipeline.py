"""dvc.yaml and the fingerprints say the same, and leave nothing out."""

import ast
import re
from dataclasses import replace

import pytest
import yaml

from infra.lineage import Lineage
from infra.reading import load_recipe
from tasks.pipeline import ORDER, dvc_yaml, params_yaml
from tasks.stage import CODE, Session
from tasks.workspace import Workspace

RECIPE = load_recipe(
    CODE / "recipes" / "demo.yaml",
    ["comparison.tokens=2252800"],
    added=[
        CODE / "recipes" / name for name in ("baselines.yaml", "tasks.yaml", "compression.yaml")
    ],
)
STRANGERS = load_recipe(
    CODE / "recipes" / "symphony.yaml",
    ["outside.manual={harvest: documentation-elsewhere}", "similarity={tokens: 1000}"],
    added=[CODE / "recipes" / name for name in ("ablations.yaml", "bam.yaml", "tasks.yaml")],
)
TUNED = load_recipe(
    CODE / "recipes" / "simoe.yaml",
    added=[CODE / "recipes" / f"simoe-{name}.yaml" for name in ("rivals", "ablations", "sweeps")],
)
PINNED = {"tokenizer": "1", "seed": "2", "backbone": "3"}
LIVING = replace(
    RECIPE,
    lineage=Lineage(pinned=PINNED, backbone=tuple(RECIPE.domains), parents={"python": "4"}),
)
RECIPES = {"dume": RECIPE, "symphony": STRANGERS, "simoe": TUNED, "living": LIVING}
STAGES = [(name, stage) for name, recipe in RECIPES.items() for stage in ORDER]
STAGES = [(name, stage) for name, stage in STAGES if stage.items(RECIPES[name])]


def label(value):
    return value if isinstance(value, str) else value.name


ITEM = re.compile(r"\$\{item\.(\w+)\[(\d+)\]\}")

# Modules that another stage's module may import without its stage listing them. They read what an
# earlier stage wrote (a change of what is written shows in that stage's own artifact), name tensors
# (a wrong name is an error, not another number), or move and check things.
NEUTRAL = {
    "upcycle_core/activations/moments.py",
    "upcycle_core/architectures/compare.py",
    "upcycle_core/architectures/families.py",
    "upcycle_core/architectures/family.py",
    "upcycle_core/architectures/resolve.py",
    "upcycle_core/checkpoints/copy.py",
    "upcycle_core/checkpoints/hashing.py",
    "upcycle_core/checkpoints/load.py",
    "upcycle_core/checkpoints/place.py",
    "upcycle_core/checkpoints/reader.py",
    "upcycle_core/checkpoints/tokenizer.py",
    "upcycle_core/checkpoints/writer.py",
    "upcycle_core/corpora/documents.py",
    "upcycle_core/corpora/shards.py",
    "upcycle_core/corpora/sources.py",
    "upcycle_core/checkpoints/tensor_file.py",
    "upcycle_core/dume/layout.py",
    "upcycle_core/dume/statistics.py",
    "upcycle_core/errors.py",
    "upcycle_core/evaluation/harness/definitions.py",
    "upcycle_core/progress.py",
    "upcycle_core/training/checkpoints.py",
    "upcycle_core/training/checks.py",
    "upcycle_core/training/divergence.py",
    "upcycle_core/training/reporter.py",
    "upcycle_core/training/resume.py",
}


def direct_imports(source: str) -> set[str]:
    """Files of the library that ``source`` imports."""
    found = set()
    for node in ast.walk(ast.parse((CODE / source).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("upcycle_core"):
            module = CODE / node.module.replace(".", "/")
            names = [module.with_suffix(".py"), *(module / f"{a.name}.py" for a in node.names)]
            found |= {str(n.relative_to(CODE)) for n in names if n.exists()}
    return found


@pytest.mark.parametrize("stage", ORDER, ids=lambda stage: stage.name)
def test_sources_of_a_stage_are_complete(stage):
    """A change of a module that shapes a result must make the result anew."""
    listed = set(stage.sources)
    for source in listed:
        assert (CODE / source).exists(), source
        missing = {
            name
            for name in direct_imports(source)
            if name not in listed | NEUTRAL and not name.endswith("config.py")
        }
        if not source.startswith("tasks/"):
            assert not missing, f"{stage.name}: {source} imports {missing}"


def test_every_stage_belongs_to_a_method():
    assert {stage.name for _, stage in STAGES} == {stage.name for stage in ORDER}


@pytest.mark.parametrize(("name", "stage"), STAGES, ids=label)
def test_dvc_lists_what_the_fingerprint_is_made_from(name, stage, tmp_path):
    recipe = RECIPES[name]
    entries = yaml.safe_load(dvc_yaml(recipe))["stages"]
    session = Session(recipe, Workspace(tmp_path), log=lambda text: None)
    for item in stage.items(recipe):
        inputs = list(stage.inputs(recipe, item))
        for name in inputs:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(name) if path.suffix else path.mkdir()
        made_from = stage.made_from(session, item)
        entry = entries[stage.name if stage.per == "domain" else stage.label(item)]
        given = entry["foreach"][item] if isinstance(entry.get("foreach"), dict) else {}
        entry = entry.get("do", entry)

        def resolved(values, item=item, given=given):
            found = (value.replace("${key}", item) for value in values)
            return {ITEM.sub(lambda m: given[m[1]][int(m[2])], value) for value in found}

        assert resolved(entry.get("params", [])) == set(made_from["params"])
        assert resolved(entry.get("deps", [])) == set(made_from["inputs"]) | {
            f"${{code}}/{source}" for source in made_from["sources"]
        }
        assert resolved(entry["outs"]) == {stage.artifact(item)}


def test_params_are_the_resolved_recipe(tmp_path):
    values = yaml.safe_load(params_yaml(RECIPE, tmp_path / "home" / "demo"))
    assert (tmp_path / "home" / "demo" / values.pop("code")).resolve() == CODE
    assert set(values["domains"]) == {"cpp", "documentation", "mathematics", "python"}
    assert values["router"]["ridge_lambda"] == 0.01


def test_what_is_built_upon_is_frozen_and_the_others_are_not():
    entries = yaml.safe_load(dvc_yaml(LIVING))["stages"]
    frozen = {name for name, entry in entries.items() if entry.get("frozen")}
    assert frozen == {*PINNED, "parents-python"}


def test_a_backbone_that_averages_a_domain_that_left_reads_only_what_is_there():
    domains = {name: domain for name, domain in RECIPE.domains.items() if name != "cpp"}
    entry = yaml.safe_load(dvc_yaml(replace(LIVING, domains=domains)))["stages"]["backbone"]
    experts = {dep for dep in entry["deps"] if dep.startswith("experts/")}
    assert experts == {f"experts/{name}" for name in domains}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_every_input_is_made_by_an_earlier_stage(recipe):
    made = set()
    for stage in ORDER:
        for item in stage.items(recipe):
            for name in stage.inputs(recipe, item):
                assert any(name == m or name.startswith(f"{m}/") for m in made), (stage.name, name)
        made |= {stage.artifact(item) for item in stage.items(recipe)}
