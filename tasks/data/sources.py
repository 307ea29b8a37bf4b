"""Stage ``sources``: what comes from outside the workspace, looked at and fingerprinted.

It always runs, and is where bad input is found: every fault of every domain, in one message.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.data.segmentation import segmentation_faults
from tasks.data.task_files import task_fingerprint, task_set_faults
from tasks.engine.artifacts import FORMS, INSTRUCTIONS, SEED
from tasks.engine.stage import StageRun, stage
from upcycle_core.architectures.compare import compare_experts, compare_strangers
from upcycle_core.architectures.families import family_of
from upcycle_core.backbone.form import Form, common_forms
from upcycle_core.checkpoints.fetch import resolve_model
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import TokenIds, check_tokenizer, token_ids
from upcycle_core.corpora.sources import source_faults, source_fingerprint
from upcycle_core.corpora.tuning.prepare import instruction_faults, instruction_fingerprint
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.training.config import LlamaShape

TEXTS = ("train", "calibration", "heldout", "elsewhere")
# What training costs on disk: weights and two moments, in two checkpoints, and the result.
TRAINING_COPIES = 8


@stage(
    "sources",
    inputs=lambda recipe, domain: (),
    params=(
        "folder",
        "domains",
        "outside",
        "seed_model.model",
        "experts.dtype",
        "symphony",
        "tasks",
        "task_evaluation.folder",
        "simoe",
        "instructions",
    ),
    always=True,
)
def sources(run: StageRun) -> None:
    """Write ``DOMAIN.json``, ``seed.json``, ``instructions.json``, ``tasks/TASK.json``: sha256 of
    all that is outside; and ``form/DOMAIN``, ``form/seed``: what given models are made into."""
    recipe = run.recipe
    check(recipe, run.models)
    cache = run.models
    folder = recipe.text_folder
    for name, domain in recipe.domains.items():
        found: dict[str, object] = {
            part: source_fingerprint(source, folder=folder)
            for part in TEXTS
            if (source := getattr(domain, part)) is not None
        }
        if domain.expert is not None:
            found["expert"] = tree_digest(resolve_model(domain.expert, cache))
        if domain.origin is not None and domain.origin.model is not None:
            found["origin"] = tree_digest(resolve_model(domain.origin.model, cache))
        _write(run.out / f"{name}.json", found)
    for name, source in recipe.outside.items():
        (run.out / "outside").mkdir(exist_ok=True)
        found = dict(source_fingerprint(source, folder=folder))
        _write(run.out / "outside" / f"{name}.json", found)
    if recipe.seed_model.model is not None:
        _write(
            run.out / f"{SEED}.json",
            {SEED: tree_digest(resolve_model(recipe.seed_model.model, cache))},
        )
    given = _given(recipe, cache)
    for name, form in _forms(recipe, given).items():
        form.save(run.out / FORMS / name)
        if form.said:
            run.session.log(
                f"{name}: brought into one form with the others: {'; '.join(form.said)}"
            )
        unread = family_of(given[name].config).unread(given[name].config)
        if unread:
            run.session.log(
                f"{name}: nothing reads {', '.join(unread)} of its config.json: left out"
            )
    if recipe.simoe is not None:
        read = instruction_fingerprint(recipe.instructions, folder=folder)
        _write(run.out / f"{INSTRUCTIONS}.json", read)
    for name in recipe.tasks:
        (run.out / "tasks").mkdir(exist_ok=True)
        _write(run.out / "tasks" / f"{name}.json", task_fingerprint(recipe, name))


def _given(recipe: Recipe, cache: Path) -> dict[str, CheckpointReader]:
    """Every given model, by its domain; ``seed`` for the seed."""
    models = {
        name: domain.expert or (domain.origin.model if domain.origin is not None else None)
        for name, domain in recipe.domains.items()
    }
    models[SEED] = recipe.seed_model.model
    return {n: CheckpointReader(resolve_model(m, cache)) for n, m in models.items() if m}


def _forms(recipe: Recipe, given: Mapping[str, CheckpointReader]) -> dict[str, Form]:
    """What each given model is made into."""
    if not given:
        return {}
    dtype = recipe.experts.dtype
    if dtype == "auto" and recipe.trains_experts:
        dtype = "fp32"  # what training leaves
    if recipe.symphony is None:
        tokens = {name: token_ids(reader.directory) for name, reader in given.items()}
        return common_forms(given, tokens, dtype=dtype)
    anchor = recipe.anchor_of(recipe.symphony) if recipe.symphony.rope == "anchor" else None
    return common_forms(given, {}, dtype=dtype, rope_of=anchor)


def check(recipe: Recipe, cache: Path) -> None:
    """Look at everything that the recipe names outside the workspace.

    Args:
        recipe: What to make.
        cache: Where models from a hub are kept.

    Raises:
        InputError: With every fault of every text, model and task.
    """
    found = [*text_faults(recipe), *model_faults(recipe, cache), *task_set_faults(recipe)]
    if recipe.simoe is not None:
        found += instruction_faults(recipe.instructions, folder=recipe.text_folder)
    raise_faults(found)


def text_faults(recipe: Recipe) -> list[Fault]:
    """What is wrong with the texts."""
    folder = recipe.text_folder
    named = {
        f"domains.{name}.{part}": source
        for name, domain in recipe.domains.items()
        for part in TEXTS
        if (source := getattr(domain, part)) is not None
    }
    named |= {f"outside.{name}": source for name, source in recipe.outside.items()}
    return [
        fault
        for field, source in named.items()
        for fault in source_faults(source, field, folder=folder)
    ]


def model_faults(recipe: Recipe, cache: Path) -> list[Fault]:
    """What is wrong with ready experts and a given seed: each alone, and all of them together."""
    if recipe.method == "symphony":
        return stranger_faults(recipe, cache)
    given = {
        f"domains.{name}.expert": domain.expert
        for name, domain in recipe.domains.items()
        if domain.expert is not None
    }
    experts = list(given)
    if recipe.seed_model.model is not None:
        given["seed_model.model"] = recipe.seed_model.model
    readers, tokens, faults = _opened(given, cache)
    if recipe.trains_experts and given and recipe.seed_model.model is None:
        faults.append(
            Fault(
                "seed_model.model",
                None,
                "some domains bring an expert and others do not; name the seed model that the "
                "experts came from",
            )
        )
    faults += compare_experts(readers, tokens, ready=experts)
    return [*faults, *_disk_faults(recipe, readers, cache.parent)]


def stranger_faults(recipe: Recipe, cache: Path) -> list[Fault]:
    """What is wrong with the models of a recipe whose domains share no seed."""
    given = {}
    for name, domain in recipe.domains.items():
        if domain.expert is not None:
            given[f"domains.{name}.expert"] = domain.expert
        elif domain.origin is not None and domain.origin.model is not None:
            given[f"domains.{name}.origin.model"] = domain.origin.model
    readers, tokens, faults = _opened(given, cache)
    assert recipe.symphony is not None
    faults += compare_strangers(
        readers,
        tokens,
        ready=[f"domains.{n}.expert" for n, d in recipe.domains.items() if d.expert is not None],
        one_rope=recipe.symphony.rope == "same",
    )
    if recipe.trains_shape:
        faults += _shape_faults(recipe.seed_model.shape, readers)
    elif not faults:
        models = dict(zip(recipe.domains, (r.directory for r in readers.values()), strict=True))
        faults += segmentation_faults(models, recipe.symphony.segmentation)
    return [*faults, *_disk_faults(recipe, readers, cache.parent)]


def _shape_faults(shape: LlamaShape, readers: Mapping[str, CheckpointReader]) -> Iterator[Fault]:
    """Where given models differ from those that are trained here from random weights."""
    wanted = {
        "model_type": shape.family,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.attention_heads,
        "num_key_value_heads": shape.key_value_heads,
    }
    for field, reader in readers.items():
        for name, value in wanted.items():
            if reader.config.get(name, value) != value:
                remedy = f"seed_model.shape has {value!r} for the models that are trained here; "
                remedy += "set it to the given model's"
                yield Fault(f"{field}.config.{name}", reader.config[name], remedy)


def _opened(
    given: Mapping[str, str], cache: Path
) -> tuple[dict[str, CheckpointReader], dict[str, TokenIds], list[Fault]]:
    """Readers and tokens of models, and what keeps the others from being read."""
    readers, tokens, faults = {}, {}, []
    for field, reference in given.items():
        try:
            directory = resolve_model(reference, cache)
            readers[field] = CheckpointReader(directory, field=field)
            tokens[field] = token_ids(directory)
            check_tokenizer(directory)
        except InputError as error:
            faults += [_at(field, fault) for fault in error.faults]
    return readers, tokens, faults


def _at(field: str, fault: Fault) -> Fault:
    """``fault`` with the recipe's field, where what found it did not know it."""
    named = fault.field if fault.field.startswith(field) else f"{field}: {fault.field}"
    return Fault(named, fault.value, fault.remedy)


def _disk_faults(recipe: Recipe, readers: dict[str, CheckpointReader], home: Path) -> list[Fault]:
    """The result holds every expert once, beside a copy of each."""
    if not readers:
        return []
    size = max(
        sum(file.stat().st_size for file in reader.directory.glob("*.safetensors"))
        for reader in readers.values()
    )
    copies = sum(
        1 + 1 + (TRAINING_COPIES if domain.expert is None else 0)
        for domain in recipe.domains.values()
    )
    home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home).free
    if free >= copies * size:
        return []
    return [
        Fault(
            "workspace",
            str(home),
            f"{free / 1e9:.1f} GB free, about {copies * size / 1e9:.1f} GB needed; free some space "
            "or set UPCYCLE_HOME to a larger disk",
        )
    ]


def _write(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
