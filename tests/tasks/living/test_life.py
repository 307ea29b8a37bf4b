"""What of strangers and of tuned models stays, goes on and leaves; artifacts of a few bytes."""

import json

import pytest
from test_lineage import publish
from texts import TRAINING, pico_recipe

from infra.recipe.schema import resolve
from tasks.engine.life import modelled
from tasks.engine.workspace import Workspace
from tasks.living.lineage import begin, life_of, save, with_lineage, with_parents
from tasks.methods import METHODS
from tasks.recipes import validate
from tasks.symphony.experts import experts
from tasks.symphony.variants import anchor_of, chosen_of, section, variants
from upcycle_core.errors import InputError

OLD, ALL = ("letters", "numbers"), ("colours", "letters", "numbers")
CALIBRATION = {"sequence_length": 32}


def unswept(tmp_path, domains=ALL):
    """Values of a recipe whose report holds no sweep, as those of strangers do not."""
    values = pico_recipe(tmp_path, domains=domains)
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    return values


def strangers(tmp_path, domains=OLD, **origins):
    values = unswept(tmp_path, domains)
    values |= {"symphony": {"calibration": CALIBRATION}, "moe": {"top_k": 2}}
    for domain, origin in origins.items():
        values["domains"][domain]["origin"] = origin
    return validate(values)


def write_documents(workspace, domain, text, heldout="old"):
    staged = workspace.stage("documents")
    (staged / "train.parquet").write_text(text)
    (staged / "heldout.parquet").write_text(heldout)
    workspace.publish(staged, f"documents/{domain}", {"inputs": {}, "params": {}})


TRAIN = "documents/{}/train.parquet"


@pytest.fixture(params=[TRAIN, "documents/{}"], ids=["now", "earlier"])
def workspace(tmp_path, request):
    """Two joined strangers; numbers was trained on text of both.

    What an earlier version recorded that they read is all of their documents.
    """
    workspace = Workspace(tmp_path / "home" / "pico")
    for domain in OLD:
        write_documents(workspace, domain, "old")
    texts = {name: workspace.digest(name) for name in map(request.param.format, OLD)}
    words = publish(workspace, "vocabulary", **texts)
    letters = request.param.format("letters")
    first = {letters: texts[letters], "vocabulary": words}
    publish(workspace, "experts/letters", "l", **first)
    publish(workspace, "experts/numbers", "n", **texts, vocabulary=words)
    models = {f"experts/{domain}": workspace.digest(f"experts/{domain}") for domain in OLD}
    start = publish(workspace, "starts/symphony", **models)
    publish(workspace, "model", **{"starts/symphony": start})
    return workspace


def test_strangers_keep_vocabulary_and_anchor_when_one_comes_that_is_first(tmp_path, workspace):
    assert modelled(workspace) == OLD
    begun = begin(strangers(tmp_path, ALL), workspace, new=["colours"])
    assert begun.lineage.pinned == {"vocabulary": workspace.digest("vocabulary")}
    assert anchor_of(begun, section(begun)) == begun.lineage.anchor == "letters"
    save(begun.lineage, workspace)
    assert with_lineage(strangers(tmp_path, ALL), workspace) == begun
    assert "vocabulary" in experts.inputs(begun, "colours")
    rest = begin(strangers(tmp_path, ("colours", "numbers")), workspace)
    assert rest.lineage.anchor == "numbers"  # of those that were there


def test_what_a_recipe_leaves_open_is_said_only_where_the_default_has_become_another(
    tmp_path, workspace
):
    """What is made by another name of the same anchor would be made again, to the same bytes."""
    made = {f"experts/{domain}": workspace.digest(f"experts/{domain}") for domain in OLD}
    publish(workspace, "tokenizer", **made)
    first = section(begin(strangers(tmp_path), workspace))
    assert (first.anchor, first.segmentation) == (None, None)
    grown = section(begin(strangers(tmp_path, ALL), workspace, new=["colours"]))
    assert (grown.anchor, grown.segmentation) == ("letters", "letters")
    params = {"symphony.anchor": "letters", "symphony.segmentation": "letters"}
    publish(workspace, "tokenizer", params=params, **made)
    publish(workspace, "starts/symphony", params=params, **made)
    again = section(begin(strangers(tmp_path), workspace))
    assert (again.anchor, again.segmentation) == ("letters", "letters")
    left = section(begin(strangers(tmp_path, ("colours", "numbers")), workspace))
    assert (left.anchor, left.segmentation) == ("numbers", None)


def test_an_anchor_that_is_no_expert_any_more_is_followed_by_one_that_is(tmp_path, workspace):
    begun = begin(strangers(tmp_path, ALL), workspace, new=["colours"])
    save(begun.lineage, workspace)
    values = unswept(tmp_path)
    asked = {"models": ["numbers", "colours"], "router": "random", "calibration": CALIBRATION}
    values |= {"symphony": asked, "moe": {"top_k": 2}}
    rows = {"all": {"calibration": CALIBRATION}, "own": {**asked, "models": ["colours", "letters"]}}
    row = {"method": "symphony", "training": {**TRAINING, "steps": 20}}
    values["baselines"] = {name: {**row, "symphony": own} for name, own in rows.items()}
    recipe = validate(values)
    for found in (with_lineage(recipe, workspace), begin(recipe, workspace)):
        for variant in variants(found).values():
            assert anchor_of(found, variant) in chosen_of(found, variant)
    assert anchor_of(found, section(found)) == found.lineage.anchor == "numbers"
    assert variants(found)["own"].anchor is None
    asked["models"] = ["colours", "letters"]
    assert section(begin(validate(values), workspace)).anchor == "letters"  # as it was


def test_a_stranger_goes_on_where_any_text_that_it_reads_is_new(tmp_path, workspace):
    recipe = strangers(tmp_path, numbers={"mixture": {"numbers": 3, "letters": 1}})
    assert begin(recipe, workspace).parents == {}
    again = with_parents(begin(recipe, workspace), workspace, led={})
    assert again.parents == {}
    write_documents(workspace, "numbers", "new")
    taught = with_parents(begin(recipe, workspace), workspace, led={})
    assert taught.parents == {"numbers": workspace.digest("experts/numbers")}
    write_documents(workspace, "numbers", "old")
    write_documents(workspace, "letters", "new")  # of which numbers reads a share
    both = with_parents(begin(recipe, workspace), workspace, led={})
    assert set(both.parents) == set(OLD)
    assert "parents/numbers" in experts.inputs(taught, "numbers")
    assert "vocabulary" not in experts.inputs(taught, "numbers")


def test_no_stranger_learns_anew_what_is_held_out(tmp_path, workspace):
    recipe = strangers(tmp_path)
    reads = set(experts.inputs(recipe, "letters"))
    assert reads == {TRAIN.format("letters"), "vocabulary"}
    made_from = workspace.inputs("experts/letters")
    write_documents(workspace, "letters", "old", heldout="a file more")
    taught = with_parents(begin(recipe, workspace), workspace, led={})
    read_all = "documents/letters" in made_from  # whether the file is another, nobody wrote down
    assert set(taught.parents) == ({"letters"} if read_all else set())


def test_only_a_stranger_that_is_given_hangs_on_what_lies_outside(tmp_path, workspace):
    recipe = strangers(tmp_path, numbers={"model": "/models/numbers"})
    outside = {"sources/numbers.json", "sources/form/numbers"}
    assert outside <= set(experts.inputs(recipe, "numbers"))
    assert "sources/letters.json" not in experts.inputs(recipe, "letters")
    write_documents(workspace, "numbers", "new")
    taught = with_parents(begin(recipe, workspace), workspace, led={})
    assert outside.isdisjoint(experts.inputs(taught, "numbers"))


def test_a_build_of_strangers_that_did_not_end_is_no_beginning(tmp_path, workspace):
    publish(workspace, "experts/letters", "made anew, and the model was not")
    with pytest.raises(InputError, match=r"made from another experts/letters: .* flows\.symphony"):
        begin(strangers(tmp_path), workspace)


def test_a_domain_that_leaves_is_named_nowhere(tmp_path):
    recipe = strangers(tmp_path, ALL)
    values = {"models": ALL, "anchor": "colours", "merge": {"weights": {"colours": 2.0}}}
    values["calibration"] = {**CALIBRATION, "domains": ["colours", "letters"]}
    given = validate({**unswept(tmp_path), "symphony": values, "moe": {"top_k": 2}})
    rest = life_of(recipe).without(given, "colours")
    assert "colours" not in json.dumps(section(rest), default=vars)
    assert tuple(rest.domains) == OLD


def test_what_weighs_scores_or_guards_a_domain_leaves_with_it(tmp_path):
    """Else the recipe without it would be refused."""
    values = pico_recipe(tmp_path, domains=ALL)
    tolerances = {"perplexity.colours": 1.0, "task.cloze": 2.0, "perplexity.letters": 3.0}
    values["router"] = {"domain_weights": {"colours": 2.0, "letters": 0.5}}
    values["registry"] |= {"gate": {"tolerances": tolerances}}
    values["tasks"] = {
        "cloze": {"heldout": "last_word", "domain": "colours"},
        "arc": {"harness": "arc_easy", "domain": "colours"},
        "choice": {"heldout": "continuation", "domain": "letters"},
    }
    values["task_evaluation"] = {"models": ["dume", "expert_colours", "expert_letters", "mixed"]}
    training = {**TRAINING, "steps": 5, "learning_rate": 1e-3}
    weighed = {"domain_weights": {"colours": 2.0}}
    row = {"method": "full-finetune", "objective": weighed, "training": training}
    values["baselines"] = {"mixed": row}
    rest = validate(resolve(life_of(recipe := validate(values)).without(recipe, "colours")))
    assert "colours" not in json.dumps(resolve(rest))
    assert rest.router.domain_weights == {"letters": 0.5}
    assert rest.registry.gate.tolerances == {"perplexity.letters": 3.0}
    assert rest.tasks.keys() == {"arc", "choice"}
    assert rest.task_evaluation.models == ("dume", "expert_letters", "mixed")


def test_a_tuned_model_knows_its_sets_of_instructions_and_keeps_its_seed(tmp_path):
    values = pico_recipe(tmp_path, domains=OLD)
    del values["experts"], values["statistics"], values["evaluation"]
    asks = {"sources": {"asks": {"files": ["{folder}/asks.jsonl"]}}, "unseen": ["greet"]}
    gate = {"gate": {"metric": "rouge_l_unseen"}}
    training = {**TRAINING, "steps": 60, "learning_rate": 1e-3}
    tuning = {"training": training, "max_new_tokens": 6}
    rates = {"mask_learning_rate": 0.3, "multiplier_learning_rate": 1.0}
    values |= {"simoe": rates, "instructions": asks, "tuning": tuning, "registry": gate}
    recipe = validate(values)
    workspace, life = Workspace(tmp_path / "home" / "pico"), life_of(recipe)
    assert life.modelled(workspace) == ()
    publish(workspace, "tokenizer")
    publish(workspace, "seed", tokenizer=workspace.digest("tokenizer"))
    staged = workspace.stage("instructions")
    (staged / "seen.jsonl").write_text("")
    params = {"instructions": {"sources": {"asks": {}, "more": {}}}}
    workspace.publish(staged, "instructions", {"inputs": {}, "params": params})
    inputs = {name: workspace.digest(name) for name in ("seed", "instructions")}
    publish(workspace, "model", **inputs)
    assert life.modelled(workspace) == ("asks", "more")
    assert set(begin(recipe, workspace).lineage.pinned) == {"tokenizer", "seed"}
    assert set(life.without(recipe, "asks").instructions.sources) == set()


def test_every_method_says_who_makes_it():
    assert {name: method.flow for name, method in METHODS.items()} == {
        "dume": "flows.dume",
        "symphony": "flows.symphony",
        "simoe": "flows.simoe",
    }
    assert all(method.life is not None for method in METHODS.values())
