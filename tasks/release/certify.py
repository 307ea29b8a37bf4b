"""The arrival certificate: what each reader made of a model, in the form in which it takes it.

Readers lose experts in silence. So each is asked, with its own loader, for the model as it is, with
two experts exchanged, and with routers of zeros; what it answers is held against our own forward
pass, and what it has loaded against the checkpoint, tensor by tensor.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from infra.readers.reader import READERS, Reader, ReaderError, Said, ask, to_gguf
from infra.temporary import owned_folder
from tasks.release.source import AS_IT_IS, Source, reason_for_disk
from tasks.release.verdict import TOLERANCES, Row, judged, lost, tolerance_of
from upcycle_core.certificate.answers import moved
from upcycle_core.certificate.gguf_tensors import window_in_gguf
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import Fault, InputError, raise_faults

FORMS = {"checkpoint": ("fp32", "bf16"), "gguf": ("F32", "F16", "Q8_0")}
EXPANDED = "DeRS expanded"
READ_EXPANDED = ("transformers", "vllm", "llama.cpp")
"""MLflow reads registered versions, and this is none."""
SECONDS = 900.0


def certify(
    files: Path,
    *,
    readers: Collection[str] = tuple(READERS),
    forms: Collection[str] = tuple(TOLERANCES),
    seconds: float = SECONDS,
    arrived: Callable[[str], Path] | None = None,
    say: Callable[[str], None] = print,
) -> list[Row]:
    """Ask readers for a model.

    Args:
        files: Those of a registered version: a checkpoint, and what MLflow needs.
        readers: Who is asked.
        forms: Of those that they take; checkpoints in the first that memory has room for.
        seconds: How long a reader, or the converter, may take at a time.
        arrived: From the name of a variant to the files that readers get in place of ours: for
            tests, which damage them.
        say: Hears a line before each.

    Returns:
        A row of each reader and form; none is missing.

    Raises:
        InputError: An unknown reader, forms that none of them takes, or files that are no model of
            ours.
    """
    unknown = sorted(set(readers) - set(READERS))
    remedy = f"choose of {', '.join(READERS)}"
    raise_faults([Fault("readers", name, f"is no reader; {remedy}") for name in unknown])
    chosen = [READERS[name] for name in READERS if name in readers]
    if chosen and not any({*FORMS[reader.takes]} & {*forms} for reader in chosen):
        said = f"is no form that {', '.join(reader.name for reader in chosen)} can be asked for"
        raise InputError(Fault("forms", ", ".join(forms), said))
    with owned_folder("certificate") as folder:
        model = Source(files, folder, arrived)
        rows = list(_asked(chosen, forms, model, seconds, say))
        if model.checkpoint.config.get("model_type") == "ders":
            taken = [reader for reader in chosen if reader.name in READ_EXPANDED]
            rows += _asked_expanded(taken, forms, model, seconds, say)
    return rows


def _asked(
    readers: Collection[Reader],
    forms: Collection[str],
    model: Source,
    seconds: float,
    say: Callable[[str], None],
) -> Iterator[Row]:
    for reader in readers:
        for form in forms_of(reader, forms, model):
            say(f"{Row(reader.name, form, model.made_of).name}: opening the model")
            began = time.monotonic()
            row = ask_one(reader, form, model, seconds)
            row = replace(row, seconds=round(time.monotonic() - began, 1))
            say(f"{row.name}: {row.verdict} {row.why}".rstrip())
            yield row


def forms_of(reader: Reader, forms: Collection[str], model: Source) -> list[str]:
    """The forms that a reader is asked for: of checkpoints one, that which memory has room for."""
    known = [form for form in FORMS[reader.takes] if form in forms]
    if reader.takes == "gguf" or len(known) < 2:
        return known
    return ["bf16"] if model.precision == "bf16" else ["fp32"]


def _asked_expanded(
    readers: Collection[Reader],
    forms: Collection[str],
    model: Source,
    seconds: float,
    say: Callable[[str], None],
) -> Iterator[Row]:
    """Rows of the stock checkpoint that a DeRS model expands to."""
    why, stock = None, None
    try:
        from upcycle_core.ders.expand import expanded_bytes  # imports models of transformers

        why = reason_for_disk(model.folder, 3 * expanded_bytes(model.files))
        stock = None if why else expanded(model)
    except (InputError, OSError, RuntimeError, ValueError) as error:
        why = _one_line(error)
    if stock is not None:
        yield from _asked(readers, forms, stock, seconds, say)
        return
    for reader in readers:
        for form in forms_of(reader, forms, model):
            yield Row(reader.name, form, EXPANDED, why=why or "")


def expanded(model: Source) -> Source:
    """The stock MoE that a DeRS model expands to, held against it.

    What is rounded is each expert's sum of base and delta, to the type of the weights.
    """
    from upcycle_core.ders.expand import expand  # imports models of transformers

    out = model.folder / "expanded"
    expand(model.files, out)
    (model.folder / "of-expanded").mkdir()
    stock = Source(out, model.folder / "of-expanded", made_of=EXPANDED)
    stock.prompts = model.prompts
    types = {info.dtype for info in stock.checkpoint.tensors.values()}
    tolerance = tolerance_of("fp32" if types == {torch.float32} else "bf16", stock)
    off = moved(model.answers[AS_IT_IS].first, stock.answers[AS_IT_IS].first)
    if not off <= tolerance:
        stock.fault = f"expanded: logits are {off:.2g} off those of the DeRS model, "
        stock.fault += f"{tolerance:g} may be"
    return stock


def ask_one(reader: Reader, form: str, model: Source, seconds: float) -> Row:
    """Ask one reader for one form; whatever goes wrong is said in its row."""
    row = Row(reader.name, form, model.made_of)
    if reason := reason_not_to_try(reader, form, model):
        return replace(row, why=reason)
    place = model.folder / f"{reader.name}-{form}"
    place.mkdir(parents=True)
    try:
        own = _one_by_one if reader.takes == "gguf" else _at_once
        version, said, wrong = own(reader, form, model, place, seconds)
        row = replace(row, version=version, tensors=len(model.checkpoint.tensors))
        return judged(replace(row, misplaced=wrong), model, said, pinned=reader.pinned)
    # Of any of these a row: a full disk or a tokenizer that is not there ends no flow.
    except (ReaderError, InputError, OSError, RuntimeError, ValueError) as error:
        wrong = _lost_on_the_way(model)
        return replace(row, verdict="failed", why=_one_line(error), misplaced=wrong)


def reason_not_to_try(reader: Reader, form: str, model: Source) -> str | None:
    """Why a reader is not asked for a model; None if it is."""
    return (
        reader.missing
        or _reason_of_code(reader, model)
        or model.reason_for_memory(form)
        or model.reason_for_disk(form)
    )


def _reason_of_code(reader: Reader, model: Source) -> str | None:
    """Why a reader does not run the code that a model brings."""
    config = model.checkpoint.config
    kind = config.get("model_type")
    if not model.own_code or kind in reader.runs:
        codec = config.get("delta", {}).get("codec")
        if model.own_code and reader.name == "vllm" and codec == "low_rank":
            return "takes low-rank deltas for stacked experts; expand the model to a stock MoE"
        return None
    if kind == "simoe":
        return "SIMoE's experts depend on the whole prompt, which this reader's batches do not know"
    return "has no class for this architecture; expand a DeRS model to a stock MoE"


Made = tuple[str, dict[str, Said], dict[str, str]]
"""A reader's version, what it said of each variant, and the tensors that are not in their place."""


def _at_once(reader: Reader, form: str, model: Source, place: Path, seconds: float) -> Made:
    """Ask for all variants in one process: they lie where they are."""
    models = {
        variant: in_form(model, variant, reader, form, place, seconds) for variant in model.paths
    }
    request = model.request(form, looks=True)
    version, said = ask(reader, models, request, folder=place, seconds=seconds)
    return version, said, lost(model, said[AS_IT_IS], models[AS_IT_IS], looks=True)


def _one_by_one(reader: Reader, form: str, model: Source, place: Path, seconds: float) -> Made:
    """Ask for variants one after the other: each has a file of its own, which is removed again."""
    request = model.request(form, looks=False)
    version, wrong = "", {}
    said: dict[str, Said] = {}
    for variant in model.paths:
        path = in_form(model, variant, reader, form, place, seconds)
        try:
            version, answer = ask(reader, {variant: path}, request, folder=place, seconds=seconds)
            said |= answer
            if variant == AS_IT_IS:
                wrong = lost(model, said[AS_IT_IS], path, looks=False)
                more = {**said[AS_IT_IS].more, "window": window_in_gguf(path)}
                said[AS_IT_IS] = replace(said[AS_IT_IS], more=more)
        finally:
            path.unlink()
    return version, said, wrong


def in_form(
    model: Source, variant: str, reader: Reader, form: str, place: Path, seconds: float
) -> Path:
    """A variant as the reader takes it."""
    path = model.handed(variant)
    if reader.takes == "checkpoint":
        return path
    out = place / f"{variant}.gguf"
    try:
        to_gguf(path, out, form.lower(), log=place / f"convert-{variant}.txt", seconds=seconds)
    except ReaderError:
        out.unlink(missing_ok=True)
        raise
    return out


def _lost_on_the_way(model: Source) -> dict[str, str]:
    """What already the files lack that a reader could not open."""
    try:
        handed = CheckpointReader(model.handed(AS_IT_IS), integers=True)
    except InputError as error:
        return {"checkpoint": _one_line(error)}
    wrong = {}
    for name, info in model.checkpoint.tensors.items():
        if name not in handed.tensors:
            wrong[name] = "is not in the files"
        elif handed.tensors[name].shape != info.shape:
            wrong[name] = f"is {list(handed.tensors[name].shape)}, not {list(info.shape)}"
        elif not torch.equal(handed.tensor(name), model.checkpoint.tensor(name)):
            wrong[name] = "holds other values"
    return wrong


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
