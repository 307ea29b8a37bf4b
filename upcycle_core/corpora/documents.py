"""Documents of one domain, each in one split: distinct, in seeded order, split by document."""

import json
from pathlib import Path

from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.corpora.config import SPLITS, CorpusConfig, Domain, Source, Split
from upcycle_core.corpora.distinct import Document
from upcycle_core.corpora.seeded import permutation
from upcycle_core.corpora.sources import read_source, source_files, source_fingerprint
from upcycle_core.corpora.splits import Selection, size_of
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.progress import Progress, Silent


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
        out: Fresh directory for ``<split>.parquet`` (column ``text``, zstd) and ``manifest.json``.
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
    progress.start(f"documents of {name}", len(sources), "sources")
    for split, source in sources.items():
        selection.add(
            split,
            read_source(source, seed=seed, folder=folder),
            max_bytes=source.max_bytes,
            min_characters=config.min_characters,
        )
        progress.advance()
    selection.separate(name)
    _set_aside(selection, domain, config, seed)
    raise_faults(selection.empty_splits(name))
    _write(selection, sources, out, seed=seed, folder=folder)


def write_heldout(
    source: Source,
    out: Path,
    *,
    config: CorpusConfig,
    seed: int,
    folder: Path | None = None,
    progress: Progress | None = None,
    name: str = "outside",
) -> None:
    """Read text that models are only judged on; see ``write_documents``.

    Raises:
        InputError: A source that cannot be read, or holds no documents.
    """
    progress = progress or Silent()
    progress.start(f"documents of {name}", 1, "sources")
    selection = Selection()
    selection.add(
        "heldout",
        read_source(source, seed=seed, folder=folder),
        max_bytes=source.max_bytes,
        min_characters=config.min_characters,
    )
    progress.advance()
    raise_faults(selection.empty_splits(name))
    _write(selection, {"heldout": source}, out, seed=seed, folder=folder)


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


def _set_aside(selection: Selection, domain: Domain, config: CorpusConfig, seed: int) -> None:
    if domain.train is None:
        return
    total = sum(map(size_of, selection.splits["train"].values()))
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
            "bytes": sum(map(size_of, documents)),
            "sha256": sha256_file(path),
            "files": _files_read(documents, source_files(source, folder)),
        }
        manifest["left_out"][split] = dict(sorted(selection.left_out[split].items()))
        if split in sources:
            manifest["sources"][split] = source_fingerprint(source, folder=folder)
    text = json.dumps({"seed": seed, **manifest}, indent=2, ensure_ascii=False)
    (out / "manifest.json").write_text(text + "\n", encoding="utf-8")


def _files_read(documents: list[Document], paths: dict[str, Path]) -> dict[str, str]:
    """The sha256 of each local file that ``documents`` came from, by label."""
    labels = sorted({document.file for document in documents})
    return {label: sha256_file(paths[label]) for label in labels if label in paths}


def _write_parquet(documents: list[Document], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    texts = pyarrow.array([document.text for document in documents], pyarrow.large_string())
    table = pyarrow.table({"text": texts})
    parquet.write_table(table, path, compression="zstd", row_group_size=4096)
