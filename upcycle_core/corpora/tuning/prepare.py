"""Instructions in one form: to train on, held out of seen tasks, and of unseen categories."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.conversations import FAULTS_SHOWN
from upcycle_core.corpora.tuning.choose import Choice, choose
from upcycle_core.corpora.tuning.config import LABEL, InstructionsConfig, domain_faults
from upcycle_core.corpora.tuning.readers import (
    first_of_dataset,
    missing_files,
    read_records,
    reader_fingerprint,
)
from upcycle_core.corpora.tuning.records import LeftOut, Record
from upcycle_core.corpora.tuning.written import judged_faults, sample_faults
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.progress import Progress, Silent

ALL = "all"
"""The one domain, where there are no labels."""
MOST_EMPTY = 0.05
"""Share of a source's records whose answers may be empty: more are no slips."""
Records = dict[str, list[Record]]


def instruction_faults(
    config: InstructionsConfig,
    *,
    folder: Path | None,
    tokenizer: Path | None = None,
    bos: Bos = "auto",
    labels: int = 0,
) -> list[Fault]:
    """Everything that would stop ``prepare_instructions``, found by reading all files once.

    Of a dataset the first row is read: what its categories are shows when it is prepared.

    Args:
        config: What the recipe says.
        folder: What ``{folder}`` stands for.
        tokenizer: Directory of the one that will write the instructions, where it is known: it is
            tried on some records of each source and shape.
        bos: As for ``encoding.encoded``.
        labels: How many domains there must be, as experts of a domain each are trained.

    Returns:
        One fault for each file, line, category or label that is wrong; of a source the first few.
    """
    found = config.faults("instructions") or _missing(config, folder)
    if found:
        return found
    files = {name: own for name, own in config.sources.items() if own.dataset is None}
    datasets = {name: own for name, own in config.sources.items() if own.dataset is not None}
    records, faults, _ = _read(config, files, folder=folder, seed=0, progress=Silent())
    samples = dict(records)
    for name, source in datasets.items():
        first = first_of_dataset(name, source, folder)
        found += [first] if isinstance(first, Fault) else []
        samples[name] = [first] if isinstance(first, Record) else []
    found += faults
    if tokenizer is not None and not found:
        found += sample_faults(samples, config, load_tokenizer(tokenizer), bos=bos)
    if found or datasets:
        return found
    found = _category_faults(config, records)
    if found:
        return found
    choice = choose(records, config, seed=0)
    found = _train_faults(config, choice)
    if found or not labels:
        return found
    return _label_faults(config, choice) or domain_faults(_by_domain(choice, config), labels)


def instruction_fingerprint(
    config: InstructionsConfig, *, folder: Path | None
) -> dict[str, Mapping[str, Any]]:
    """What the sources would read, by content: ready for JSON, by source."""
    return {name: reader_fingerprint(own, folder) for name, own in config.sources.items()}


def prepare_instructions(
    config: InstructionsConfig,
    out: Path,
    *,
    folder: Path | None = None,
    seed: int,
    tokenizer: Path | None = None,
    bos: Bos = "auto",
    progress: Progress | None = None,
) -> None:
    """Write instructions to tune on and to judge by.

    Every line is ``{id, task, category, domain, prompt, response, references}``; the response is
    the first reference. A conversation of more than one turn is judged by its first response, and
    trained on as a whole: its line also has ``messages``. Where other roles than the user speak
    before that response, a line to judge by has what they say as ``asked``. No prompt of a line to
    judge by is trained on, in no turn, nor one that differs in case or white space only.

    Args:
        config: Sources, categories, and how many instances of each task.
        out: Directory for ``train/DOMAIN.jsonl`` (``all`` without labels, or with such as are no
            domains), ``seen.jsonl``, ``unseen.jsonl`` and ``manifest.json``.
        folder: What ``{folder}`` stands for.
        seed: Decides which instances, their order, and what is generated.
        tokenizer: Directory of the one that will write the instructions: it is tried on all that
            models are judged by.
        bos: As for ``encoding.encoded``.
        progress: Told when each source is read.

    Raises:
        InputError: As ``instruction_faults``.
    """
    raise_faults(config.faults("instructions") or _missing(config, folder))
    records, faults, left_out = _read(
        config, config.sources, folder=folder, seed=seed, progress=progress or Silent()
    )
    raise_faults(faults or _category_faults(config, records))
    choice = choose(records, config, seed=seed)
    choice.left_out += left_out
    raise_faults(_train_faults(config, choice))
    if tokenizer is not None:
        judged = [*choice.seen, *choice.unseen]
        raise_faults(judged_faults(judged, load_tokenizer(tokenizer), bos=bos))
    lines = {"seen.jsonl": choice.seen, "unseen.jsonl": choice.unseen}
    for label, own in _by_domain(choice, config).items():
        lines[f"train/{label}.jsonl"] = own
    (out / "train").mkdir(parents=True, exist_ok=True)
    for name, own in lines.items():
        _write(out / name, own, config)
    manifest = {"seed": seed, **_manifest(config, choice, lines, out)}
    manifest["sources"] = instruction_fingerprint(config, folder=folder)
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    (out / "manifest.json").write_text(text + "\n", "utf-8", "backslashreplace")


def _missing(config: InstructionsConfig, folder: Path | None) -> list[Fault]:
    return [
        fault
        for name, source in config.sources.items()
        for fault in missing_files(f"instructions.sources.{name}", source, folder)
    ]


def _read(
    config: InstructionsConfig,
    sources: Mapping[str, Any],
    *,
    folder: Path | None,
    seed: int,
    progress: Progress,
) -> tuple[Records, list[Fault], Counter[str]]:
    """The records of each source, named; what is wrong with others, and how many are not used."""
    progress.start("instructions", len(sources), "sources")
    records: Records = {}
    faults: list[Fault] = []
    left_out: Counter[str] = Counter()
    for name, source in sources.items():
        found = list(read_records(name, source, config=config, folder=folder, seed=seed))
        wrong = [one for one in found if isinstance(one, Fault)]
        records[name] = [
            one if one.id else one._replace(id=f"{name}-{number:06d}")
            for number, one in enumerate(found)
            if isinstance(one, Record)
        ]
        unused = [one for one in found if isinstance(one, LeftOut)]
        for one in unused:
            left_out[one.reason] += one.records
        empty = [one.fault for one in unused if one.fault is not None]
        total = len(found) + sum(one.records - 1 for one in unused)
        if len(empty) > MOST_EMPTY * total:
            wrong += empty
        where = f"instructions.sources.{name}"
        if not found:
            wrong.append(Fault(where, "no record", "it holds none; fill or remove it"))
        faults += wrong[:FAULTS_SHOWN]
        if len(wrong) > FAULTS_SHOWN:
            faults.append(Fault(where, f"{len(wrong) - FAULTS_SHOWN} more", "are faulty too"))
        progress.advance()
    return records, faults, left_out


def _category_faults(config: InstructionsConfig, records: Records) -> list[Fault]:
    """Categories that the recipe names and no record has."""
    there = {record.category for own in records.values() for record in own}
    named: dict[str, Iterable[str]] = {
        "unseen": config.unseen_categories,
        "train_categories": config.train_categories or (),
        "domains": config.domains,
    }
    remedy = f"no record is of this category; there are {', '.join(sorted(there))}"
    return [
        Fault(f"instructions.{field}", category, remedy)
        for field, categories in named.items()
        for category in categories
        if category not in there
    ]


def _train_faults(config: InstructionsConfig, choice: Choice) -> list[Fault]:
    """Nothing to train on."""
    if not choice.train:
        same = choice.left_out["the same prompt"]
        remedy = f"nothing is left to train on, where {same} have a question that another has or "
        remedy += "that is judged by; hold fewer categories out, or give more instructions"
        return [Fault("instructions.unseen", list(config.unseen_categories), remedy)]
    return []


def _label_faults(config: InstructionsConfig, choice: Choice) -> list[Fault]:
    """Labels that do not make domains."""
    labels: dict[str | None, set[str]] = {}
    for record in choice.train:
        labels.setdefault(_domain(record, config), set()).add(record.category)
    found = [
        Fault("instructions.domains", label, "names a file; use letters, digits, ., - and _")
        for label in labels
        if label is not None and not LABEL.fullmatch(label)
    ]
    if None in labels and len(labels) > 1:
        remedy = "have no domain where others have one; give them one, or none to any"
        found.append(Fault("instructions.domains", sorted(labels[None]), remedy))
    return found


def _domain(record: Record, config: InstructionsConfig) -> str | None:
    return record.domain or config.domains.get(record.category)


def _by_domain(choice: Choice, config: InstructionsConfig) -> dict[str, list[Record]]:
    """By label, where the labels make domains."""
    if _label_faults(config, choice):
        return {ALL: choice.train}
    found: dict[str, list[Record]] = {}
    for record in choice.train:
        found.setdefault(_domain(record, config) or ALL, []).append(record)
    return dict(sorted(found.items()))


def _write(path: Path, records: Sequence[Record], config: InstructionsConfig) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            line: dict[str, Any] = {
                "id": record.id,
                "task": record.task,
                "category": record.category,
                "domain": _domain(record, config),
                "prompt": record.prompt,
                "response": record.references[0],
                "references": record.references,
            }
            if record.messages and path.parent.name == "train":
                line["messages"] = record.messages
            elif record.asked:
                line["asked"] = record.asked
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _manifest(
    config: InstructionsConfig,
    choice: Choice,
    lines: Mapping[str, Sequence[Record]],
    out: Path,
) -> dict[str, Any]:
    counted = {"train": choice.train, "seen": choice.seen, "unseen": choice.unseen}
    return {
        "files": {
            name: {"instances": len(own), "sha256": sha256_file(out / name)}
            for name, own in lines.items()
        },
        "train_tasks": sorted({record.task for record in choice.train}),
        "counts": {
            split: {
                "category": dict(Counter(record.category for record in own)),
                "task": dict(Counter(record.task for record in own)),
                "domain": dict(Counter(_domain(record, config) or ALL for record in own)),
            }
            for split, own in counted.items()
        },
        "left_out": dict(sorted((+choice.left_out).items())),
    }
