"""What a reader's answers are worth: a row of the certificate, and the table of all rows."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from infra.readers.reader import Said
from tasks.release.source import AS_IT_IS, EXCHANGED, ZEROED, Source
from upcycle_core.certificate.accounting import misplaced
from upcycle_core.certificate.answers import distance, moved, moves
from upcycle_core.certificate.gguf_tensors import misplaced_in_gguf

TOLERANCES = {"fp32": 2e-3, "bf16": 0.1, "F32": 2e-3, "F16": 0.15, "Q8_0": 0.7}
"""Difference of a logarithm of a probability that may be, in nats; that of bf16 times the square
root of the number of layers. Sums in another order cost 1e-4 in a model of 30 layers. F16 keeps 11
bits of a weight, bf16 8 of all that layers hand on, Q8_0 8 of weights and activations; there it is
the typical prompt that counts, since rounding sends some tokens to another expert."""
Q8_0_LAYER = 0.15
"""Nats, times the square root of the number of layers, where that is more: two Mixtures-of-Experts
of SmolLM2-135M (30 layers) that arrived whole were 0.60 and 0.73 off, 0.11 and 0.13 of it."""
EXACT = ("fp32", "F32")
SHOWN = 3
HALF_A_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class Row:
    """What became of one form in one reader.

    Args:
        reader: Its name.
        form: ``fp32`` or ``bf16`` of the checkpoint's files; ``F32``, ``F16``, ``Q8_0`` of a GGUF
            file.
        of: What was read if it is not the version itself: ``DeRS expanded``.
        version: Of the reader; empty if it was not asked.
        verdict: ``arrived``, ``failed`` or ``not tried``.
        why: Of the last two, and what is odd about the first.
        tensors: How many the checkpoint has; None where there was no look at them.
        misplaced: Those that did not arrive, and what is there instead.
        logits: Largest difference from our own, in nats.
        greedy: Greedy tokens equal to ours, and of how many.
        texts: Answers in text equal to ours, and of how many; None of who speaks in ids.
        tokenizer: Texts of which its tokenizer makes the ids that ours does, and of how many.
        exchanged: How far the answers moved as two experts were exchanged, in nats.
        zeroed: How far as routers became zeros.
        seconds: How long all of it took.
    """

    reader: str
    form: str
    of: str = ""
    version: str = ""
    verdict: str = "not tried"
    why: str = ""
    tensors: int | None = None
    misplaced: Mapping[str, str] | None = None
    logits: float | None = None
    greedy: tuple[int, int] | None = None
    texts: tuple[int, int] | None = None
    tokenizer: tuple[int, int] | None = None
    exchanged: float | None = None
    zeroed: float | None = None
    seconds: float = 0.0

    @property
    def what(self) -> str:
        """Form and what was read."""
        return f"{self.of}, {self.form}" if self.of else self.form

    @property
    def name(self) -> str:
        """Reader and form, as a line lists them."""
        return self.reader if self.what == "fp32" else f"{self.reader} {self.what}"

    @property
    def is_lost(self) -> bool:
        """Whether something is known to have been lost: a reader that gave no answer says nothing
        of the model."""
        return self.verdict == "failed" and (self.logits is not None or bool(self.misplaced))


def lost(model: Source, said: Said, handed: Path, *, looks: bool) -> dict[str, str]:
    """Tensors that are not in their place in what a reader has loaded, and why."""
    if not looks:
        return misplaced_in_gguf(handed, model.checkpoint)
    unknown = dict.fromkeys(said.more["unknown"], "was loaded, and is none of the checkpoint's")
    return misplaced(said.more["places"]) | unknown


@dataclass
class _Found:
    """What speaks against a row, and what is odd about it.

    Args:
        tolerance: Of the form, in nats.
        exact: Whether the reader computes as we do, but for the order of sums.
        faults: Each makes the row fail.
        notes: None does.
    """

    tolerance: float
    exact: bool
    faults: list[str]
    notes: list[str] = field(default_factory=list)

    def differs(self, text: str, margin: float) -> None:
        """Greedy answers part where ours leads by ``margin``: no fault where that is little."""
        (self.faults if self.exact and margin > 2 * self.tolerance else self.notes).append(text)


def judged(row: Row, model: Source, said: Mapping[str, Said], *, pinned: str) -> Row:
    """The verdict: tensors, logits and text, and whether what was changed changes the answers."""
    tolerance = tolerance_of(row.form, model)
    found = _Found(tolerance, row.form in EXACT, list(_of_tensors(row, model)))
    here = said[AS_IT_IS]
    far = distance(model.answers[AS_IT_IS], here.first, here.greedy, ends=model.specials)
    off = far.logits if found.exact else far.typical
    if not off <= tolerance:  # nor where it is no number
        found.faults.append(f"logits are {off:.2g} off, {tolerance:g} may be")
    if far.difference:
        prompt, token, margin = far.difference
        text = f"greedy text differs from token {token} of prompt {prompt}, where ours leads by "
        found.differs(f"{text}{margin:.2g}", margin)
    texts = None
    if "texts" in here.more:
        texts, differences = compared(model, here.more["texts"], here.more["bos"])
        for text, margin in differences:
            found.differs(text, margin)
    read = read_alike(model, here.more["ids"], found.faults)
    ways = _ways(model, said, found)
    if row.version.partition("+")[0] != pinned.partition("+")[0]:
        found.notes.append(f"version {row.version}, {pinned} was tried")
    _of_window(model, here, found)
    if model.precision == "bf16":
        found.notes.append("too large for fp32 here: our own forward pass is in bf16 as well")
    return replace(
        row,
        verdict="failed" if found.faults else "arrived",
        why="; ".join(found.faults or found.notes),
        logits=far.logits,
        greedy=(far.equal, far.tokens),
        texts=texts,
        tokenizer=read,
        exchanged=ways.get(EXCHANGED),
        zeroed=ways.get(ZEROED),
    )


def read_alike(model: Source, ids: Sequence[Sequence[int]], faults: list[str]) -> tuple[int, int]:
    """Texts that a reader's tokenizer reads as ours does, and of how many; one that it reads
    otherwise is a fault, whatever the weights are: the model is asked something else."""
    unlike = [
        (text, next((i for i, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b), None))
        for text, (own, theirs) in enumerate(zip(model.read, ids, strict=True))
        if list(own) != list(theirs)
    ]
    if unlike:
        text, token = unlike[0]
        at = min(len(model.read[text]), len(ids[text])) if token is None else token
        faults.append(f"tokenizer: text {text} is other ids from token {at} on")
    return len(ids) - len(unlike), len(ids)


def _ways(model: Source, said: Mapping[str, Said], found: _Found) -> dict[str, float]:
    """How far a reader's answers moved with each change; they must move as ours do."""
    ways: dict[str, float] = {}
    mine, here = model.answers, said[AS_IT_IS]
    for variant in set(model.paths) - {AS_IT_IS}:
        ways[variant] = way = moved(here.first, said[variant].first)
        own = moved(mine[AS_IT_IS].first, mine[variant].first)
        if own > 2 * found.tolerance and way < own / 2:
            found.faults.append(f"{variant}: its answers move by {way:.2g}, ours by {own:.2g}")
    if ways:
        each = moves(mine[EXCHANGED].first, said[EXCHANGED].first)
        off = float(each.max() if found.exact else each.median())
        if not off <= found.tolerance:
            found.faults.append(f"exchanged: logits are {off:.2g} off")
    return ways


def _of_window(model: Source, here: Said, found: _Found) -> None:
    """What the prompts do not show: a file without the sliding window, and a window that no prompt
    is longer than, or one of many where their median decides."""
    stored = here.more.get("window", model.window)
    if model.window not in (None, stored):
        found.notes.append(
            f"sliding window: {stored} in the file, not {model.window}: longer texts are read "
            "otherwise"
        )
    elif model.window is not None and not (model.tries_window and found.exact):
        found.notes.append(f"not tried beyond its sliding window of {model.window} tokens")


def _of_tensors(row: Row, model: Source) -> Iterator[str]:
    if model.fault:
        yield model.fault
    if row.misplaced:
        names = ", ".join(list(row.misplaced)[:SHOWN])
        more = len(row.misplaced) - SHOWN
        yield f"tensors: {names}{f' and {more} more' if more > 0 else ''}"


def tolerance_of(form: str, model: Source) -> float:
    """What a form may be off from our own forward pass, which rounds as well if it is in bf16.

    Each layer adds a sum that is rounded to 8 bits; such errors add up as a random walk does.
    """
    steps = math.sqrt(model.layers)
    rounded = TOLERANCES["bf16"] * steps
    if form == "bf16":
        return rounded
    own = TOLERANCES[form]
    if form == "Q8_0":
        own = max(own, Q8_0_LAYER * steps)
    return own + (rounded if model.precision == "bf16" else 0.0)


def compared(
    model: Source, texts: Sequence[str], bos: Any
) -> tuple[tuple[int, int], list[tuple[str, float]]]:
    """Hold a reader's texts against ours, up to the first special token.

    Args:
        model: What was asked.
        texts: What the reader said to each prompt.
        bos: What stands before a text.

    Returns:
        How many are equal, and of how many; what differs where, and by how much ours leads there.
    """
    differences = []
    for prompt, (theirs, (ids, margins)) in enumerate(zip(texts, model.spoken(bos), strict=True)):
        length = next((i for i, token in enumerate(ids) if token in model.specials), len(ids))
        mine = model.tokenizer.decode(ids[:length])
        if theirs == mine or (length < len(ids) and theirs.startswith(mine)):
            continue
        token = next(
            (
                i
                for i in range(length)
                if not theirs.startswith(
                    model.tokenizer.decode(ids[: i + 1]).rstrip(HALF_A_CHARACTER)
                )
            ),
            length - 1,  # it goes on where ours ends
        )
        text = f"text differs from token {token} of prompt {prompt}, where ours leads by "
        differences.append((f"{text}{margins[token]:.2g}", margins[token]))
    return (len(texts) - len(differences), len(texts)), differences


HEAD = (
    *("reader", "form", "verdict", "tensors", "tokenizer"),
    *("logits", "greedy", "texts", "exchanged", "zeroed"),
)
NUMBERS = 7
"""Columns at the right."""


def as_table(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table, and below it what there is to say of some."""
    lines = [
        "| " + " | ".join(HEAD) + " |",
        "| " + " | ".join(["---"] * (len(HEAD) - NUMBERS) + ["---:"] * NUMBERS) + " |",
    ]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    whys = [f"- {row.name}: {row.why}" for row in rows if row.why]
    return "\n".join([*lines, *([""] if whys else []), *whys])


NONE = "–"
"""Of what was not asked: an empty cell moves its neighbours on MLflow's pages."""


def _cells(row: Row) -> Iterator[str]:
    yield f"{row.reader} {row.version.partition('+')[0]}".strip()
    yield row.what
    yield row.verdict
    absent = len(row.misplaced or ())
    yield NONE if row.tensors is None else _share((max(row.tensors - absent, 0), row.tensors))
    yield _share(row.tokenizer)
    yield NONE if row.logits is None else f"{row.logits:.1e}"
    yield _share(row.greedy)
    yield _share(row.texts)
    yield NONE if row.exchanged is None else f"{row.exchanged:.2f}"
    yield NONE if row.zeroed is None else f"{row.zeroed:.2f}"


def _share(share: tuple[int, int] | None) -> str:
    return NONE if share is None else f"{share[0]}/{share[1]}"


def as_json(rows: Sequence[Row]) -> str:
    """Rows as the version keeps them."""
    return json.dumps({"readers": [plain(row) for row in rows]}, indent=1)


def plain(row: Row) -> dict[str, Any]:
    """A row for JSON, which has no word for what is no number."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(row).items()
    }


def rows_of(text: str) -> list[Row]:
    """The rows of what ``as_json`` has written."""
    kept = json.loads(text)["readers"]
    return [Row(**{key: _read(key, row[key]) for key in KNOWN & row.keys()}) for row in kept]


KNOWN = {known.name for known in fields(Row)}


def _read(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return float(value) if key in ("logits", "exchanged", "zeroed") and value else value
