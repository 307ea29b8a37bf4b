"""Stage ``sources`` of models that share no seed: each is held against the others."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from infra.durable import read_json
from infra.recipe.schema import Recipe
from tasks.data.adapters import given_adapter_faults
from tasks.data.fits import type_faults
from tasks.data.given import given_fields, given_model, given_models
from tasks.data.lengths import position_faults
from tasks.data.sources import (
    KEYS,
    as_named,
    chat_faults,
    opened_models,
    write_fingerprints,
    write_forms,
    write_sources,
)
from tasks.data.task_sets import task_set_faults
from tasks.data.texts import known_texts, text_faults
from tasks.engine.artifacts import FORMS
from tasks.engine.stage import StageRun, stage
from tasks.symphony.checks import is_given
from tasks.symphony.variants import anchor_of, lengths, section, trains_shape
from tasks.symphony.vocabulary import segmentation_faults, sharing
from upcycle_core.architectures.compare import MUST_AGREE, compare_strangers, computed
from upcycle_core.architectures.families import family_of
from upcycle_core.backbone.form import Form, common_forms
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import TokenIds, load_tokenizer
from upcycle_core.corpora.encoding import bos_faults
from upcycle_core.corpora.shards import end_faults
from upcycle_core.corpora.sources import source_fingerprint
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.training.config import LlamaShape

SHAPED = {
    "model_type": "family",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "attention_heads",
    "num_key_value_heads": "key_value_heads",
    "max_position_embeddings": "max_positions",
    "rope_parameters": "rope_theta",
    "tie_word_embeddings": "tie_embeddings",
}
"""{attribute of config.json: what says it of a model that is trained here}"""


@stage("sources", lambda recipe, item: (), params=(*KEYS, "outside", "symphony"), always=True)
def sources(run: StageRun) -> None:
    """Write sha256 of all that is outside; ``outside/NAME.json`` of texts to judge models on."""
    recipe = run.recipe
    raise_faults(outside_faults(recipe, run.models))
    write_sources(run)
    own = section(recipe)
    anchor = anchor_of(recipe, own) if own.rope == "anchor" else None
    write_forms(
        run,
        of_one_seed=False,
        rope_of=anchor,
        own_heads=recipe.lineage is not None and _has_heads(run),
        settled=partial(_had_form, run),
    )
    if recipe.lineage is not None:
        _say_short(run)
    known = known_texts(recipe, run.models)
    for name, source in recipe.outside.items():
        fingerprint = source_fingerprint(source, folder=recipe.text_folder, known=known)
        write_fingerprints(run.out / "outside" / f"{name}.json", fingerprint)


def _say_short(run: StageRun) -> None:
    """Say where a model that comes has fewer positions than what the others were made with."""
    recipe, workspace = run.recipe, run.session.workspace
    configs = {
        f"domains.{name}": CheckpointReader(given_model(recipe, model, run.models)).config
        for name, model in given_models(recipe).items()
        if not workspace.inputs(f"experts/{name}")
    }
    for fault in position_faults(replace(recipe, lineage=None), lengths(recipe), configs):
        run.session.log(f"WARNING: {fault}, or leave it, as the others were made with it")


def _has_heads(run: StageRun) -> bool:
    """Whether a trained expert that stays has a head of its own, whoever brought the first one."""
    begun = (n for n, d in run.recipe.domains.items() if d.origin is not None and d.origin.model)
    configs = [_trained(run, name) for name in begun]
    return any(own and not _resolved(own)["tie_word_embeddings"] for own in configs)


def _trained(run: StageRun, name: str) -> Mapping[str, Any] | None:
    """The configuration of a domain's trained expert; None without one."""
    found = read_json(run.session.workspace.path(f"experts/{name}") / "config.json")
    return found if isinstance(found, dict) else None


def _had_form(run: StageRun, name: str, form: Form) -> Form:
    """The form that what a trained expert began with had then, if that is as good as ``form``.

    That expert would be trained again for another model's type or length, which need not be that of
    all: what is joined has a type that holds all and the shortest length.

    Raises:
        InputError: The expert has no head of its own, and would need one.
    """
    workspace, origin = run.session.workspace, run.recipe.domains[name].origin
    artifact = f"sources/{FORMS}/{name}"
    made_from = workspace.inputs(f"experts/{name}")
    given = None if origin is None else origin.model
    if run.recipe.lineage is None or given is None:
        return form
    config = _config_of(run, given)
    now = _resolved({**config, **form.config})
    if name in run.recipe.parents or f"parents/{name}" in made_from:
        # It goes on from itself: no form of what it began with changes it any more.
        own = _trained(run, name)
        raise_faults(_head_faults(name, given, _resolved(own) if own else now, now))
    if artifact not in made_from:
        return form
    folders = workspace.path("sources"), run.out
    files = [read_json(folder / f"{name}.json") or {} for folder in folders]
    is_other = files[0].get("origin") != files[1]["origin"]
    if made_from[artifact] != workspace.digest(artifact) or is_other:
        return form
    had = Form.load(workspace.path(artifact))
    was = _resolved({**config, **had.config})
    raise_faults(_head_faults(name, given, was, now))
    is_same = computed(was["rope_parameters"]) == computed(now["rope_parameters"])
    return had if is_same else form


def _head_faults(
    name: str, given: str, was: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[Fault]:
    """Where a trained expert has no head of its own, and would need one."""
    if was["tie_word_embeddings"] != now["tie_word_embeddings"]:
        remedy = "is joined already, with its embedding for a head, and another model brings a "
        remedy += "head of its own: leave that out, or make all anew (flows.symphony RECIPE "
        remedy += "--rebuild)"
        yield Fault(f"domains.{name}.origin.model", given, remedy)


def _resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    return family_of(config).resolve(config)


def _config_of(run: StageRun, model: str) -> Mapping[str, Any]:
    return CheckpointReader(given_model(run.recipe, model, run.models)).config


def outside_faults(recipe: Recipe, cache: Path) -> list[Fault]:
    """What is wrong with texts, models and tasks outside the workspace."""
    texts = text_faults(recipe, known_texts(recipe, cache))
    found = [*texts, *model_faults(recipe, cache), *task_set_faults(recipe)]
    origins = ((domain.expert, domain.origin) for domain in recipe.domains.values())
    models = [expert or (origin.model if origin else None) for expert, origin in origins]
    return found or list(chat_faults(recipe, models, cache))


def model_faults(recipe: Recipe, cache: Path) -> list[Fault]:
    """What is wrong with given models: each alone, and all of them together."""
    given = given_fields(recipe)
    readers, tokens, faults = opened_models(recipe, given, cache)
    if not faults:
        faults += _mark_faults(recipe, readers)
    ready = [f"domains.{n}.expert" for n, domain in recipe.domains.items() if domain.expert]
    one_rope = section(recipe).rope == "same"
    faults += compare_strangers(readers, tokens, ready=ready, one_rope=one_rope)
    configs = {field: reader.config for field, reader in readers.items()}
    faults += position_faults(recipe, lengths(recipe), configs)
    faults += given_adapter_faults(recipe, [r for n, r in readers.items() if n not in ready])
    faults += type_faults(recipe)
    faults += _response_faults(recipe, tokens)
    if trains_shape(recipe):
        faults += _shape_faults(recipe, readers)
    names = [name for name, domain in recipe.domains.items() if is_given(domain)]
    rules = section(recipe).segmentation
    if not faults and names and (len(names) == len(recipe.domains) or rules in names):
        models = dict(zip(names, (r.directory for r in readers.values()), strict=True))
        faults += segmentation_faults(models, rules)
    return [*as_named(faults, given, readers)]


def _mark_faults(recipe: Recipe, readers: Mapping[str, CheckpointReader]) -> Iterator[Fault]:
    """Where a model cannot begin texts, or one that training goes on from cannot end them."""
    for field, reader in readers.items():
        tokenizer = load_tokenizer(reader.directory)
        yield from bos_faults(tokenizer, recipe.corpus.bos, name=f"the tokenizer of {field}")
        if field.endswith(".origin.model"):
            yield from end_faults(tokenizer, field=field)


def _response_faults(recipe: Recipe, tokens: Mapping[str, TokenIds]) -> Iterator[Fault]:
    """Responses that models would be compared on in tokens of several kinds."""
    if recipe.evaluation.loss != "responses":
        return
    kinds = {field: own.fingerprint for field, own in tokens.items()}
    shared = sharing(recipe)
    for name, domain in recipe.domains.items():
        if not is_given(domain):  # its tokenizer is trained here
            kinds[f"domains.{name}"] = "shared" if name in shared else name
    first = next(iter(kinds), "")
    for field, kind in kinds.items():
        if kind != kinds[first]:
            remedy = f"{field} has another tokenizer than {first}, and responses are compared in "
            yield Fault("evaluation.loss", "responses", f"{remedy}one alone; use all")
            return


def _shape_faults(recipe: Recipe, readers: Mapping[str, CheckpointReader]) -> Iterator[Fault]:
    """Where given models differ from those that are trained here from random weights.

    Given ones are held against them in the form that they are brought into.
    """
    trained = _shaped(recipe.seed_model.shape)
    for field, own in _formed(recipe, readers).items():
        for name, value in trained.items():
            if name != "vocab_size" and computed(own.get(name)) != computed(value):
                yield Fault(f"{field}.config.{name}", own.get(name), _remedy(name, value, own))
                if name == "model_type":  # whose defaults are others
                    break


def _shaped(shape: LlamaShape) -> dict[str, Any]:
    """What must agree, of a model that is trained here."""
    said = {name: getattr(shape, own) for name, own in SHAPED.items()}
    said |= {"head_dim": shape.hidden_size // shape.attention_heads, "vocab_size": 1}
    said["rope_parameters"] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    full = family_of(said).resolve(said)
    return {name: full.get(name) for name in ("model_type", *MUST_AGREE)}


def _formed(
    recipe: Recipe, readers: Mapping[str, CheckpointReader]
) -> dict[str, Mapping[str, Any]]:
    """The configurations of given models, as they will be; of those that can be read."""
    own, ruling = section(recipe), None
    if own.rope == "anchor":
        anchor = anchor_of(recipe, own)
        ruling = next((field for field in readers if field.split(".")[1] == anchor), None)
    try:
        forms = common_forms(readers, {}, rope_of=ruling)
        return {
            field: family_of(reader.config).resolve({**reader.config, **forms[field].config})
            for field, reader in readers.items()
        }
    except InputError:  # said already
        return {}


def _remedy(name: str, value: object, given: Mapping[str, Any]) -> str:
    """What to do where models that are trained here have ``value``."""
    is_plain = given["rope_parameters"].get("rope_type") == "default"
    if name in SHAPED and (name != "rope_parameters" or is_plain):
        remedy = f"seed_model.shape has {value!r} for the models that are trained here; "
        return f"{remedy}set seed_model.shape.{SHAPED[name]} to the given model's"
    remedy = f"models that are trained here have {value!r}, which no recipe changes; give every "
    return f"{remedy}domain a model, or have them begin with this one (origin.model)"
