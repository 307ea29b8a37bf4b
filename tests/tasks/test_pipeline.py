"""dvc.yaml and the fingerprints say the same, and leave nothing out."""

import re
from dataclasses import replace
from functools import cache

import pytest
import yaml
from dvc.utils.serialize import parse_yaml

from infra.recipe.schema import Lineage
from tasks.data.documents import documents
from tasks.engine.sources import CODE
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.methods import every_stage, stages_of
from tasks.pipeline import dvc_yaml, params_yaml
from tasks.recipes import load_recipe

RECIPE = load_recipe(
    CODE / "recipes" / "demo.yaml",
    [
        *("comparison.tokens=2252800", "task_evaluation.sweep_top_k=[2]"),
        *("experts.repair=down+head_target", "experts.repair_tokens=routed"),
        *("backbone.merge.embeddings=counts", "backbone.merge.head=fitted"),
    ],
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
    ["seed_model.text={harvest: documentation-elsewhere}"],
    added=[CODE / "recipes" / f"simoe-{name}.yaml" for name in ("rivals", "ablations", "sweeps")],
)
PINNED = {"tokenizer": "1", "seed": "2", "backbone": "3"}
LIVING = replace(
    RECIPE,
    lineage=Lineage(pinned=PINNED, backbone=tuple(RECIPE.domains), parents={"python": "4"}),
)
RECIPES = {"dume": RECIPE, "symphony": STRANGERS, "simoe": TUNED, "living": LIVING}
STAGES = [(name, stage) for name, recipe in RECIPES.items() for stage in stages_of(recipe)]
STAGES = [(name, stage) for name, stage in STAGES if stage.items(RECIPES[name])]


@cache
def entries_of(name):
    return yaml.safe_load(dvc_yaml(RECIPES[name]))["stages"]


def label(value):
    return value if isinstance(value, str) else value.name


ITEM = re.compile(r"\$\{item\.(\w+)\[(\d+)\]\}")


def test_every_stage_belongs_to_a_method():
    assert {id(stage) for _, stage in STAGES} == set(map(id, every_stage()))


@pytest.mark.parametrize("recipe", [RECIPE, STRANGERS], ids=["dume", "symphony"])
def test_tasks_are_made_before_anything_is_trained(recipe):
    names = [stage.name for stage in stages_of(recipe)]
    assert names.index("documents") < names.index("task_sets") < names.index("experts")


@pytest.mark.parametrize(("name", "stage"), STAGES, ids=label)
def test_dvc_lists_what_the_fingerprint_is_made_from(name, stage, tmp_path):
    recipe, entries = RECIPES[name], entries_of(name)
    session = Session(recipe, Workspace(tmp_path), log=lambda text: None)
    for item in stage.items(recipe):
        inputs = list(stage.inputs(recipe, item))
        for name in inputs:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(name) if path.suffix else path.mkdir()
        made_from = stage.made_from(session, item)
        entry = entries[stage.name if stage.out.endswith("{domain}") else stage.label(item)]
        given = entry["foreach"][item] if isinstance(entry.get("foreach"), dict) else {}
        entry = entry.get("do", entry)

        def resolved(values, item=item, given=given):
            found = (value.replace("${key}", item) for value in values)
            return {ITEM.sub(lambda m: given[m[1]][int(m[2])], value) for value in found}

        assert resolved(entry.get("params", [])) == {*made_from["params"], "packages"}
        assert resolved(entry.get("deps", [])) == set(made_from["inputs"]) | {
            f"${{code}}/{source}" for source in made_from["sources"]
        }
        outs = entry["outs"]
        flags = {"push": False} if stage.in_parts else {"persist": True}
        if stage.in_parts or stage.stays(recipe, item):
            outs = [out for named in outs for out, how in named.items() if how == flags]
        assert resolved(outs) == {stage.artifact(item)}


@pytest.mark.parametrize("asked", [(), ("cpp",), ("cpp", "python")])
def test_an_optional_stage_has_an_entry_for_the_domains_it_runs_for_alone(asked, monkeypatch):
    optional = replace(documents, each=lambda recipe: asked)
    monkeypatch.setattr("tasks.pipeline.stages_of", lambda recipe: (optional,))
    entries = yaml.safe_load(dvc_yaml(RECIPE))["stages"]
    assert set(entries) == ({"documents"} if asked else set())
    assert all(tuple(entry["foreach"]) == asked for entry in entries.values())


def test_params_are_the_resolved_recipe(tmp_path):
    values = yaml.safe_load(params_yaml(RECIPE, tmp_path / "home" / "demo"))
    assert (tmp_path / "home" / "demo" / values.pop("code")).resolve() == CODE
    assert set(values["domains"]) == {"cpp", "documentation", "mathematics", "python"}
    assert values["router"]["ridge_lambda"] == 0.01


@pytest.mark.parametrize("recipe", [RECIPE, LIVING], ids=["shared", "each its own"])
def test_domains_that_yaml_1_2_has_as_numbers_are_texts_to_dvc(recipe, tmp_path):
    """It would know ``experts@100000.0``, and not what the flow has made."""
    names = ["0o14", "12e03", "1e5", "python"]
    domains = dict(zip(names, recipe.domains.values(), strict=True))
    recipe = replace(recipe, domains=domains)
    params = parse_yaml(params_yaml(recipe, tmp_path), "params.yaml")
    entries = parse_yaml(dvc_yaml(recipe), "dvc.yaml")["stages"]
    assert list(params["domains"]) == names
    assert params["router"]["ridge_lambda"] == 0.01
    each = [entry["foreach"] for entry in entries.values() if "foreach" in entry]
    assert len(each) > 3
    assert all(own == "${domains}" or list(own) == names for own in each)


def test_what_is_built_upon_is_frozen_and_the_others_are_not():
    entries = entries_of("living")
    frozen = {name for name, entry in entries.items() if entry.get("frozen")}
    assert frozen == {*PINNED, "parents-python"}


def test_dvc_does_not_remove_what_an_upgrade_leaves():
    """It removes outputs before it runs a stage, which then has nothing that could stay."""
    for recipe, flags in ((RECIPE, None), (LIVING, {"persist": True})):
        (out,) = yaml.safe_load(dvc_yaml(recipe))["stages"]["experts"]["do"]["outs"]
        assert out == ("experts/${key}" if flags is None else {"experts/${key}": flags})


def test_a_backbone_that_averages_a_domain_that_left_reads_only_what_is_there():
    domains = {name: domain for name, domain in RECIPE.domains.items() if name != "cpp"}
    entry = yaml.safe_load(dvc_yaml(replace(LIVING, domains=domains)))["stages"]["backbone"]
    experts = {dep for dep in entry["deps"] if dep.startswith("experts/")}
    assert experts == {f"experts/{name}" for name in domains}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_every_input_is_made_by_an_earlier_stage(recipe):
    made = set()
    for stage in stages_of(recipe):
        for item in stage.items(recipe):
            for name in stage.inputs(recipe, item):
                assert any(name == m or name.startswith(f"{m}/") for m in made), (stage.name, name)
        made |= {stage.artifact(item) for item in stage.items(recipe)}
