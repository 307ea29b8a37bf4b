"""The arrival certificate: what each reader made of a model, in the form in which it takes it.

Readers lose experts in silence. So each is asked, with its own loader, for the model as it is, with
two experts exchanged, and with routers of zeros; what it answers is held against our own forward
pass, and what it has loaded against the checkpoint, tensor by tensor.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer

from infra.readers.ask.arrived import wanted
from infra.readers.reader import READERS, Reader, ReaderError, Said, ask, to_gguf
from tasks.scoring.architectures import register_architectures
from upcycle_core.certificate.accounting import misplaced
from upcycle_core.certificate.answers import Answers, distance, moved, moves, ours, write_prompts
from upcycle_core.certificate.changed import change
from upcycle_core.certificate.gguf_tensors import misplaced_in_gguf
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import Fault, InputError, raise_faults

PROMPT_TOKENS, NEW_TOKENS = 24, 16
AS_IT_IS, EXCHANGED, ZEROED = "as-it-is", "exchanged", "zeroed"
TOLERANCES = {"fp32": 2e-3, "F32": 2e-3, "F16": 0.15, "Q8_0": 0.7}
"""Difference of a logarithm of a probability that may be, in nats. Sums in another order cost 1e-4
in a model of 30 layers. F16 keeps 11 bits of a weight, Q8_0 keeps 8 of weights and activations;
there it is the typical prompt that counts, since rounding sends some tokens to another expert."""
EXACT = ("fp32", "F32")
FORMS = {"checkpoint": ("fp32",), "gguf": ("F32", "F16", "Q8_0")}
# What a reader holds beside the weights in fp32: buffers, and the largest tensor once more.
ROOM = 1.5
SECONDS = 900.0
SHOWN = 3


@dataclass(frozen=True)
class Row:
    """What became of one form in one reader.

    Args:
        reader: Its name.
        form: ``fp32`` of the checkpoint's files; ``F32``, ``F16``, ``Q8_0`` of a GGUF file.
        version: Of the reader; empty if it was not asked.
        verdict: ``arrived``, ``failed`` or ``not tried``.
        why: Of the last two, and what is odd about the first.
        tensors: How many the checkpoint has; None where there was no look at them.
        misplaced: Those that did not arrive, and what is there instead.
        logits: Largest difference from our own, in nats.
        greedy: Greedy tokens equal to ours, and of how many.
        exchanged: How far the answers moved as two experts were exchanged, in nats.
        zeroed: How far as routers became zeros.
        seconds: How long all of it took.
    """

    reader: str
    form: str
    version: str = ""
    verdict: str = "not tried"
    why: str = ""
    tensors: int | None = None
    misplaced: Mapping[str, str] | None = None
    logits: float | None = None
    greedy: tuple[int, int] | None = None
    exchanged: float | None = None
    zeroed: float | None = None
    seconds: float = 0.0


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
        forms: Of those that they take.
        seconds: How long one reader may take for one form.
        arrived: From the name of a variant to the files that readers get in place of ours: for
            tests, which damage them.
        say: Hears a line before each.

    Returns:
        A row of each reader and form; none is missing.

    Raises:
        InputError: An unknown reader, or files that are no model of ours.
    """
    unknown = sorted(set(readers) - set(READERS))
    remedy = f"choose of {', '.join(READERS)}"
    raise_faults([Fault("readers", name, f"is no reader; {remedy}") for name in unknown])
    rows = []
    with tempfile.TemporaryDirectory(prefix="certificate-") as folder:
        model = Source(files, Path(folder), arrived)
        for reader in (READERS[name] for name in READERS if name in readers):
            for form in (form for form in FORMS[reader.takes] if form in forms):
                say(f"{reader.name}, {form}: opening the model")
                began = time.monotonic()
                row = ask_one(reader, form, model, seconds)
                rows.append(replace(row, seconds=round(time.monotonic() - began, 1)))
                say(f"{reader.name}, {form}: {rows[-1].verdict} {rows[-1].why}".rstrip())
    return rows


class Source:
    """The model, its changed copies, and what our own forward pass says of each.

    Args:
        files: Of a registered version.
        folder: Where the copies go.
        arrived: See ``certify``.
    """

    def __init__(
        self, files: Path, folder: Path, arrived: Callable[[str], Path] | None = None
    ) -> None:
        self.files, self.folder, self._arrived = files, folder, arrived
        self.checkpoint = CheckpointReader(files, integers=True)
        self.own_code = "auto_map" in self.checkpoint.config
        self.paths = {AS_IT_IS: files}
        if not self.own_code:
            self.paths |= {name: folder / name for name in (EXCHANGED, ZEROED)}
        self._made = {AS_IT_IS}

    def path(self, variant: str) -> Path:
        """Our files of a variant, made when they are asked for."""
        if variant not in self._made:
            how: Any = variant
            change(self.files, self.paths[variant], how)
            self._made.add(variant)
        return self.paths[variant]

    def handed(self, variant: str) -> Path:
        """The files of a variant that readers get."""
        return self.path(variant) if self._arrived is None else self._arrived(variant)

    @property
    def nbytes(self) -> int:
        """Of all weights in fp32."""
        return sum(4 * torch.Size(info.shape).numel() for info in self.checkpoint.tensors.values())

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's own."""
        return AutoTokenizer.from_pretrained(self.files, trust_remote_code=False)

    @cached_property
    def specials(self) -> set[int]:
        """Ids that end or frame text."""
        return set(self.tokenizer.all_special_ids)

    @cached_property
    def plain(self) -> int:
        """The id of a printable character."""
        ids = range(len(self.tokenizer))
        texts = ((i, self.tokenizer.decode([i])) for i in ids if i not in self.specials)
        return next((i for i, text in texts if text.isascii() and text.isprintable() and text), 0)

    @cached_property
    def wanted(self) -> Path:
        """What to look for in what a reader has loaded: all tensors."""
        sought = {name: wanted(self.checkpoint.tensor(name)) for name in self.checkpoint.tensors}
        path = self.folder / "wanted.json"
        path.write_text(json.dumps(sought))
        return path

    @cached_property
    def prompts(self) -> list[list[int]]:
        """What each expert writes."""
        register_architectures()
        model = load_causal_lm(self.files, device="cpu")
        return write_prompts(model, length=PROMPT_TOKENS, specials=self.specials)

    @cached_property
    def answers(self) -> dict[str, Answers]:
        """Ours, of each variant."""
        found = {}
        for variant in self.paths:
            model = load_causal_lm(self.path(variant), device="cpu")
            found[variant] = ours(model, self.prompts, tokens=NEW_TOKENS)
        return found

    def request(self, *, looks: bool) -> dict[str, Any]:
        """What a reader is asked, and whether it is asked for the places of all tensors."""
        return {
            "prompts": self.prompts,
            "texts": self.texts,
            "tokens": NEW_TOKENS,
            "vocabulary": self.answers[AS_IT_IS].first.shape[1],
            "own_code": self.own_code,
            "plain": self.plain,
            "threads": max(1, torch.get_num_threads() // 2),
            "wanted": str(self.wanted) if looks else "",
        }

    @cached_property
    def texts(self) -> list[str]:
        """The prompts as text, for readers that speak in text."""
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in self.prompts]


def ask_one(reader: Reader, form: str, model: Source, seconds: float) -> Row:
    """Ask one reader for one form; whatever goes wrong is said in its row."""
    row = Row(reader.name, form)
    if reason := reason_not_to_try(reader, model):
        return replace(row, why=reason)
    place = model.folder / f"{reader.name}-{form}"
    place.mkdir(parents=True)
    try:
        models = {v: in_form(model, v, reader, form, place, seconds) for v in model.paths}
        looks = reader.takes == "checkpoint"
        request = model.request(looks=looks)
        version, said = ask(reader, models, request, folder=place, seconds=seconds)
        wrong = lost(model, said[AS_IT_IS], models[AS_IT_IS], looks=looks)
    # Of any of these a row: a full disk or a tokenizer that is not there ends no flow.
    except (ReaderError, InputError, OSError, RuntimeError, ValueError) as error:
        wrong = _lost_on_the_way(model)
        return replace(row, verdict="failed", why=_one_line(error), misplaced=wrong)
    row = replace(row, version=version, tensors=len(model.checkpoint.tensors), misplaced=wrong)
    return judged(row, model, said, pinned=reader.pinned)


def reason_not_to_try(reader: Reader, model: Source) -> str | None:
    """Why a reader is not asked for a model; None if it is."""
    if reader.missing:
        return reader.missing
    if model.own_code and not reader.runs_code:
        return "has no class for this architecture; expand a DeRS model to a stock MoE"
    free = psutil.virtual_memory().available
    if model.nbytes * ROOM > free:
        return f"needs {model.nbytes * ROOM / 1e9:.1f} GB in fp32, {free / 1e9:.1f} GB are free"
    return None


def in_form(
    model: Source, variant: str, reader: Reader, form: str, place: Path, seconds: float
) -> Path:
    """A variant as the reader takes it."""
    path = model.handed(variant)
    if reader.takes == "checkpoint":
        return path
    out = place / f"{variant}.gguf"
    to_gguf(path, out, form.lower(), log=place / f"convert-{variant}.txt", seconds=seconds)
    return out


def lost(model: Source, said: Said, handed: Path, *, looks: bool) -> dict[str, str]:
    """Tensors that are not in their place in what a reader has loaded, and why."""
    if not looks:
        return misplaced_in_gguf(handed, model.checkpoint)
    unknown = dict.fromkeys(said.more["unknown"], "was loaded, and is none of the checkpoint's")
    return misplaced(said.more["places"]) | unknown


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


def judged(row: Row, model: Source, said: Mapping[str, Said], *, pinned: str) -> Row:
    """The verdict: tensors, logits and text, and whether what was changed changes the answers."""
    faults = []
    if row.misplaced:
        names = ", ".join(list(row.misplaced)[:SHOWN])
        more = len(row.misplaced) - SHOWN
        faults.append(f"tensors: {names}{f' and {more} more' if more > 0 else ''}")
    tolerance, exact = TOLERANCES[row.form], row.form in EXACT
    mine = model.answers
    here = said[AS_IT_IS]
    far = distance(mine[AS_IT_IS], here.first, here.greedy, ends=model.specials)
    off = far.logits if exact else far.typical
    if not off <= tolerance:  # nor where it is no number
        faults.append(f"logits are {off:.2g} off, {tolerance:g} may be")
    notes: list[str] = []
    if far.difference:
        prompt, token, margin = far.difference
        text = f"greedy text differs from token {token} of prompt {prompt}, where ours leads by "
        text += f"{margin:.2g}"
        (faults if exact and margin > 2 * tolerance else notes).append(text)
    ways: dict[str, float] = {}
    for variant in set(model.paths) - {AS_IT_IS}:
        other = said[variant]
        ways[variant] = moved(here.first, other.first)
        own = moved(mine[AS_IT_IS].first, mine[variant].first)
        if own > 2 * tolerance and ways[variant] < own / 2:
            faults.append(f"{variant}: its answers move by {ways[variant]:.2g}, ours by {own:.2g}")
    if ways:
        each = moves(mine[EXCHANGED].first, said[EXCHANGED].first)
        off = float(each.max() if exact else each.median())
        if not off <= tolerance:
            faults.append(f"exchanged: logits are {off:.2g} off")
    if row.version.partition("+")[0] != pinned.partition("+")[0]:
        notes.append(f"version {row.version}, {pinned} was tried")
    return replace(
        row,
        verdict="failed" if faults else "arrived",
        why="; ".join(faults or notes),
        logits=far.logits,
        greedy=(far.equal, far.tokens),
        exchanged=ways.get(EXCHANGED),
        zeroed=ways.get(ZEROED),
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def as_table(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table."""
    head = ["reader", "form", "verdict", "tensors", "logits", "greedy", "exchanged", "zeroed"]
    lines = [
        "| " + " | ".join(head) + " |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join([*lines, *("| " + " | ".join(_cells(row)) + " |" for row in rows)])


def _cells(row: Row) -> Iterator[str]:
    yield f"{row.reader} {row.version}".strip()
    yield row.form
    why = row.why.replace("|", "\\|")
    yield f"{row.verdict}: {why}" if why else row.verdict
    lost = len(row.misplaced or ())
    yield "" if row.tensors is None else f"{max(row.tensors - lost, 0)} of {row.tensors}"
    yield "" if row.logits is None else f"{row.logits:.1e}"
    yield "" if row.greedy is None else f"{row.greedy[0]} of {row.greedy[1]}"
    yield "" if row.exchanged is None else f"{row.exchanged:.2f}"
    yield "" if row.zeroed is None else f"{row.zeroed:.2f}"


def as_json(rows: Sequence[Row]) -> str:
    """Rows as the version keeps them."""
    return json.dumps({"readers": [plain(row) for row in rows]}, indent=1)


def plain(row: Row) -> dict[str, Any]:
    """A row for JSON, which has no word for what is no number."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(row).items()
    }
