from pathlib import Path

import pytest
import yaml
from texts import pico_recipe, save_recipe

from infra.recipe.schema import recipe_digest, resolve
from tasks.recipes import load_recipe, validate
from upcycle_core.errors import InputError


@pytest.fixture
def values(tmp_path):
    return pico_recipe(tmp_path)


def message(values) -> str:
    with pytest.raises(InputError) as raised:
        validate(values)
    return str(raised.value)


def test_resolved_recipe_resolves_to_itself(values):
    recipe = validate(values)
    assert validate(resolve(recipe)) == recipe
    assert recipe_digest(validate(resolve(recipe))) == recipe_digest(recipe)


def test_domains_are_sorted_whatever_the_order_in_the_file(values):
    turned = {**values, "domains": dict(reversed(values["domains"].items()))}
    assert list(validate(turned).domains) == sorted(values["domains"])


def test_unknown_key_names_the_nearest_that_exists(values):
    values["router"] = {"ridge_lamda": 1.0}
    assert message(values) == "router.ridge_lamda = 1.0: no such key; did you mean ridge_lambda?"


def test_unknown_key_deep_in_a_domain_is_named(values):
    values["domains"]["letters"]["train"]["fils"] = ["x"]
    assert "domains.letters.train.fils = ['x']: no such key; did you mean files?" in message(values)


def test_all_faults_come_in_one_message(values):
    values["seed"] = -1
    values["statistic"] = {}
    values["moe"] = {"top_k": 9}
    values["backbone"] = {"experts": ["nobody"]}
    text = message(values)
    for field in ("seed = -1", "statistic = {}", "moe.top_k = 9", "backbone.experts = 'nobody'"):
        assert field in text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"name": "../elsewhere"}, "name = '../elsewhere': names a folder in the workspace"),
        ({"folder": None}, "folder = None: domains.colours.train needs it"),
        ({"moe": {"top_k": 4}}, "moe.top_k = 4: more than the 3 experts; use 1 to 3"),
        ({"router": {"ridge_lambda": -1.0}}, "router.ridge_lambda = -1.0: must not be negative"),
        ({"router": {"domain_weights": {"x": 2}}}, "router.domain_weights = 'x': not a domain"),
        ({"statistics": {"position_buckets": [8, 2]}}, "must ascend"),
        ({"evaluation": {"sweep_window": [3]}}, "evaluation.sweep_window = 3"),
        ({"experts": {"training": {"steps": 5}}}, "experts.training.warmup_steps = 50"),
        ({"statistics": {"sequence_length": 512}}, "statistics.sequence_length = 512: longer"),
        ({"seed_model": {"shape": {"key_value_heads": 3}}}, "seed_model.shape.key_value_heads = 3"),
        ({"compute": {"corpora": {"gpus": 1}}}, "compute.corpora.gpus = 1.0: computes on the CPU"),
        ({"compute": {"assembly": {"gpus": 1}}}, "compute.assembly.gpus = 1.0: computes on the"),
    ],
)
def test_faults_across_fields_say_what_to_do(values, change, expected):
    assert expected in message({**values, **change})


def test_fewer_than_two_domains_are_refused(values):
    values["domains"] = {"letters": values["domains"]["letters"]}
    assert "domains = ['letters']: 1 given; at least two are needed" in message(values)


def test_domain_name_outside_the_workspace_is_refused(values):
    values["domains"]["../x"] = values["domains"].pop("letters")
    assert "domains.../x = '../x': names a folder in the workspace" in message(values)


def test_domain_without_text_needs_a_ready_expert_and_its_texts(values):
    values["domains"]["letters"] = {"expert": "/models/letters"}
    assert "no training text, and no calibration, heldout" in message(values)


def test_source_must_be_of_one_kind(values):
    values["domains"]["letters"]["train"]["harvest"] = "python"
    assert "give exactly one of harvest, files and dataset" in message(values)


def test_overrides_are_yaml_at_dotted_keys(values, tmp_path):
    path = save_recipe(tmp_path / "recipe.yaml", values)
    recipe = load_recipe(path, ["router.ridge_lambda=cross-validate", "moe.top_k=2"])
    assert recipe.router.ridge_lambda == "cross-validate"
    assert recipe.moe.top_k == 2


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words"])
def test_recipe_without_keys_is_refused(tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(InputError, match="holds no keys"):
        load_recipe(tmp_path / "recipe.yaml", ["seed=1"])


def test_missing_recipe_file_is_named(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_recipe(tmp_path / "none.yaml")


def test_what_is_no_text_is_named(tmp_path):
    (tmp_path / "recipe.yaml").write_bytes(b"name: \xff\xfe")
    for path in (tmp_path, tmp_path / "recipe.yaml"):
        with pytest.raises(InputError, match=r"cannot be read .*name a YAML file in UTF-8"):
            load_recipe(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("name.part=1", "name is no section; write name=VALUE"),
        ("seed=[", "the value is not YAML"),
    ],
)
def test_settings_that_cannot_be_are_named(change, message):
    with pytest.raises(InputError, match=message):
        load_recipe(Path("recipes/demo.yaml"), [change])


SHIPPED = sorted(Path("recipes").rglob("*.yaml"))
ROWS = [path for path in SHIPPED if "name" not in yaml.safe_load(path.read_text())]
SHIPPED_WITH = {
    "tasks.yaml": "demo",
    "ablations.yaml": "symphony",
    "bam.yaml": "symphony",
    "symphony-anchors.yaml": "symphony-five-domains",
    "compression.yaml": "demo",
    "ders-upcycling.yaml": "demo",
    "ders-seeds.yaml": "demo",
    "simoe-rivals.yaml": "simoe",
    "simoe-ablations.yaml": "simoe",
    "simoe-sweeps.yaml": "simoe",
    "simoe-parameter-masks.yaml": "simoe",
    "simoe-real-rivals.yaml": "simoe-real",
}
"""The recipe that a file is made for, where another one than the paper's."""


@pytest.mark.parametrize("path", [path for path in SHIPPED if path not in ROWS], ids=str)
def test_every_shipped_recipe_is_valid(path):
    needs_folder = "{folder}" in path.read_text()
    recipe = load_recipe(path, ["folder=/data"] if needs_folder else [])
    assert yaml.safe_load(path.read_text())["name"] == recipe.name


@pytest.mark.parametrize("path", [path for path in ROWS if path.parent.name != "tasks"], ids=str)
def test_every_shipped_file_of_baselines_or_tasks_is_valid(path):
    values = yaml.safe_load(path.read_text())
    name = SHIPPED_WITH.get(path.name, "paper/dume")
    domains = [task.get("domain") for task in values.get("tasks", {}).values()]
    own = [f"domains.{d}={{train: {{files: [x]}}}}" for d in domains if d and "paper" in name]
    recipe = load_recipe(Path(f"recipes/{name}.yaml"), ["folder=/data", *own], added=[path])
    for key in ("baselines", "tasks"):
        assert set(values.get(key, {})) <= set(getattr(recipe, key))


def test_settings_reach_the_rows_of_other_files():
    changes = ["folder=/data", "baselines.btx.top_k=3"]
    compared = [Path("recipes/paper/btx.yaml")]
    recipe = load_recipe(Path("recipes/paper/dume.yaml"), changes, added=compared)
    assert recipe.baselines["btx"].top_k == 3


def test_one_name_for_two_rows_is_refused():
    compared = [Path("recipes/paper/btx.yaml"), Path("recipes/paper/symphony-baselines.yaml")]
    with pytest.raises(InputError, match=r"baselines\.btx = .*is there already"):
        load_recipe(Path("recipes/demo.yaml"), added=compared)


@pytest.mark.parametrize("text", ["name: a\nbaselines: {}", "baselines: [btx]", "btx: {}"])
def test_a_file_of_baselines_holds_nothing_else(tmp_path, text):
    (tmp_path / "rows.yaml").write_text(text)
    with pytest.raises(
        InputError, match="holds baselines or tasks or compression, names and settings"
    ):
        load_recipe(Path("recipes/demo.yaml"), added=[tmp_path / "rows.yaml"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tasks.python-text.definition=x", r"\['definition', 'heldout'\]: give exactly one of"),
        ("tasks.python-text.domain=null", r"tasks.python-text.domain = None: name the domain"),
        ("tasks.python-text.domain=law", r"tasks.python-text.domain = 'law': not a domain"),
        ("task_evaluation.models=[dume, gpt]", r"task_evaluation.models = 'gpt': not a model"),
        ("task_evaluation.seeds=[]", r"task_evaluation.seeds = \[\]: no run at all"),
        ("registry.gate.metric=task.exam", r"gate.metric = 'task.exam': not measured; use one of"),
        ("registry.gate.tolerances={task.exam: 1}", r"tolerances = 'task.exam': not measured"),
        ("registry.gate.tolerances={task_average: -1}", r"task_average = -1.0: must not be neg"),
    ],
)
def test_faults_of_tasks_and_of_the_gate_are_said(change, message):
    with pytest.raises(InputError, match=message):
        load_recipe(Path("recipes/demo.yaml"), [change], added=[Path("recipes/tasks.yaml")])


def test_a_gate_needs_the_models_that_its_figure_is_made_from():
    changes = ["registry.gate.metric=task_average", "task_evaluation.models=[dume, expert_python]"]
    with pytest.raises(InputError, match=r"needs \['expert_cpp', 'expert_documentation'"):
        load_recipe(Path("recipes/demo.yaml"), changes, added=[Path("recipes/tasks.yaml")])
