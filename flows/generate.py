"""Generate text from a registered model: ``python -m flows.generate NAME@champion "prompt"``."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from flows.running.command_line import command
from infra import settings as environment
from infra.tracking.registry import Registry
from upcycle_core.errors import Fault, InputError


@command
def main(arguments: list[str] | None = None) -> None:
    """Print a continuation of the prompt by ``models:/NAME@ALIAS``."""
    parser = argparse.ArgumentParser(prog="python -m flows.generate", description=__doc__)
    parser.add_argument("model", help="NAME@ALIAS or NAME/VERSION in the MLflow registry")
    parser.add_argument("prompt", help="text to continue")
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
        print(generate(directory, chosen))


def generate(directory: Path, chosen: argparse.Namespace) -> str:
    """The prompt and its continuation, by stock transformers classes."""
    import torch
    from transformers import AutoTokenizer

    from tasks.scoring.architectures import register_architectures
    from upcycle_core.checkpoints.load import load_causal_lm

    register_architectures()
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    model: Any = load_causal_lm(directory)
    torch.manual_seed(chosen.seed)
    inputs = tokenizer(chosen.prompt, return_tensors="pt", return_token_type_ids=False)
    sampling = (
        {"do_sample": True, "temperature": chosen.temperature}
        if chosen.temperature > 0
        else {"do_sample": False}
    )
    output = model.generate(**inputs, max_new_tokens=chosen.tokens, **sampling)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    sys.exit(main())
