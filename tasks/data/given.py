"""Models that a recipe names, whatever form they are given in."""

import json
from collections.abc import Mapping
from pathlib import Path

from infra import settings as environment
from infra.cluster.calls import near
from infra.recipe.schema import Recipe
from tasks.engine.artifacts import FORMS, SEED
from tasks.engine.stage_run import StageRun
from upcycle_core.backbone.form import DtypeChoice, Form, changes, write_in_form
from upcycle_core.checkpoints.copy import WEIGHTS, belongs, place_files
from upcycle_core.checkpoints.given_as import given_as
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.known import FILE, KnownFiles
from upcycle_core.errors import Fault, InputError
from upcycle_core.given.resolve import resolve_model

REGISTERED = "models:/"
SEED_FIELD = "seed_model.model"
IN_FORM = "files of a given model in its form"


def known_files(recipe: Recipe, cache: Path) -> KnownFiles:
    """What is remembered of files, beside the models that are kept in ``cache``."""
    return KnownFiles(cache / FILE, verify=recipe.verify, near=near)


def given_models(recipe: Recipe) -> dict[str, str]:
    """{domain or seed: the model that is given for it}."""
    models = {
        name: domain.expert or (domain.origin.model if domain.origin is not None else None)
        for name, domain in recipe.domains.items()
    }
    models[SEED] = recipe.seed_model.model
    return {name: model for name, model in models.items() if model}


def given_fields(recipe: Recipe) -> dict[str, str]:
    """{field of the recipe: the model that it names}, the seed's last."""
    fields = {}
    for name, domain in recipe.domains.items():
        if domain.expert is not None:
            fields[f"domains.{name}.expert"] = domain.expert
        elif domain.origin is not None and domain.origin.model is not None:
            fields[f"domains.{name}.origin.model"] = domain.origin.model
    if recipe.seed_model.model is not None:
        fields[SEED_FIELD] = recipe.seed_model.model
    return fields


def given_model(recipe: Recipe, reference: str, cache: Path) -> Path:
    """Return the directory of a model: config.json, safetensors and the tokenizer.

    Args:
        recipe: Its seed, where it names one, is the base of adapters.
        reference: As for ``resolve_model``; or ``models:/NAME@ALIAS`` or ``models:/NAME/NUMBER`` of
            the MLflow registry.
        cache: Where models are kept.

    Raises:
        InputError: As ``resolve_model``; there is no such version.
    """
    seed = recipe.seed_model.model
    base = None if seed is None or seed == reference else _on_disk(seed, cache)
    known = known_files(recipe, cache)
    return resolve_model(_on_disk(reference, cache), cache, base=base, known=known)


def given_type(recipe: Recipe) -> DtypeChoice:
    """Type that given models get; beside experts that are trained here what training leaves."""
    ready = any(domain.expert is not None for domain in recipe.domains.values())
    if recipe.experts.dtype == "auto" and ready and recipe.trains_experts:
        return "fp32"
    return recipe.experts.dtype


def place_given(run: StageRun, reference: str, name: str, out: Path) -> None:
    """Write a given model, in the form that all models share, into the directory ``out``.

    Of what is published already, as where the text beside a model is another alone, weights are
    linked to.

    Args:
        run: Of a stage that has the artifact of the forms among its inputs.
        reference: As for ``given_model``.
        name: Whose form it takes: a domain, or the seed.
        out: The directory that is written.

    Raises:
        InputError: As ``given_model``; it is not what was looked at.
    """
    recipe = run.recipe
    source = given_model(recipe, reference, run.models)
    hold_against_sources(run, source, name)
    link, size = recipe.versions.given_weights == "link", recipe.moe.max_shard_bytes
    known, form = known_files(recipe, run.models), f"sources/{FORMS}/{name}"
    given = {n: digest for n, digest in tree_digest(source, known=known).items() if belongs(n)}
    made_of = [given, run.session.workspace.digest(form), size, link, run.stage.sources]
    if out == run.out and _placed_again(run, known.recalled_fact(IN_FORM, made_of)):
        return
    with known.linking(source.glob(f"*{WEIGHTS}")):
        whole = Form.load(run.path(form))
        near(write_in_form, source, whole, out, max_shard_bytes=size, link=link)
    hold_against_sources(run, source, name)  # what comes over a network takes a while to copy
    if out == run.out:
        known.fact(IN_FORM, made_of, lambda: tree_digest(out, known=known, own=True))


def _placed_again(run: StageRun, files: Mapping[str, str] | None) -> bool:
    """Fill what is staged with what is published, if that is ``files`` still."""
    workspace, artifact = run.session.workspace, run.stage.artifact(run.item)
    published = workspace.record(artifact)
    if files is None or published is None or published["files"] != files:
        return False
    if workspace.provenance(artifact) is None:  # damaged since
        return False
    with workspace.linking([artifact]):
        near(place_files, workspace.path(artifact), run.out, list(files))
    return True


def hold_against_sources(run: StageRun, source: Path, name: str) -> None:
    """Hold a given model against what the stage ``sources`` looked at, maybe hours before.

    Files that look unchanged are not read again. What lies beside a checkpoint may change.

    Args:
        run: Of a stage that has ``sources/NAME.json`` among its inputs.
        source: The directory of the model now.
        name: Whose it is: a domain, or the seed.

    Raises:
        InputError: It has other files now.
    """
    part, field, reference = SEED, "seed_model.model", run.recipe.seed_model.model
    if name != SEED:
        domain = run.recipe.domains[name]
        part, field, reference = "expert", f"domains.{name}.expert", domain.expert
        if reference is None and domain.origin is not None:
            part, field, reference = "origin", f"domains.{name}.origin.model", domain.origin.model
    before = json.loads(run.path(f"sources/{name}.json").read_text())[part]
    now = tree_digest(source, known=known_files(run.recipe, run.models))
    names = sorted(n for n in before.keys() | now.keys() if belongs(n))
    if changed := [n for n in names if before.get(n) != now.get(n)]:
        remedy = f"changed while the flow ran ({', '.join(changed)}); run it again"
        raise InputError(Fault(field, reference, remedy))


def forms(run: StageRun) -> dict[str, str]:
    """What experts of the workspace were given as, and what was changed so that they fit.

    Returns:
        Domain to that, in words; a checkpoint that was taken as it is is not there.
    """
    told = {}
    for name in run.recipe.domains:
        expert = run.path(f"experts/{name}")
        form = given_as(expert)
        if parts := [*([] if form is None else [form]), *changes(expert)]:
            told[name] = "; ".join(parts)
    return told


def registered_place(reference: str) -> Path | None:
    """Where the files of a registered model lie on this machine; None where they do not.

    Raises:
        InputError: There is no such version.
    """
    from infra.tracking.registry import Registry  # imports MLflow

    return Registry(environment.configure()).place(reference)


def _on_disk(reference: str, cache: Path) -> str:
    """``reference``, or the directory of the registered model that it names."""
    if not reference.startswith(REGISTERED):
        return reference
    from infra.tracking.registry import Registry  # imports MLflow

    return str(Registry(environment.configure()).fetch(reference, cache / "registered"))
