"""Which readers open which MoE: families, numbers of experts and k, each beside our own forward.

    python -m benchmarks.readers [--readers NAME ...] [--families NAME ...] [--experts N ...]
                                 [--top-k K ...] [--out FILE]

Experts are small and random (hidden size 64, two layers), so that every tensor tells itself from
every other; the tokenizer is one of ours, trained on this project's own code. Each cell is a row of
an arrival certificate: tensors accounted for, logits and greedy text, and the exchange of two
experts. What is not installed is not tried (``make readers``). FILE has the rows as they come, and
keeps those that it had of other models, readers and forms.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.common import parser_of, print_result, print_table
from infra.readers.reader import READERS, Reader, ReaderError, ask
from tasks.release.certify import ask_one, forms_of, in_form, reason_not_to_try
from tasks.release.source import AS_IT_IS, EXCHANGED, Source
from tasks.release.verdict import TOLERANCES, Row, judged, lost, plain
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.corpora.config import TokenizerConfig
from upcycle_core.corpora.tokenizer import train_tokenizer
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers

EXPERTS, TOP_K = (2, 3, 4, 7), (1, 2)
HIDDEN, INNER, LAYERS, VOCABULARY = 64, 96, 2, 512
SECONDS = 900.0
ASKED = ("transformers", "vllm", "llama.cpp")
"""MLflow opens files of a registered version: ``flows.certify``."""


def main() -> None:
    """Build, ask, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--readers", nargs="+", choices=ASKED, default=list(ASKED))
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--experts", nargs="+", type=int, choices=EXPERTS, default=list(EXPERTS))
    parser.add_argument("--top-k", nargs="+", type=int, choices=TOP_K, default=list(TOP_K))
    parser.add_argument("--out", type=Path, help="where the rows go as JSON")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="readers-") as name, quiet_loading():
        folder = Path(name)
        tokenizer = make_tokenizer(folder / "text")
        for family in options.families:
            shapes = [(experts, k) for experts in options.experts for k in options.top_k]
            models = dict(make_models(folder / family, family, tokenizer, shapes))
            for reader in (READERS[one] for one in options.readers):
                for form in forms_of(reader, TOLERANCES, next(iter(models.values()))):
                    found = opened(reader, form, models, folder / f"{family}-{reader.name}-{form}")
                    rows += [{"model": label, **plain(row)} for label, row in found.items()]
                    if options.out:
                        keep(options.out, rows)
                    print(f"{family}: {reader.name} {form}", flush=True)
    columns = ["family", "reader", "form", "arrived", "logits", "greedy", "why not"]
    print_table("Readers", columns, list(summed(rows)))
    arrived = sum(row["verdict"] == "arrived" for row in rows)
    print_result("readers", arrived / max(len(rows), 1), {"rows": len(rows), "arrived": arrived})


def keep(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows to a file, in place of those that it has of the same models, readers and forms."""

    def what(row: dict[str, Any]) -> tuple[str, ...]:
        return row["model"], row["reader"], row["form"]

    new = {what(row): row for row in rows}
    kept = json.loads(out.read_text())["rows"] if out.exists() else []
    kept = [new.pop(what(row), row) for row in kept]
    out.write_text(json.dumps({"rows": [*kept, *new.values()]}, indent=1) + "\n")


def summed(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line of each family, reader and form."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        family = row["model"].split()[0]
        reader = f"{row['reader']} {row['version']}".strip()
        groups.setdefault((family, reader, row["form"]), []).append(row)
    for key, some in groups.items():
        asked = [row for row in some if row["greedy"] is not None]
        equal = sum(row["greedy"][0] for row in asked), sum(row["greedy"][1] for row in asked)
        whys = sorted({row["why"] for row in some if row["verdict"] != "arrived"})
        yield [
            *key,
            f"{sum(row['verdict'] == 'arrived' for row in some)} of {len(some)}",
            f"{max(float(row['logits']) for row in asked):.1e}" if asked else "",
            "{} of {}".format(*equal) if asked else "",
            whys[0] if whys else "",
        ]


def make_tokenizer(folder: Path) -> Path:
    """One of ours, trained on this project's code."""
    folder.mkdir(parents=True)
    own = sorted((Path(__file__).parent.parent / "upcycle_core").rglob("*.py"))
    texts = pyarrow.table({"text": [file.read_text() for file in own]})
    parquet.write_table(texts, folder / "train.parquet")
    config = TokenizerConfig(vocabulary_size=VOCABULARY)
    train_tokenizer({"code": folder / "train.parquet"}, folder / "tokenizer", config=config)
    return folder / "tokenizer"


def make_models(
    folder: Path, family: str, tokenizer: Path, shapes: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, Source]]:
    """A MoE of each number of experts and k."""
    dense = {}
    for index in range(max(experts for experts, _ in shapes)):
        dense[f"expert{index}"] = make_expert(folder / f"expert{index}", family, tokenizer, index)
    for experts, k in shapes:
        label = f"{family} {experts} experts, k = {k}"
        out = folder / f"moe-{experts}-{k}"
        chosen = dict(list(dense.items())[:experts])
        routers = random_routers(LAYERS, HIDDEN, experts, std=1.0, seed=0)
        assemble(chosen, None, routers, out, top_k=k, max_shard_bytes=10**9)
        (folder / label).mkdir()
        source = Source(out, folder / label)
        # Routers of zeros are a question of the certificate; here the exchange is enough.
        source.paths = {name: source.paths[name] for name in (AS_IT_IS, EXCHANGED)}
        yield label, source


def make_expert(out: Path, family: str, tokenizer: Path, seed: int) -> Path:
    """A random dense model with large weights."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": HIDDEN // 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    if family == "mistral":
        shape["sliding_window"] = None
    config = CONFIG_MAPPING[family](**shape)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.05 * noise if "norm" in name else 0.2 * noise)
    model.save_pretrained(out)
    for file in tokenizer.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    return out


def opened(reader: Reader, form: str, models: dict[str, Source], place: Path) -> dict[str, Row]:
    """A row of each model: all in one process, or one by one where that fails."""
    one = next(iter(models.values()))
    if reason := reason_not_to_try(reader, form, one):
        return {label: Row(reader.name, form, why=reason) for label in models}
    try:
        return _together(reader, form, models, place)
    except (ReaderError, ValueError):
        return {label: ask_one(reader, form, model, SECONDS) for label, model in models.items()}


def _together(reader: Reader, form: str, models: dict[str, Source], place: Path) -> dict[str, Row]:
    """Ask for all models at once; the prompts are those that the experts of one of them write."""
    one = list(models.values())[len(models) // 2]  # as many prompts as it has experts
    looks = reader.takes == "checkpoint"
    handed = {}
    for label, model in models.items():
        model.prompts = one.prompts
        for variant in model.paths:
            part = place / label / variant
            part.mkdir(parents=True)
            handed[label, variant] = in_form(model, variant, reader, form, part, SECONDS)
    keys = {f"{i}": key for i, key in enumerate(handed)}
    request = one.request(form, looks=False)
    paths = {number: handed[key] for number, key in keys.items()}
    version, answers = ask(reader, paths, request, folder=place / "asked", seconds=SECONDS)
    said = {keys[number]: answer for number, answer in answers.items()}
    rows = {}
    for label, model in models.items():
        own = {variant: said[label, variant] for variant in model.paths}
        wrong = {} if looks else lost(model, own[AS_IT_IS], handed[label, AS_IT_IS], looks=False)
        row = Row(reader.name, form, version=version, misplaced=wrong)
        rows[label] = judged(replace(row, tensors=None), model, own, pinned=reader.pinned)
    return rows


if __name__ == "__main__":
    main()
