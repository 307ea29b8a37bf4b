"""Generate text from a registered model: ``python -m flows.generate NAME@champion "prompt"``."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from flows.running.command_line import command
from infra import settings as environment
from infra.tracking.registry import PROVENANCE_FOLDER, Registry
from upcycle_core.corpora.config import Bos
from upcycle_core.errors import Fault, InputError


@command
def main(arguments: list[str] | None = None) -> None:
    """Print a continuation of each prompt by ``models:/NAME@ALIAS``, a line of --- between them."""
    parser = argparse.ArgumentParser(prog="python -m flows.generate", description=__doc__)
    parser.add_argument("model", help="NAME@ALIAS or NAME/VERSION in the MLflow registry")
    parser.add_argument(
        "prompts",
        metavar="prompt",
        nargs="+",
        help="text to continue; a special token's name in it is text like any other",
    )
    parser.add_argument(
        "--chat", action="store_true", help="answer the prompt, in the model's chat template"
    )
    parser.add_argument("--tokens", type=int, default=100, help="at most this many new tokens")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if not {"@", "/"} & set(chosen.model):
        remedy = f"names no version; write {chosen.model}@champion or {chosen.model}/1"
        raise InputError(Fault("model", chosen.model, remedy))
    registry = Registry(environment.configure())
    with tempfile.TemporaryDirectory() as folder:
        reference = f"models:/{chosen.model.removeprefix('models:/')}"
        directory = registry.download(reference, Path(folder) / "model")
        for index, text in enumerate(generate(directory, chosen)):
            print(f"---\n{text}" if index else text, flush=True)


def generate(directory: Path, chosen: argparse.Namespace) -> Iterator[str]:
    """Each prompt and its continuation, or the answer to it, by stock transformers classes."""
    import torch
    from transformers import AutoTokenizer

    from tasks.scoring.architectures import register_architectures
    from upcycle_core.checkpoints.load import load_causal_lm
    from upcycle_core.corpora.encoding import asked

    register_architectures()
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    model: Any = load_causal_lm(directory)
    sampling = (
        {"do_sample": True, "temperature": chosen.temperature}
        if chosen.temperature > 0
        else {"do_sample": False}
    )
    for prompt in chosen.prompts:
        torch.manual_seed(chosen.seed)
        ids = torch.tensor([asked(tokenizer, prompt, bos=_bos(directory), chat=chosen.chat)])
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=chosen.tokens,
            **sampling,
        )
        first = ids.shape[1] if chosen.chat else 0
        yield str(tokenizer.decode(output[0, first:], skip_special_tokens=True))


def _bos(directory: Path) -> Bos:
    """What stood before the texts that the model was made and judged on."""
    file = directory / PROVENANCE_FOLDER / "recipe.yaml"
    recipe = yaml.safe_load(file.read_text()) if file.exists() else {}
    return recipe.get("corpus", {}).get("bos", "auto")


if __name__ == "__main__":
    sys.exit(main())
