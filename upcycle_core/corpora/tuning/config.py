"""What a recipe says about instructions to tune on and to judge by."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from typing import Literal

from upcycle_core.config import config
from upcycle_core.corpora.families.catalogue import FAMILIES, UNSEEN
from upcycle_core.errors import Fault

Form = Literal["records", "superni", "superni-rows"]
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""A domain's label, which names a file."""


@config
class InstructionSource:
    """Where instructions are read from: exactly one of `generate`, `files` and `dataset`."""

    generate: Literal["families"] | None = None
    """The embedded families of tasks, generated with verified answers."""
    files: tuple[str, ...] = ()
    """Paths or glob patterns: .jsonl, .json or .parquet records, or files of the `form`."""
    dataset: str | None = None
    """A Hugging Face dataset of records, by hub id or local directory; read as a stream."""
    subset: str | None = None
    """The dataset's configuration name."""
    split: str | None = None
    """The dataset's split, `train` by default; of superni-rows the instances to take, all by
    default."""
    revision: str | None = None
    """The dataset's revision. Name it, or the run cannot be repeated."""
    form: Form = "records"
    """What the files hold: `records` of prompt and response, of instruction, input and output, or
    of messages; `superni`, the published task files of Super-NaturalInstructions, one JSON a task;
    or `superni-rows`, its instances as JSON lines, with their tasks in `definitions`."""
    definitions: str | None = None
    """Path of the JSON lines that define the tasks of superni-rows."""
    task_lists: tuple[str, ...] = ()
    """Paths of text files that name a task a line, such as the published splits: of superni files,
    only these tasks are taken; all by default."""
    examples: int | None = field(default=None, metadata={"ge": 0})
    """Positive examples that a prompt of superni or superni-rows shows, the first ones of its task;
    2 by default, as Tk-Instruct does."""
    category_field: str = "category"
    """The field of a record that holds its category."""
    category: str | None = None
    """Category of records that name none; the source's name by default."""
    domain: str | None = None
    """Domain of records that name none."""
    max_records: int | None = field(default=None, metadata={"ge": 1})
    """Records of a dataset, in seeded order, after which reading ends; all by default."""
    max_per_task: int | None = field(default=None, metadata={"ge": 1})
    """Most instances of a task that are used, drawn with the seed; all by default. Of a task of an
    unseen category no fewer than ``unseen_per_task``."""

    def faults(self, name: str) -> list[Fault]:
        """What is wrong with it; ``name`` is the field's."""
        given = [kind for kind in ("generate", "files", "dataset") if getattr(self, kind)]
        found = []
        if len(given) != 1:
            remedy = "name exactly one of generate, files and dataset"
            found.append(Fault(name, " and ".join(given) or None, remedy))
        for needed, fields in _USES.items():
            if not needed(self):
                found += [
                    Fault(f"{name}.{unused}", getattr(self, unused), remedy)
                    for unused, remedy in fields.items()
                    if getattr(self, unused)
                ]
        if self.form != "records" and not self.files:
            remedy = "is a form of files; name files, or leave it out"
            found.append(Fault(f"{name}.form", self.form, remedy))
        if self.form == "records" and self.examples is not None:
            remedy = "is for superni and superni-rows; remove it, or set form"
            found.append(Fault(f"{name}.examples", self.examples, remedy))
        if self.examples is not None and self.examples < 0:
            found.append(Fault(f"{name}.examples", self.examples, "use 0 or more"))
        if self.form == "superni-rows" and self.definitions is None:
            remedy = "name the file that defines the tasks of superni-rows"
            found.append(Fault(f"{name}.definitions", None, remedy))
        return [*found, *_too_small(self, name, ("max_records", "max_per_task"))]


_USES = {
    lambda source: source.dataset: dict.fromkeys(
        ("subset", "revision", "max_records"), "is for a dataset; remove it"
    ),
    lambda source: source.dataset or source.form == "superni-rows": {
        "split": "is for a dataset or superni-rows; remove it"
    },
    lambda source: source.form == "superni-rows": {
        "definitions": "is for superni-rows; remove it, or set form"
    },
    lambda source: source.form == "superni": {
        "task_lists": "is for superni files; remove it, or set form"
    },
}
"""Which sources use a field that others have no use for."""


@config
class InstructionsConfig:
    """What is tuned on, and what held-out instances models are judged by."""

    sources: Mapping[str, InstructionSource] = field(default_factory=dict)
    """Where instructions come from, by name; at least one."""
    unseen: tuple[str, ...] | None = None
    """Categories of tasks that training never sees. By default those that the embedded families
    hold out, give_number, count_words and word_of_number; other sources need them named."""
    train_categories: tuple[str, ...] | None = None
    """Categories to train on; all others by default."""
    train_per_task: int | None = field(default=1000, metadata={"ge": 1})
    """Most instances of a task that are trained on; all with null."""
    test_per_task: int = field(default=40, metadata={"ge": 1})
    """Held-out instances of a task, seen or unseen; of a seen task never more than half."""
    unseen_per_task: int | None = field(default=None, metadata={"ge": 1})
    """Held-out instances of a task of an unseen category, whatever `test_per_task` and a source's
    `max_per_task` say; as `test_per_task` by default. They cost no instance to train on,
    but for one that asks the same."""
    too_long: Literal["cut", "leave-out"] = "cut"
    """What becomes of an instance to train on that is longer than `sequence_length`: its prompt
    loses its beginning, where an instruction often stands, or it is left out. What models are
    judged by is read whole."""
    domains: Mapping[str, str] = field(default_factory=dict)
    """Domain of each category whose records name none; with none at all there is one domain."""
    generated_per_family: int | None = field(default=None, metadata={"ge": 2})
    """Instances generated of each embedded family; as many as are used by default."""

    @property
    def unseen_categories(self) -> tuple[str, ...]:
        """Categories that training never sees."""
        return UNSEEN if self.unseen is None else self.unseen

    def per_family(self, family: str) -> int:
        """Instances generated of an embedded family."""
        if self.generated_per_family is not None:
            return self.generated_per_family
        used = (self.train_per_task or 1000) + self.test_per_task
        # More of a family that is trained on would be others.
        return max(used, self.unseen_per_task or 0) if family in self.unseen_categories else used

    @property
    def unseen_questions(self) -> int:
        """Most held-out instances of a task of an unseen category."""
        return self.test_per_task if self.unseen_per_task is None else self.unseen_per_task

    def most_per_task(self, source: InstructionSource, category: str) -> int | None:
        """Most instances of a task of this category that are taken of a source; None takes all."""
        most = source.max_per_task
        if most is None or category not in self.unseen_categories:
            return most
        return max(most, self.unseen_per_task or 0)

    def faults(self, name: str) -> list[Fault]:
        """What is wrong with it, without reading any file; ``name`` is the field's."""
        found = [
            fault
            for label, source in self.sources.items()
            for fault in source.faults(f"{name}.sources.{label}")
        ]
        if not self.sources:
            remedy = "nothing to tune on; name one, such as {families: {generate: families}}"
            found.append(Fault(f"{name}.sources", {}, remedy))
        counts = ("train_per_task", "test_per_task", "unseen_per_task")
        found += _too_small(self, name, counts)
        found += _too_small(self, name, ("generated_per_family",), least=2)
        return [*found, *self._category_faults(name), *self._domain_faults(name)]

    def _category_faults(self, name: str) -> Iterator[Fault]:
        generated = any(source.generate for source in self.sources.values())
        alone = generated and all(source.generate for source in self.sources.values())
        if self.unseen is None and self.sources and not generated:
            yield Fault(f"{name}.unseen", None, "name the categories to hold out")
        for field_name in ("unseen", "train_categories"):
            named = getattr(self, field_name) or ()
            for category, times in Counter(named).items():
                if times > 1:
                    yield Fault(f"{name}.{field_name}", category, "is named twice; name it once")
                if alone and category not in FAMILIES:
                    remedy = f"no such family; there are {', '.join(FAMILIES)}"
                    yield Fault(f"{name}.{field_name}", category, remedy)
        if self.train_categories is not None and not self.train_categories:
            yield Fault(f"{name}.train_categories", [], "nothing to train on; name some, or null")
        both = set(self.train_categories or ()) & set(self.unseen_categories)
        for category in sorted(both):
            remedy = f"is also in {name}.unseen, which training never sees; remove it from one"
            yield Fault(f"{name}.train_categories", category, remedy)

    def _domain_faults(self, name: str) -> Iterator[Fault]:
        labels = {f"{name}.domains.{category}": label for category, label in self.domains.items()}
        for source, own in self.sources.items():
            if own.domain is not None:
                labels[f"{name}.sources.{source}.domain"] = own.domain
        for where, label in labels.items():
            if not LABEL.fullmatch(label):
                yield Fault(where, label, "names a file; use letters, digits, ., - and _")


def domain_faults(domains: Collection[str], needed: int) -> list[Fault]:
    """Too few domains, where an expert is trained of each.

    Args:
        domains: Labels of what is trained on.
        needed: How many there must be.
    """
    if len(domains) >= needed:
        return []
    remedy = f"too few, where an expert is trained of each: {needed} are needed; give every "
    return [Fault("instructions.domains", sorted(domains), f"{remedy}category a domain")]


def _too_small(
    config: object, name: str, fields: tuple[str, ...], *, least: int = 1
) -> Iterator[Fault]:
    for own in fields:
        value = getattr(config, own)
        if value is not None and value < least:
            yield Fault(f"{name}.{own}", value, f"use at least {least}")
