"""Documents of one domain, each in one split: distinct, in seeded order, split by document."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.corpora.config import SPLITS, CorpusConfig, Domain, Source, Split
from upcycle_core.corpora.distinct import Document, apart_key
from upcycle_core.corpora.reader import read_documents
from upcycle_core.corpora.seeded import permutation
from upcycle_core.corpora.sources import read_source, source_files, source_fingerprint
from upcycle_core.corpora.splits import Selection
from upcycle_core.corpora.spool import Kept, in_groups
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.progress import Progress, Silent

ROWS, GROUP_BYTES = 4096, 1 << 22
"""Of a Parquet row group at most: what is in memory while it is written."""


def write_documents(
    domain: Domain,
    out: Path,
    *,
    config: CorpusConfig,
    seed: int,
    folder: Path | None = None,
    progress: Progress | None = None,
    name: str = "domain",
) -> None:
    """Read a domain's sources and write each split's documents.

    Documents that differ in case, punctuation or white space only are one document. Named held-out
    and calibration text stays whole: what it shares with training text is dropped from training.
    Where none is named, a share of the training text is set aside: of a harvest by whole files,
    else by document. Held-out documents are set aside for good (``Selection.set_aside_for_good``).

    Args:
        domain: Its sources.
        out: Fresh directory for ``<split>.parquet`` (column ``text``, zstd; of chats ``messages``,
            too, as JSON) and ``manifest.json``.
        config: Shares and the shortest document.
        seed: Decides order and splits.
        folder: What ``{folder}`` stands for.
        progress: Told when each source is read.
        name: What faults call the domain (``domains.law``).

    Raises:
        InputError: No training text where some is needed, a source that cannot be read, calibration
            text that is also held-out text, or a split that is left without documents.
    """
    progress = progress or Silent()
    raise_faults(domain_faults(domain, name))
    sources = named_sources(domain)
    selection = Selection()
    progress.start(f"documents of {name.removeprefix('domains.')}", len(sources), "sources")
    for split, source in sources.items():
        _add(selection, split, source, out, config=config, seed=seed, folder=folder)
        progress.advance()
    selection.separate(name)
    _set_aside(selection, domain, config, seed)
    raise_faults(selection.empty_splits(name))
    _write(selection, sources, out, seed=seed, folder=folder)


def write_texts(
    split: Split,
    source: Source,
    out: Path,
    *,
    config: CorpusConfig,
    seed: int,
    folder: Path | None = None,
    apart_from: Iterable[Path] = (),
    progress: Progress | None = None,
    name: str,
) -> None:
    """Read text of no domain as the one split that it is; see ``write_documents``.

    Args:
        split: What it is for.
        source: Where it is read.
        out: Fresh directory for what ``write_documents`` writes.
        config: The shortest document.
        seed: Decides the order.
        folder: What ``{folder}`` stands for.
        apart_from: Parquet files of documents that it may not hold, and which it yields to.
        progress: Told when it is read.
        name: What faults call it.

    Raises:
        InputError: A source that cannot be read, or holds no documents.
    """
    progress = progress or Silent()
    progress.start(f"documents of {name}", 1, "sources")
    selection = Selection()
    _add(selection, split, source, out, config=config, seed=seed, folder=folder)
    progress.advance()
    others = {apart_key(text) for path in apart_from for text in read_documents(path)}
    selection.leave_out(split, others, "in a domain's text")
    raise_faults(replace(fault, field=name) for fault in selection.empty_splits(name))
    _write(selection, {split: source}, out, seed=seed, folder=folder)


def named_sources(domain: Domain) -> dict[Split, Source]:
    """The sources that a domain names, by split, in the order of ``SPLITS``."""
    named = {split: getattr(domain, split) for split in SPLITS}
    return {split: source for split, source in named.items() if source is not None}


def domain_faults(domain: Domain, field: str) -> list[Fault]:
    """A fault for each split that is neither named nor can be set aside from training text.

    Args:
        domain: What the recipe says.
        field: Where it says so (``domains.law``).
    """
    if domain.train is not None:
        return []
    if domain.expert is None:
        return [Fault(f"{field}.train", None, "name training text, or a ready expert")]
    return [
        Fault(f"{field}.{split}", None, "name it: there is no training text to set it aside from")
        for split in ("calibration", "heldout")
        if getattr(domain, split) is None
    ]


def _add(
    selection: Selection,
    split: Split,
    source: Source,
    out: Path,
    *,
    config: CorpusConfig,
    seed: int,
    folder: Path | None,
) -> None:
    """Read a source into ``split``, its documents in a file beside ``out``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    selection.add(
        split,
        read_source(source, seed=seed, folder=folder, scratch=out.parent),
        max_bytes=source.max_bytes,
        min_characters=config.min_characters,
    )


def _set_aside(selection: Selection, domain: Domain, config: CorpusConfig, seed: int) -> None:
    if domain.train is None:
        return
    total = sum(document.size for document in selection.splits["train"].values())
    by_file = domain.train.harvest is not None
    if domain.heldout is None and by_file:
        target = total * config.heldout_share
        selection.set_aside("heldout", target, by_file=True, seed=seed)
    elif domain.heldout is None:  # text that may grow
        selection.set_aside_for_good("heldout", config.heldout_share, seed=seed)
    if domain.calibration is None:
        target = total * config.calibration_share
        selection.set_aside("calibration", target, by_file=by_file, seed=seed)


def _write(
    selection: Selection,
    sources: dict[Split, Source],
    out: Path,
    *,
    seed: int,
    folder: Path | None,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, dict] = {"splits": {}, "left_out": {}, "sources": {}}
    for split in SPLITS:
        if split not in selection.splits:
            continue
        texts = list(selection.splits[split].values())
        documents = [texts[i] for i in permutation(len(texts), seed, "documents", split)]
        path = out / f"{split}.parquet"
        _write_parquet(documents, path)
        source = sources.get(split) or sources["train"]
        manifest["splits"][split] = {
            "documents": len(documents),
            "bytes": sum(document.size for document in documents),
            "sha256": sha256_file(path),
            "files": _files_read(documents, source_files(source, folder)),
        }
        manifest["left_out"][split] = dict(sorted(selection.left_out[split].items()))
        if split in sources:
            manifest["sources"][split] = source_fingerprint(source, folder=folder)
    text = json.dumps({"seed": seed, **manifest}, indent=2, ensure_ascii=False)
    (out / "manifest.json").write_text(text + "\n", "utf-8", "backslashreplace")


def _files_read(documents: list[Document | Kept], paths: dict[str, Path]) -> dict[str, str]:
    """The sha256 of each local file that ``documents`` came from, by label."""
    labels = sorted({document.file for document in documents})
    return {label: sha256_file(paths[label]) for label in labels if label in paths}


def _write_parquet(documents: list[Document | Kept], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    columns = [("text", pyarrow.large_string())]
    if documents[0].messages is not None:  # a source holds chats or none
        columns.append(("messages", pyarrow.large_string()))
    schema = pyarrow.schema(columns)
    with parquet.ParquetWriter(path, schema, compression="zstd") as file:
        for group in in_groups(documents, lambda d: d.size, count=ROWS, limit=GROUP_BYTES):
            values = {"text": [document.text for document in group]}
            if len(columns) > 1:
                values["messages"] = [json.dumps(d.messages, ensure_ascii=False) for d in group]
            file.write_table(pyarrow.table(values, schema=schema), row_group_size=ROWS)
