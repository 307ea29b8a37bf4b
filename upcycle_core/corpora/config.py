"""What a recipe says about text."""

from collections.abc import Mapping
from dataclasses import field
from string import Formatter
from typing import Literal

from upcycle_core.config import SEEDS, config
from upcycle_core.errors import Fault

Harvest = Literal[
    "python",
    "cpp",
    "mathematics",
    "documentation",
    "python-elsewhere",
    "cpp-elsewhere",
    "mathematics-elsewhere",
    "documentation-elsewhere",
]
Split = Literal["train", "calibration", "heldout", "elsewhere"]
SPLITS: tuple[Split, ...] = ("train", "calibration", "heldout", "elsewhere")
Bos = Literal["auto", "always", "never"]


@config
class Source:
    """Where documents are read from: exactly one of ``harvest``, ``files`` and ``dataset``."""

    harvest: Harvest | None = None
    """Text of the Python installation itself, read in place."""
    files: tuple[str, ...] = ()
    """Paths or glob patterns: .txt (documents separated by a line `<|doc|>`), .jsonl,
    .json, .parquet."""
    dataset: str | None = None
    """A Hugging Face dataset, by hub id or local directory; read as a stream."""
    subset: str | None = None
    """The dataset's configuration name."""
    split: str = "train"
    """The dataset's split."""
    revision: str | None = None
    """The dataset's revision. Name it, or the run cannot be repeated."""
    text_field: str = "text"
    """The field that holds the text (.jsonl, .json, .parquet, dataset)."""
    template: str | None = None
    """A document made of several fields: text with their names in braces, `{question}`; `{{` and
    `}}` stand for braces."""
    form: Literal["text", "chat"] = "text"
    """What a record is: text, or a chat (`messages`, or `prompt` and `response`), which the
    tokenizer's chat template writes."""
    max_bytes: int | None = field(default=None, metadata={"gt": 0})
    """Read documents in seeded order until this many UTF-8 bytes are reached; all by default."""

    def faults(self, name: str) -> list[Fault]:
        """What is wrong with it, without reading any file; ``name`` is the field's."""
        given = [kind for kind in ("harvest", "files", "dataset") if getattr(self, kind)]
        found = []
        if len(given) != 1:
            remedy = "give exactly one of harvest, files and dataset"
            found.append(Fault(name, " and ".join(given) or None, remedy))
        if self.harvest is not None and self.form == "chat":
            remedy = "a harvest is text; name files or a dataset of chats, or remove it"
            found.append(Fault(f"{name}.form", self.form, remedy))
        if self.template is None:
            return found
        if self.harvest is not None or self.form == "chat":
            remedy = "is for records of text; remove it (chats have the tokenizer's)"
            found.append(Fault(f"{name}.template", self.template, remedy))
        try:
            template_fields(self.template)
        except ValueError as error:
            remedy = f"{error}; write names of fields in braces, like {{question}}"
            found.append(Fault(f"{name}.template", self.template, remedy))
        return found


def template_fields(template: str) -> list[str]:
    """The fields that a record's template names.

    Raises:
        ValueError: It names none, or not plainly.
    """
    parts = list(Formatter().parse(template))
    names = [name for _, name, _, _ in parts if name is not None]
    if any(spec or conversion for _, _, spec, conversion in parts) or not all(
        name.isidentifier() for name in names
    ):
        raise ValueError("what stands in its braces is no plain name")
    if not names:
        raise ValueError("it names no field")
    return list(dict.fromkeys(names))


@config
class Origin:
    """Where the model of one domain begins, if it is no child of the recipe's one seed.

    Either a model, then trained on the domain's text; or random weights, trained on a mixture of
    text, with a vocabulary of its own or the recipe's.
    """

    model: str | None = None
    """Directory or hub id of the model that is trained further."""
    initialisation: int | None = field(default=None, metadata={"ge": 0, "lt": SEEDS})
    """Seed of the random weights; drawn from the recipe's seed and the domain's name by default."""
    mixture: Mapping[str, float] = field(default_factory=dict)
    """Share of each domain's training text; the domain's own alone by default."""
    vocabulary_size: int | None = field(default=None, metadata={"ge": 300})
    """Entries of a tokenizer of its own, trained on its mixture; by default it has the recipe's."""


@config
class Domain:
    """One domain: its texts and, if it exists already, its expert."""

    train: Source | None = None
    """Training text. Needed unless `expert` is given together with `calibration` and `heldout`."""
    calibration: Source | None = None
    """Text for the router's statistics; by default a share of the training text is set aside."""
    heldout: Source | None = None
    """Text that models are judged on; by default a share of the training text is set aside."""
    elsewhere: Source | None = None
    """Calibration text for a second router, from other sources than training (the paper's OOD)."""
    expert: str | None = None
    """A ready expert: directory or hub id. If every domain has one, nothing is trained."""
    origin: Origin | None = None
    """Where its model begins if it shares no seed with the others (`symphony` recipes)."""


@config
class CorpusConfig:
    """How text becomes documents, and documents become the splits."""

    calibration_share: float = field(default=0.1, metadata={"gt": 0, "lt": 1})
    """Share of the training bytes set aside for statistics where no calibration text is named."""
    heldout_share: float = field(default=0.05, metadata={"gt": 0, "lt": 1})
    """Share of the training text set aside for evaluation where no held-out text is named: of the
    bytes of a harvest, else of the documents, on average. Of documents, what has been training text
    stays it, once there are many, none larger than that share of all: 100 or more by default."""
    min_characters: int = field(default=64, metadata={"ge": 1})
    """Shorter documents are left out."""
    bos: Bos = "auto"
    """The beginning-of-sequence token before a document, a task's prompt and what `flows.generate`
    is asked: as the tokenizer itself does, always, or never. A chat has what its template writes,
    and with `always` one in any case."""


@config
class TokenizerConfig:
    """The tokenizer that is trained where no seed model or expert brings one."""

    vocabulary_size: int = field(default=2048, metadata={"ge": 300})
    """Entries of the byte-level BPE vocabulary, special tokens included."""
    bytes_per_domain: int = field(default=2_000_000, metadata={"ge": 1000})
    """Training text read per domain, so that no domain owns the vocabulary."""
