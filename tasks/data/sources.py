"""Stage ``sources``: what comes from outside the workspace, looked at and fingerprinted.

It always runs, and is where bad input is found: every fault of every domain, in one message.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.recipe.checks import learnt_whole, responses_asked
from infra.recipe.schema import Recipe
from tasks.data.adapters import given_adapter_faults
from tasks.data.fits import fit_faults, type_faults
from tasks.data.given import (
    SEED_FIELD,
    given_fields,
    given_model,
    given_models,
    given_type,
    known_files,
)
from tasks.data.lengths import position_faults
from tasks.data.licences import FILE as LICENCES
from tasks.data.licences import licence_faults, stated_licences
from tasks.data.task_sets import task_fingerprint, task_set_faults
from tasks.data.texts import TEXTS, known_texts, named_texts, text_faults
from tasks.data.tokenizer import speaker
from tasks.engine.artifacts import FORMS, SEED
from tasks.engine.method import ON_TEXT
from tasks.engine.pinned import given_faults, is_other_seed
from tasks.engine.stage import StageRun, stage
from upcycle_core.architectures.compare import compare_experts
from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.kinship import apart
from upcycle_core.backbone.form import DtypeChoice, Form, common_forms, holder_of
from upcycle_core.backbone.write import weights_type
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.load import DTYPES
from upcycle_core.checkpoints.reader import CheckpointReader, read_config
from upcycle_core.checkpoints.tokenizer import (
    TokenIds,
    check_tokenizer,
    load_tokenizer,
    manners,
    token_ids,
)
from upcycle_core.corpora.chat_template import chat_template_of
from upcycle_core.corpora.conversations import WEIGHT
from upcycle_core.corpora.encoding import bos_faults
from upcycle_core.corpora.shards import end_faults
from upcycle_core.corpora.sources import (
    first_chats,
    source_fingerprint,
)
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.given.adapter import ADAPTER_CONFIG

CHATS_TRIED = 64
"""Of each text, written before anything is computed; all are when they are tokenised."""
CHOICES: tuple[DtypeChoice, ...] = ("fp32", "bf16", "fp16")
KEYS = (
    "folder",
    "domains",
    "seed_model.model",
    "seed_model.text",
    "tasks",
    "task_evaluation.folder",
    "experts.dtype",
)
"""What names things outside, or says what they become, whatever the method."""


@stage("sources", lambda recipe, item: (), params=KEYS, always=True)
def sources(run: StageRun) -> None:
    """Write ``DOMAIN.json``, ``seed.json``, ``tasks/TASK.json``: sha256 of all that is outside.

    And ``licences.json``: what models say of theirs; ``form/DOMAIN``, ``form/seed``: what given
    models are made into.
    """
    raise_faults(outside_faults(run.recipe, run.models))
    write_sources(run)
    write_forms(run)


def write_sources(run: StageRun) -> None:
    """Write the fingerprints of what any recipe may name.

    Raises:
        InputError: A given seed is not the one that is built upon.
    """
    recipe = run.recipe
    known, folder = known_files(recipe, run.models), recipe.text_folder
    texts = known_texts(recipe, run.models)
    for name, domain in recipe.domains.items():
        found: dict[str, object] = {
            part: source_fingerprint(source, folder=folder, known=texts)
            for part in TEXTS
            if (source := getattr(domain, part)) is not None
        }
        origin = None if domain.origin is None else domain.origin.model
        for part, model in {"expert": domain.expert, "origin": origin}.items():
            if model is not None:
                found[part] = tree_digest(given_model(recipe, model, run.models), known=known)
        write_fingerprints(run.out / f"{name}.json", found)
    if recipe.seed_model.model is not None:
        given = given_model(recipe, recipe.seed_model.model, run.models)
        digest = tree_digest(given, known=known)
        write_fingerprints(run.out / f"{SEED}.json", {SEED: digest})
        if is_other_seed(recipe, run.session.workspace, run.out / f"{SEED}.json"):
            raise_faults(given_faults(recipe, run.session.workspace))
            said = "has other files now than the seed that is built upon was made of, which stays"
            run.session.log(f"{recipe.seed_model.model} {said}")
    if recipe.seed_text is not None:
        read = source_fingerprint(recipe.seed_text, folder=folder, known=texts)
        write_fingerprints(run.out / f"{SEED}.json", read)
    write_fingerprints(run.out / LICENCES, stated_licences(recipe, run.models))
    for name in recipe.tasks:
        write_fingerprints(run.out / "tasks" / f"{name}.json", task_fingerprint(recipe, name))


def write_forms(
    run: StageRun,
    *,
    of_one_seed: bool = True,
    rope_of: str | None = None,
    own_heads: bool = False,
    settled: Callable[[str, Form], Form] = lambda name, form: form,
) -> None:
    """Write what each given model is made into, and say what that changes and leaves out.

    Args:
        run: Of the stage; ``form/DOMAIN`` and ``form/seed`` are written.
        of_one_seed: Whether the models share a vocabulary.
        rope_of: Domain whose rope all get.
        own_heads: Whether all get a head of their own.
        settled: The form of a domain's model in the place of one that all could have.
    """
    recipe = run.recipe
    known = known_files(recipe, run.models)
    given = {
        n: CheckpointReader(given_model(recipe, m, run.models), known=known)
        for n, m in given_models(recipe).items()
    }
    tokens = {n: token_ids(r.directory) for n, r in given.items()} if of_one_seed else {}
    dtype = given_type(recipe)
    backbone, pinned = run.session.workspace.path("backbone"), "backbone" in recipe.pinned
    if recipe.experts.dtype == "auto" and pinned and backbone.is_dir():
        stands_on = weights_type(CheckpointReader(backbone, field="backbone"))
        dtype = next(name for name in CHOICES if DTYPES[name] == stands_on)
    strange = {n: _strange(far, next(iter(given))) for n, far in apart(given).items()}
    forms = common_forms(given, tokens, dtype=dtype, rope_of=rope_of, own_heads=own_heads)
    others = _other_manners(given, _ruling(forms, given, speaker(recipe))) if of_one_seed else {}
    for name, common in forms.items():
        form = settled(name, common)
        if of_one_seed and name in strange:
            run.session.log(f"WARNING: {name}: {strange[name]}")
            replace(form, said=(*form.said, strange[name])).save(run.out / FORMS / name)
        else:
            form.save(run.out / FORMS / name)
        for line in others.get(name, ()):
            run.session.log(f"{name}: {line}")
        if form.said:
            said = "; ".join(form.said)
            run.session.log(f"{name}: brought into one form with the others: {said}")
        if (given[name].directory / ADAPTER_CONFIG).is_file():
            said = "an adapter lies beside its weights, and is not merged into them; if it is to be"
            run.session.log(f"WARNING: {name}: {said}, give it in a directory of its own")
        config = given[name].config
        if unread := family_of(config).unread(config):
            said = ", ".join(unread)
            run.session.log(f"{name}: nothing reads {said} of its config.json: left out")


def _ruling(
    forms: Mapping[str, Form], given: Mapping[str, CheckpointReader], name: str | None
) -> str | None:
    """Whose tokenizer the MoE has: that of ``name``, or of the model whose added tokens it gets."""
    if name is None or name not in forms or forms[name].tokenizer is None:
        return name
    tokenizer = forms[name].tokenizer
    return next(other for other, reader in given.items() if reader.directory == tokenizer)


def _other_manners(
    given: Mapping[str, CheckpointReader], ruling: str | None
) -> dict[str, list[str]]:
    """What other models' tokenizers do otherwise than the one whose the MoE has."""
    if ruling is None or ruling not in given or len(given) < 2:
        return {}
    found = {name: manners(reader.directory) for name, reader in given.items()}
    rule = found.pop(ruling)
    return {
        name: [
            f"its tokenizer's {what} is another than that of {ruling}, whose the model has"
            for what, own in theirs.items()
            if own != rule[what]
        ]
        for name, theirs in found.items()
    }


def _strange(far: float, other: str) -> str:
    """What is said of a model that is none of the same seed's, by its distance."""
    said = f"shares no seed with {other}: their attention weights are {far:.2f} of their size apart"
    said += " (1.41 where nothing is shared), so that their average, which DUME takes, is no model"
    return said + "; Symphony-MoE aligns such models first: give the recipe `symphony: {}`"


def outside_faults(recipe: Recipe, cache: Path, *, lengths: Iterable[str] = ON_TEXT) -> list[Fault]:
    """What is wrong with texts, models and tasks outside the workspace.

    Args:
        recipe: What to make, of experts of one seed.
        cache: Where models from a hub are kept.
        lengths: Sections whose ``sequence_length`` models must have positions for.
    """
    models = model_faults(recipe, cache, lengths=lengths)
    found = [*text_faults(recipe, known_texts(recipe, cache)), *models, *task_set_faults(recipe)]
    name = SEED if recipe.trains_seed else speaker(recipe)
    if found or name is None:
        return found
    reader = _read_by(recipe, name, cache)
    model = None if reader is None else given_models(recipe)[reader]
    return [*_mark_faults(recipe, reader, cache)] or list(chat_faults(recipe, [model], cache))


def _mark_faults(recipe: Recipe, name: str | None, cache: Path) -> Iterator[Fault]:
    """What the tokenizer that reads the texts lacks to begin and to end them."""
    if name is None or not named_texts(recipe):
        return
    tokenizer = load_tokenizer(given_model(recipe, given_models(recipe)[name], cache))
    field = "seed_model.model" if name == SEED else f"domains.{name}.expert"
    yield from end_faults(tokenizer, field=field)
    if recipe.trains_experts or recipe.baselines:  # on texts that it stands between
        yield from _beyond([tokenizer.eos_token_id or 0], tokenizer, _rows(recipe, cache), field)
    yield from bos_faults(tokenizer, recipe.corpus.bos, name=f"the tokenizer of {field}")


def _rows(recipe: Recipe, cache: Path) -> int | None:
    """Rows that the embeddings of given models get; None where no config.json says."""
    models = dict.fromkeys(given_models(recipe).values())
    configs = [read_config(given_model(recipe, model, cache), model)[0] for model in models]
    return max((c["vocab_size"] for c in configs if "vocab_size" in c), default=None)


def _beyond(ids: Sequence[int], tokenizer: Any, rows: int | None, field: str) -> Iterator[Fault]:
    """A token among ``ids`` that no model has a row for."""
    if rows is not None and (last := max(ids, default=0)) >= rows:
        token = tokenizer.convert_ids_to_tokens(last)
        remedy = f"its settings name {token!r}, id {last}, which tokenizer.json has not and the "
        remedy += f"embedding's {rows} rows neither; name a token that the model knows"
        yield Fault(field, tokenizer.name_or_path, remedy)


def _read_by(recipe: Recipe, name: str, cache: Path) -> str | None:
    """Whose tokenizer reads the texts, domain or seed; None where it is trained here.

    That of ``name``, or the one with more tokens that its backbone gets: see ``common_forms``.
    """
    models = given_models(recipe)
    if name not in models:
        return None
    tokens = {n: token_ids(given_model(recipe, model, cache)) for n, model in models.items()}
    holder = holder_of(tokens)
    return name if tokens[name].ids == tokens[holder].ids else holder


def chat_faults(recipe: Recipe, models: Sequence[str | None], cache: Path) -> Iterator[Fault]:
    """What keeps tokenizers from writing the chats, found on the first ones of each text.

    Args:
        recipe: Whose texts are read.
        models: Those whose tokenizers read them; None for one that is trained here.
        cache: Where models from a hub are kept.
    """
    chats = {field: text for field, text in named_texts(recipe).items() if text.form == "chat"}
    yield from _asked_faults(recipe, models, cache)
    if None in models:
        remedy = "a tokenizer that is trained here has no chat template; start from a model, or "
        remedy += "read the records with a template of the text's own: '{prompt} {response}'"
        yield from (Fault(f"{field}.form", "chat", remedy) for field in chats)
    counted, whole = {field for _, field, _ in responses_asked(recipe)}, learnt_whole(recipe)
    rows = _rows(recipe, cache) if chats else None
    for reference in filter(None, models if chats else ()):
        template = chat_template_of(given_model(recipe, reference, cache))
        for field, source in chats.items():
            try:
                for chat in first_chats(source, CHATS_TRIED, folder=recipe.text_folder):
                    ids = template.ids(chat)
                    raise_faults(_beyond(ids, template.tokenizer, rows, "chat_template"))
                    if field in counted:
                        template.responses(chat, ids)
                    if field in whole and any(WEIGHT in message for message in chat.messages):
                        remedy = f"learns all that is said, and {chat.place} has a response of "
                        remedy += "weight 0, which is not to be learnt: set responses"
                        raise_faults([Fault(whole[field], "all", remedy)])
            except InputError as error:
                yield from (fault.within(field) for fault in error.faults)


def _asked_faults(recipe: Recipe, models: Sequence[str | None], cache: Path) -> Iterator[Fault]:
    """Tasks in chats, of models without a template; tuning on instructions gives them one."""
    if not (recipe.tasks and recipe.task_evaluation.chat_template) or recipe.instructions.sources:
        return
    # Which rows are scored, if not all, is the method's to tell.
    scores_all = recipe.task_evaluation.models is None
    given = dict.fromkeys(given_models(recipe).values() if scores_all else ())
    opened = {model: chat_template_of(given_model(recipe, model, cache)) for model in given}
    without = [model for model, own in opened.items() if own.tokenizer.chat_template is None]
    if None in models:
        without.append("a tokenizer that is trained here")
    for name in without:
        remedy = f"{name} has no chat template; set it to false"
        yield Fault("task_evaluation.chat_template", True, remedy)


def model_faults(recipe: Recipe, cache: Path, *, lengths: Iterable[str] = ON_TEXT) -> list[Fault]:
    """What is wrong with ready experts and a given seed: each alone, and all of them together."""
    given = given_fields(recipe)
    ready = [field for field in given if field != SEED_FIELD]
    readers, tokens, faults = opened_models(recipe, given, cache)
    if recipe.trains_experts and given and recipe.seed_model.model is None:
        remedy = "some domains bring an expert and others do not; name the seed model that the "
        faults.append(Fault("seed_model.model", None, f"{remedy}experts came from"))
    faults += compare_experts(readers, tokens, ready=ready)
    configs = {field: reader.config for field, reader in readers.items()}
    faults += position_faults(recipe, lengths, configs)
    faults += given_adapter_faults(recipe, [r for n, r in readers.items() if n not in ready])
    faults += type_faults(recipe)
    if not faults:
        faults += fit_faults(recipe, next(iter(configs.values()), None))
    return [*as_named(faults, given, readers)]


def as_named(
    faults: Iterable[Fault], given: Mapping[str, str], readers: Mapping[str, CheckpointReader]
) -> Iterator[Fault]:
    """Faults that name models as the recipe does, where they lie elsewhere in safetensors.

    Args:
        faults: What is wrong with them.
        given: {field of the recipe: the model that it names}
        readers: Of those that could be read, by the same fields.
    """
    places = {field: str(reader.directory) for field, reader in readers.items()}
    moved = {f: place for f, place in places.items() if Path(given[f]).expanduser() != Path(place)}
    names = {place: given[field] for field, place in reversed(moved.items())}
    for fault in faults:
        told = fault.naming(names)
        owns = (f for f, place in moved.items() if (fault.field, fault.value) == (f, place))
        field = next(owns, None)  # one place may be that of two models with the same files
        yield told if field is None else replace(told, value=given[field])


def opened_models(
    recipe: Recipe, given: Mapping[str, str], cache: Path
) -> tuple[dict[str, CheckpointReader], dict[str, TokenIds], list[Fault]]:
    """Readers and tokens of models, and what keeps the others from being read."""
    readers, tokens, faults = {}, {}, []
    known = known_files(recipe, cache)
    for field, reference in given.items():
        try:
            directory = given_model(recipe, reference, cache)
            readers[field] = CheckpointReader(directory, field=field, known=known)
            tokens[field] = token_ids(directory)
            check_tokenizer(directory)
        except InputError as error:
            faults += [fault.within(field) for fault in error.faults]
    if not faults:
        faults += licence_faults(recipe, cache)
    return readers, tokens, faults


def write_fingerprints(path: Path, values: object) -> None:
    """Write a file of the artifact."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
