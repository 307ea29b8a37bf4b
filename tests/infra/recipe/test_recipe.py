import copy
import math
import re
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml
from texts import pico_recipe, save_recipe

from infra.recipe.paths import with_folder
from infra.recipe.reading import ASKING
from infra.recipe.schema import Recipe, recipe_digest, recipe_yaml, resolve
from tasks.recipes import load_recipe, validate
from upcycle_core.baselines.config import Baseline
from upcycle_core.config import RULES
from upcycle_core.corpora.config import Origin
from upcycle_core.errors import InputError

DOMAINS = ("colours", "letters", "numbers")


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


@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        ("experts", "checkpoint_steps", "did you mean training.checkpoint_steps or continued."),
        ("compute.statistics", "workers", "only compute.seed, compute.experts, compute.post_tra"),
        ("versions", "xyz", "the keys there are remote, given_weights"),
    ],
)
def test_an_unknown_key_that_is_like_none_says_where_it_is_or_what_there_is(
    values, section, key, said
):
    assert f"{section}.{key} = 2: no such key; {said}" in message(
        with_value(values, f"{section}.{key}", 2)
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backbone.experts", ["letters", "numbers", "letters"]),
        ("evaluation.random_routing_seeds", [7, 7]),
        ("evaluation.sweep_top_k", [1, 1]),
        ("router.lambda_grid", [0.1, 0.1]),
    ],
)
def test_what_is_named_twice_is_refused(values, key, value):
    said = message(with_value(values, key, value))
    assert f"{key} = [{value[0]!r}]: named more than once; give each once" in said


def test_a_folder_that_is_missing_is_said_once(values):
    named = {"files": ["{folder}/a.txt"]}
    for domain in values["domains"].values():
        domain |= {"calibration": named, "heldout": named}
    values["folder"] = None
    [line] = [line for line in message(values).splitlines() if line.startswith("folder")]
    said = "domains.colours.calibration, domains.colours.heldout, domains.colours.train"
    assert line == f"folder = None: {said} and more need it; add --set folder=PATH"


@pytest.mark.parametrize(
    "field", ["statistics.batch_size", "compute.cpus", "compute.evaluation.cpus"]
)
def test_a_number_that_no_machine_has_is_refused(values, field):
    section, *between, name = field.split(".")
    found = values.setdefault(section, {})
    for key in between:
        found = found.setdefault(key, {})
    found[name] = 10**19  # more than a database or a tensor can say
    assert f"{name} = {10**19}: must be at most 1000000" in message(values)


@pytest.mark.parametrize(("number", "is_refused"), [(2**63, True), (2**63 - 1, False)])
def test_a_number_that_no_database_holds_is_refused(values, number, is_refused):
    """Prefect's would refuse every list of runs in which there is one."""
    values["statistics"]["tokens"] = number
    with pytest.raises(InputError) if is_refused else nullcontext() as refused:
        validate(values)
    if is_refused:
        assert f"statistics.tokens = {number}: must be less than" in str(refused.value)


@pytest.mark.parametrize("method", ["symphony", "simoe"])
def test_a_method_without_its_section_is_told_so(values, method):
    assert f"{method} = None: says how" in message({**values, "method": method})


@pytest.mark.parametrize("method", ["symphony", "simoe"])
def test_a_method_s_section_with_nothing_under_it_asks_for_the_method(tmp_path, method):
    """`symphony:` alone made a model of DUME's."""
    shipped = yaml.safe_load(Path("recipes", f"{method}.yaml").read_text())
    unfit = (method, "tuning", "baselines")  # they go with what stands under it there
    values = {key: own for key, own in shipped.items() if key not in unfit} | {"folder": "texts"}
    for domain in values["domains"].values():
        domain.pop("origin", None)
    values |= {"tuning": {"training": {"sequence_length": 512}}} if method == "simoe" else {}
    path = save_recipe(tmp_path / "recipe.yaml", values)
    path.write_text(f"{path.read_text()}{method}:\n  # all as it is by default\n")
    read = load_recipe(path)
    assert read.method == method
    assert read == load_recipe(path, [f"{method}={{}}"])
    with pytest.raises(InputError, match=f"{method}={{}} for its defaults, or {method}=null for"):
        load_recipe(path, [f"{method}="])


def test_a_section_that_is_null_asks_for_nothing(values, tmp_path):
    """As recipes with all defaults written out say it."""
    path = save_recipe(tmp_path / "recipe.yaml", {**values, "symphony": None})
    assert "symphony: null" in path.read_text()
    assert load_recipe(path).method == "dume"


def test_every_section_that_asks_for_a_method_is_known():
    def optional(kind):
        hints = ((name, get_args(hint)) for name, hint in get_type_hints(kind).items())
        return {n for n, of in hints if type(None) in of and any(map(is_dataclass, of))}

    rows = optional(Baseline) - {"lora"}  # `tuned` asks for it
    known = optional(Recipe) - {"lineage"}  # which flows write
    parts = {"post_training", "similarity", "compression"}  # of whatever method: nothing is none
    assert set(ASKING) == known - parts | {f"baselines.*.{name}" for name in rows}


def test_a_method_that_contradicts_a_section_is_refused(values):
    said = "method = 'dume': and there is a section `symphony`, of symphony: remove one"
    wrong = {**values, "symphony": {}, "seed": -1, "nmae": 1, "moe": {"top_k": 9}}
    together = message({**wrong, "method": "dume"})
    for one in (said, "seed = -1", "nmae = 1", "moe.top_k = 9"):
        assert one in together
    assert "method = 'symphny': no method; use one of" in message({**wrong, "method": "symphny"})


def test_one_worker_is_as_near_as_can_be(values):
    values["compute"] = {"experts": {"placement": "pack"}}
    assert validate(values).compute.experts.placement == "pack"


def test_the_folder_stands_in_paths_of_models_too(values, tmp_path):
    values["seed_model"] = {"model": "{folder}/seed"}
    for name in DOMAINS[:2]:
        values["domains"][name]["expert"] = f"{{folder}}/base:{{folder}}/{name}"
    recipe, folder = validate(values), values["folder"]
    assert recipe.seed_model.model == f"{folder}/seed"
    assert recipe.domains[DOMAINS[0]].expert == f"{folder}/base:{folder}/{DOMAINS[0]}"
    assert validate(resolve(recipe)) == recipe
    stranger = replace(recipe.domains[DOMAINS[2]], origin=Origin(model="{folder}/origin"))
    own = with_folder(replace(recipe, domains={"own": stranger})).domains["own"]
    assert own.origin == Origin(model=f"{folder}/origin")
    del values["folder"]
    said = message(values)
    own = sorted(f"domains.{name}.expert" for name in DOMAINS[:2])
    texts = [f"domains.{name}.{text}" for name in DOMAINS for text in ("heldout", "train")]
    assert f"folder = None: {', '.join(sorted(own + texts)[:3])} and more need it" in said
    for name in DOMAINS:
        for text in ("heldout", "train"):
            values["domains"][name][text]["files"] = ["there.txt"]
    assert f"folder = None: {', '.join(own)}, seed_model.model need it" in message(values)


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
        ({"folder": None}, "folder = None: domains.colours.heldout, domains.colours.train,"),
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
        (
            {"compute": {"experts": {"sharding": "full"}}},
            "compute.experts.sharding = 'full': one worker has nothing to share its weights with",
        ),
        (
            {"compute": {"experts": {"placement": "spread"}}},
            "compute.experts.placement = 'spread': one worker is on one machine; remove it, or set "
            "compute.experts.workers to 2 or more",
        ),
        (
            {"compute": {"experts": {"accelerator": "H100"}}},
            "compute.experts.accelerator = 'H100': a kind of GPU, and no GPU is asked for; set "
            "compute.experts.gpus, or remove it",
        ),
        (
            {"compute": {"corpora": {"accelerator": "H100"}}},
            "compute.corpora.accelerator = 'H100': computes on the CPU alone; remove it",
        ),
        (
            {"compute": {"statistics": {"resources": {"GPU": 1}}}},
            "compute.statistics.resources.GPU = 1.0: has a key of its own; use "
            "compute.statistics.gpus",
        ),
        (
            {"compute": {"statistics": {"resources": {"accelerator_type:H100": 1}}}},
            "compute.statistics.resources.accelerator_type:H100 = 1.0: has a key of its own; use "
            "compute.statistics.accelerator",
        ),
        (
            {"compute": {"statistics": {"resources": {"ssd": 0}}}},
            "compute.statistics.resources.ssd = 0.0: must be more than 0; raise it, or remove it",
        ),
        (
            {"compute": {"statistics": {"resources": {"ssd": 1.5}}}},
            "compute.statistics.resources.ssd = 1.5: Ray reserves a share of one, or whole ones; "
            "use 1 or 2",
        ),
        (
            {"compute": {"statistics": {"memory": 24}}},
            "compute.statistics.memory = 24: is in bytes, and no piece begins with so few; write "
            "them out, as 24_000_000_000",
        ),
        (
            {"compute": {"statistics": {"gpus": 1.5}}},
            "compute.statistics.gpus = 1.5: a piece computes on one GPU, and the others would be "
            "idle; use 1",
        ),
        (
            {"compute": {"evaluation": {"gpus": 2}}},
            "compute.evaluation.gpus = 2.0: a piece computes on one GPU, and the others would be "
            "idle; use 1, and to divide a model that is scored on tasks "
            "compute.task_evaluation.gpus: 2",
        ),
        (
            {"compute": {"task_evaluation": {"gpus": 2.5}}},
            "compute.task_evaluation.gpus = 2.5: Ray reserves a share of one, or whole ones; use 3",
        ),
        (
            {"compute": {"experts": {"gpus": 2}}},
            "compute.experts.gpus = 2.0: a piece computes on one GPU, and the others would be "
            "idle; use 1, and for a training on several compute.experts.workers: 2",
        ),
        (
            {"compute": {"seed": {"workers": 3}}},
            "seed_model.training.gradient_accumulation = 1: must be a multiple of "
            "compute.seed.workers = 3",
        ),
        (
            {"experts": {"training": {"optimizer_state": "8bit"}}},
            "experts.training.optimizer_state = '8bit': ",
        ),
        (
            {"experts": {"training": {"optimizer_state": "bf16", "adam_beta2": 0.999}}},
            "experts.training.adam_beta2 = 0.999: a moment in bf16 does not move by less than",
        ),
        (
            {"experts": {"continued": {"steps": 30}}},
            "experts.continued.warmup_steps = 50: the peak learning rate is never reached",
        ),
        (
            {"experts": {"continued": {"evaluation_steps": 200}}},
            "experts.continued.evaluation_steps = 200: is for baselines; seed and experts are",
        ),
        (
            {"experts": {"continued": {"lora": {"rank": 4}}}},
            "experts.continued.lora = 'rank 4': is only trained with method: lora",
        ),
        (
            {"experts": {"continued": {"sequence_length": 2048}}},
            "experts.continued.sequence_length = 2048: longer than seed_model.shape.max_positions",
        ),
    ],
)
def test_faults_across_fields_say_what_to_do(values, change, expected):
    assert expected in message({**values, **change})


def with_value(values, key, value):
    """A copy of ``values`` with ``value`` at a dotted key."""
    changed = copy.deepcopy(values)
    *path, last = key.split(".")
    section = changed
    for part in path:
        section = section.setdefault(part, {})
    section[last] = value
    return changed


FLOATS = [
    "registry.gate.margin",
    "router.ridge_lambda",
    "experts.training.learning_rate",
    "experts.training.weight_decay",
    "experts.training.max_gradient_norm",
    "post_training.objective.balance_coefficient",
    "baselines.btx.objective.z_coefficient",
    "simoe.beta",
    "simoe.mask_learning_rate",
    "compute.experts.gpus",
    "corpus.heldout_share",
    "compression.tolerance",
    "task_evaluation.code.seconds",
]
IN_MAPPINGS = [
    "registry.gate.tolerances.normalised_worst",
    "router.domain_weights.letters",
    "baselines.btx.objective.domain_weights.letters",
    "domains.letters.origin.mixture.letters",
    "symphony.merge.weights.letters",
    "compute.experts.resources.ssd",
]
IN_LISTS = ["router.lambda_grid", "evaluation.sweep_ridge_lambda"]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, "nan"], ids=str)
@pytest.mark.parametrize("key", [*FLOATS, *IN_MAPPINGS, *IN_LISTS])
def test_a_number_that_compares_with_none_is_refused(values, key, number):
    """A margin that is NaN would stop every promotion, without a word."""
    given = [number] if key in IN_LISTS else number
    found = message(with_value(values, key, given))
    wanted = rf"^{key}(\.\w+)? = .*: Input should be a finite number; correct it$"
    assert re.search(wanted, found, re.MULTILINE)


def test_bytes_with_a_unit_are_told_as_the_number_they_are(values):
    for given, number in (("13.5 GB", "13_500_000_000"), ("13Gi", "13_958_643_712")):
        found = message(with_value(values, "compute.experts.memory", given))
        said = f"compute.experts.memory = '{given}': write the number itself: {number}"
        assert said in found
    for said in ("much", "2.5"):
        found = message(with_value(values, "compute.experts.memory", said))
        assert f"memory = '{said}': Input should be a valid integer" in found


def sections(kind=Recipe):
    """Every dataclass that a recipe is made of."""
    found = {kind}
    for hint in get_type_hints(kind).values():
        for part in (hint, *get_args(hint), *(a for b in get_args(hint) for a in get_args(b))):
            if is_dataclass(part) and part not in found:
                found |= sections(part)
    return found


def test_every_section_of_a_recipe_is_read_by_the_same_rules():
    assert len(sections()) > 35
    for section in sections():
        assert section.__pydantic_config__ == RULES, section
        with pytest.raises(FrozenInstanceError):
            section.__setattr__(object.__new__(section), fields(section)[0].name, 1)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("router.domain_weights", {"letters": -1}, "-1.0: must be above 0"),
        ("router.domain_weights", {"letters": 0, "numbers": 2}, "0.0: must be above 0; leave the"),
        ("router.lambda_grid", [1.0, -1.0], "-1.0: use 0 or more"),
        ("evaluation.sweep_ridge_lambda", [-5], "-5.0: use 0 or more"),
        ("evaluation.sweep_top_k", [0], "0: use 1 or more"),
        ("evaluation.sweep_top_k", [1, -3], "-3: use 1 or more"),
        ("evaluation.sweep_top_k", [4], "4: more than the 3 experts"),
        ("statistics.position_buckets", [0, 2], "0: use 1 or more"),
        ("evaluation.random_routing_seeds", [-1], "-1: use 0 to 4294967295"),
        ("evaluation.random_routing_seeds", [0, 2**32], "4294967296: use 0 to 4294967295"),
        ("evaluation.random_routing_seeds", [10**30], f"{10**30}: use 0 to 4294967295"),
        ("evaluation.random_routing_seeds", [], "[]: no run at all"),
        ("task_evaluation.seeds", [-1], "-1: use 0 to 4294967295"),
        ("task_evaluation.seeds", [2**32], "4294967296: use 0 to 4294967295"),
        ("seed", 2**32, "4294967296: must be less than 4294967296"),
        ("compression.seed", 2**32, "4294967296: must be less than 4294967296"),
    ],
)
def test_numbers_that_would_be_found_wrong_after_hours_are_refused_at_once(
    values, key, value, expected
):
    found = message(with_value(values, key, value))
    assert re.search(rf"^{key}(\.letters)? = .*{re.escape(expected)}", found, re.M)


@pytest.mark.parametrize("where", ["evaluation", "task_evaluation"])
@pytest.mark.parametrize("name", ["window", "sequence_length"])
def test_a_window_of_positions_that_are_not_counted_is_refused(values, where, name):
    values["statistics"] = {"position_buckets": [2, 8, 16], "sequence_length": 32, name: 8}
    values["evaluation"]["sweep_window"] = [2, 8]
    values[where] = {**values.get(where, {}), "sweep_window": [2, 8, 16]}
    said = f"{where}.sweep_window = 16: only 8 tokens of a paragraph are counted; use at most "
    assert message(values) == f"{said}statistics.{name} = 8, or raise that"
    values["statistics"][name] = 16
    validate(values)


def test_lambda_chosen_from_nothing_is_refused(values):
    values["router"] = {"ridge_lambda": "cross-validate", "lambda_grid": []}
    assert "router.lambda_grid = []: nothing to choose from" in message(values)


@pytest.mark.parametrize("mixture", [{"letters": 0}, {"letters": -1, "numbers": 2}], ids=str)
def test_a_mixture_of_nothing_or_less_is_refused(values, mixture):
    values["symphony"] = {}
    found = message(with_value(values, "domains.letters.origin", {"mixture": mixture}))
    assert "domains.letters.origin.mixture" in found


@pytest.mark.parametrize("weights", [{"letters": -1}, dict.fromkeys(DOMAINS, 0)], ids=str)
def test_weights_of_nothing_or_less_are_refused_after_joining_too(values, weights):
    values["symphony"] = {}
    values["post_training"] = {"objective": {"domain_weights": weights}}
    found = message(values)
    assert "post_training.objective.domain_weights = {" in found
    assert "must be at least 0, and one of them more" in found


def test_a_gate_of_tuned_models_tolerates_no_negative_loss():
    changes = ["registry.gate.tolerances={rouge_l_seen: -1}"]
    with pytest.raises(InputError, match=r"tolerances\.rouge_l_seen = -1\.0: must not be negative"):
        load_recipe(Path("recipes/simoe.yaml"), changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", True),
        ("moe.top_k", True),
        ("experts.training.learning_rate", True),
        ("router.ridge_lambda", False),
        ("statistics.tokens", True),
        ("router.domain_weights.letters", True),
        ("evaluation.sweep_top_k", [2, True]),
    ],
)
def test_true_is_no_number(values, key, value):
    """Beside faults of the same recipe, and alone."""
    found = message(with_value(values, key, value))
    assert re.fullmatch(rf"{key} = (True|False): is no number; write the number .*", found)
    both = message(with_value({**values, "statistic": {}}, key, value))
    assert found in both
    assert "statistic = {}" in both


def test_whole_numbers_and_numbers_without_a_point_are_numbers_still(values, tmp_path):
    changes = ["experts.training.learning_rate=2e-4", "router.ridge_lambda=1", "moe.top_k=2.0"]
    recipe = load_recipe(save_recipe(tmp_path / "recipe.yaml", values), changes)
    assert recipe.experts.training.learning_rate == 2e-4
    assert recipe.router.ridge_lambda == 1.0
    assert recipe.moe.top_k == 2
    assert type(recipe.moe.top_k) is int


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


def test_a_file_that_adds_to_a_recipe_is_none_itself(tmp_path):
    path = tmp_path / "more.yaml"
    path.write_text(".of: &of {method: bam}\nbaselines: {bam: *of}\n")
    with pytest.raises(InputError, match="holds baselines alone, for a recipe: name that before"):
        load_recipe(path)


def test_a_name_that_is_missing_is_said_without_all_the_rest(values):
    del values["name"]
    assert message(values) == "name = None: is missing; give it"


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
    "simoe-parts.yaml": "simoe",
    "simoe-sweeps.yaml": "simoe",
    "simoe-parameter-masks.yaml": "simoe",
    "simoe-real-rivals.yaml": "simoe-real",
    "simoe-real-tunings.yaml": "simoe-real",
    "symphony-baselines.yaml": "paper/symphony",
    "symphony-bam.yaml": "paper/symphony",
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


def test_rivals_of_the_paper_s_symphony_are_trained_as_it_is():
    rivals = [Path(f"recipes/paper/symphony-{name}.yaml") for name in ("baselines", "bam")]
    recipe = load_recipe(Path("recipes/paper/symphony.yaml"), ["folder=/data"], added=rivals)
    assert set(recipe.baselines) == {"btx", "bam", "drop-upcycling"}
    for row in recipe.baselines.values():
        assert row.training == recipe.post_training.training
        assert (row.objective, row.top_k) == (recipe.post_training.objective, recipe.moe.top_k)


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
    with pytest.raises(InputError, match=r"holds baselines or tasks or .*, names and settings"):
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


def test_a_card_quotes_what_stands_at_its_keys():
    recipe = load_recipe(Path("recipes") / "demo.yaml")
    keys = ["name", "domains.python.train", "domains.cpp.train", "moe"]
    values = yaml.safe_load(recipe_yaml(recipe, keys))
    whole = resolve(recipe)
    assert list(values) == ["name", "domains", "moe"]
    assert values["moe"] == whole["moe"]
    assert values["domains"] == {
        name: {"train": whole["domains"][name]["train"]} for name in ("cpp", "python")
    }


@pytest.mark.parametrize("name", ["dume", "seed", "oracle", "expert_python", "champion"])
def test_a_baseline_does_not_take_the_name_of_a_row_that_is_there(name):
    with pytest.raises(InputError, match=rf"baselines\.{name} = '{name}': names a row"):
        load_recipe(Path("recipes/demo.yaml"), [f"baselines.{name}.method=btx"])


def test_bam_of_a_family_without_a_counterpart_is_refused_before_experts_are_trained():
    demo, row = Path("recipes/demo.yaml"), ["baselines.bam.method=bam"]
    load_recipe(demo, row)
    with pytest.raises(InputError, match=r"baselines\.bam\.method = 'bam': has no stock attention"):
        load_recipe(demo, [*row, "seed_model.shape.family=qwen2"])
