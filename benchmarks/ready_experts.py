"""Ready experts in a flow: disk that it takes, and what is read of weights, first and without news.

    python -m benchmarks.ready_experts [--size 1m|25m|135m|1b|3b] [--domains N] [--folder FOLDER]
        [--given-weights copy|link]

Experts of random weights in bf16 are made in a temporary folder, and joined by `flows.dume` in a
home of its own. Disk is what that takes beside the experts, each inode once: workspace, DVC's cache
and remote, MLflow; what is a link to an expert's file takes nothing. Where files share blocks (XFS,
Btrfs) an inode does not say so: what the file system has less than before does, as long as nothing
else writes to it.

Bytes of the experts that are read are counted where weights are read: hashing, looking for NaN,
tensors of mapped files, copies. Of a night without news (`flows.retrain`) also what the kernel had
to load again of all weights of experts and home, after it was told to forget them: nothing escapes
that count, and a header is a few pages of it.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaForCausalLM

from benchmarks import planned
from benchmarks.children import run_python
from benchmarks.common import parser_of, print_result, print_table
from benchmarks.models import llama_of, save_word_tokenizer
from benchmarks.page_cache import forget, held_bytes, weights_below
from upcycle_core.checkpoints.load import quiet_loading

SIZES: Mapping[str, Mapping[str, int]] = {
    "25m": {"hidden": 512, "inner": 1408, "layers": 8, "heads": 8, "kv": 4, "vocabulary": 2048},
    **{name: planned.SIZES[name] for name in ("1m", "135m", "1b", "3b")},
}
"""Shapes."""
WORDS, DOCUMENTS, LENGTH = 200, 40, 128
GOALS = {"disk": 2.3, "expert bytes, first run": 2.2, "weights, no news": 0.0}
PROGRAM = "import sys; from benchmarks.ready_experts import counted; counted(sys.argv[1:])"
SETTLE_SECONDS = 3.0
"""Until files that were made here are old enough to be remembered."""


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=[*SIZES], default="25m")
    parser.add_argument("--domains", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where all is made, and stays; empty")
    ways = ("copy", "link")
    parser.add_argument("--given-weights", choices=ways, default="copy", help="as in the recipe")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ready-") as temporary:
        folder = options.folder or Path(temporary)
        versions = {"given_weights": options.given_weights}
        recipe = make(folder, SIZES[options.size], options.domains, versions)
        time.sleep(SETTLE_SECONDS)
        experts, home = folder / "experts", folder / "home"
        size = sum(file.stat().st_size for file in weights_below(experts))
        free = free_bytes(folder)
        first = run("flows.dume", recipe, experts=experts, home=home)
        taken = free - free_bytes(folder)
        places = {path.name: disk_bytes(path, experts) for path in sorted(home.iterdir())}
        disk = disk_bytes(home, experts)
        forget(weights := list(weights_below(experts, home)))
        again = run("flows.retrain", recipe, experts=experts, home=home)
        loaded = sum(map(held_bytes, weights))
        held = sum(file.stat().st_size for file in weights)
    rows = [
        ["experts", size / 1e6, 1.0],
        ["disk beside them", disk / 1e6, disk / size],
        *([f"  {name}", own / 1e6, own / size] for name, own in places.items() if own > size / 100),
        ["  the file system has less", taken / 1e6, taken / size],
        *([f"read first: {name}", own / 1e6, own / size] for name, own in first.items()),
        ["read without news", sum(again.values()) / 1e6, sum(again.values()) / size],
        ["  loaded by the kernel", loaded / 1e6, loaded / held],
    ]
    print_table("what", ["what", "MB", "ratio"], rows)
    ratios = {
        "disk": disk / size,
        "free space": taken / size,
        "expert bytes, first run": sum(first.values()) / size,
        "weights, no news": sum(again.values()) / size,
        "weights loaded by the kernel, no news": loaded / held,
    }
    figures = {"goal": GOALS, "size": options.size, "domains": options.domains, "places": places}
    figures["given_weights"] = options.given_weights
    print_result("ready_experts", ratios, {**figures, "first": first, "again": again})


def make(folder: Path, size: Mapping[str, int], domains: int, versions: dict[str, Any]) -> Path:
    """Experts, texts, and the recipe that joins them; returns the recipe's file.

    Args:
        folder: Where all is made.
        size: A shape of ``SIZES``.
        domains: How many experts, each of a domain.
        versions: What the recipe says of them.
    """
    vocabulary, config = size["vocabulary"], llama_of(size, dtype="bfloat16")
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    seed = LlamaForCausalLM(config)
    texts: dict[str, Any] = {}
    for number in range(domains):
        name = f"d{number}"
        expert = folder / "experts" / name
        with torch.no_grad(), quiet_loading():
            for parameter in seed.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            seed.save_pretrained(expert)
        save_word_tokenizer(expert, words=vocabulary)
        draw = torch.Generator().manual_seed(number)
        own: dict[str, Any] = {"expert": str(expert)}
        for split in ("calibration", "heldout"):
            ids = torch.randint(1, vocabulary, (DOCUMENTS, WORDS), generator=draw).tolist()
            text = "\n<|doc|>\n".join(" ".join(f"w{id}" for id in row) for row in ids)
            (folder / f"{name}-{split}.txt").write_text(text + "\n")
            own[split] = {"files": [str(folder / f"{name}-{split}.txt")]}
        texts[name] = own
    torch.set_default_dtype(torch.float32)
    tokens = {"sequence_length": LENGTH, "tokens": 4 * LENGTH, "precision": "auto"}
    recipe = {
        "name": "ready",
        "domains": texts,
        "statistics": {**tokens, "batch_size": 4},
        "evaluation": {**tokens, "batch_size": 4, "random_routing_seeds": [0]},
        "registry": {"certificate": "none"},
        "versions": versions,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def run(module: str, recipe: Path, *, experts: Path, home: Path) -> dict[str, int]:
    """Run a flow; what it read of the files in ``experts``, in bytes, by how."""
    answer = home.with_name("answer.json")
    environment = {**os.environ, "UPCYCLE_HOME": str(home)}
    run_python(
        ["-c", PROGRAM, str(answer), str(experts), module, str(recipe)], environment=environment
    )
    return json.loads(answer.read_text())


def counted(arguments: Sequence[str]) -> None:
    """What the flow's process does: it counts what it reads."""
    answer, experts, module, recipe = arguments
    from importlib import import_module

    from upcycle_core.backbone import form
    from upcycle_core.checkpoints import copy, known, reader

    read = {"hashed": 0, "hashed and scanned": 0, "scanned": 0, "tensors": 0, "copied": 0}

    def note(how: str, path: object, size: int) -> None:
        if str(path).startswith(f"{experts}/"):
            read[how] += size

    sha256, non_finite, scan = known._sha256, reader._non_finite_in, reader._scan
    tensor, copy_file = reader.CheckpointReader.tensor, copy.copy_file

    def noting_sha256(opened: Any) -> str:
        note("hashed", opened.name, os.fstat(opened.fileno()).st_size)
        return sha256(opened)

    def noting_non_finite(path: Path, scanned: Sequence[list[str]] = ()) -> list[str]:
        note("scanned", path, 0 if scanned else path.stat().st_size)
        read["hashed and scanned"] -= 0 if scanned else path.stat().st_size
        return non_finite(path, scanned)

    def noting_scan(opened: Any, take: Any) -> list[str]:
        note("hashed and scanned", opened.name, os.fstat(opened.fileno()).st_size)
        return scan(opened, take)

    def noting_tensor(self: Any, name: str) -> torch.Tensor:
        found = tensor(self, name)
        note("tensors", self.directory, found.nbytes)
        return found

    def noting_copy(source: Path, target: Path) -> None:
        note("copied", source, source.stat().st_size)
        copy_file(source, target)

    for module_of, name, noting in (
        (known, "_sha256", noting_sha256),
        (reader, "_non_finite_in", noting_non_finite),
        (reader, "_scan", noting_scan),
        (reader.CheckpointReader, "tensor", noting_tensor),
        (copy, "copy_file", noting_copy),
    ):
        setattr(module_of, name, noting)
    assert form.copy_checkpoint is copy.copy_checkpoint  # which looks its function up
    code = import_module(module).main([recipe])
    Path(answer).write_text(json.dumps(read))
    sys.exit(code)


def disk_bytes(folder: Path, beside: Path) -> int:
    """What all that lies below a folder takes on the disk beside another, each inode once."""
    blocks, others = (
        {
            (status.st_dev, status.st_ino): status.st_blocks * 512
            for file in place.rglob("*")
            if (status := file.lstat())
        }
        for place in (folder, beside)
    )
    return sum(taken for inode, taken in blocks.items() if inode not in others)


def free_bytes(folder: Path) -> int:
    """What the file system of a folder has left, once all that was written is on it."""
    os.sync()
    status = os.statvfs(folder)
    return status.f_bfree * status.f_frsize


if __name__ == "__main__":
    main()
