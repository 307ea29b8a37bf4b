"""Generate text from a registered model: ``python -m flows.generate NAME@champion "prompt"``."""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from flows.running.command_line import command
from infra import settings as environment
from infra.tracking.registry import Registry
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
    parser.add_argument("--device", help="cpu, cuda, cuda:1; by default a GPU where there is one")
    parser.add_argument(
        "--precision", choices=("auto", "fp32", "bf16"), default="fp32", help="arithmetic"
    )
    chosen = parser.parse_args(arguments)
    if not {"@", "/"} & set(chosen.model):
        remedy = f"names no version; write {chosen.model}@champion or {chosen.model}/1"
        raise InputError(Fault("model", chosen.model, remedy))
    settings = environment.configure()
    registry = Registry(settings)
    reference = f"models:/{chosen.model.removeprefix('models:/')}"
    here = registry.place(reference)
    directory = registry.fetch(reference, settings.home / "models") if here is None else here
    recipe = registry.text(registry.referenced(reference), "recipe.yaml")
    generate(directory, chosen, bos=_bos(recipe))


def generate(directory: Path, chosen: argparse.Namespace, *, bos: Bos) -> None:
    """Print each prompt and its continuation, or the answer to it, as it comes."""
    import torch
    from transformers import AutoTokenizer, TextStreamer

    from tasks.scoring.architectures import register_architectures
    from upcycle_core.checkpoints.load import load_causal_lm
    from upcycle_core.corpora.encoding import asked
    from upcycle_core.precision import weights_type

    register_architectures()
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = weights_type(chosen.precision, device)
    model: Any = load_causal_lm(directory, dtype=dtype, device=device)
    sampling = (
        {"do_sample": True, "temperature": chosen.temperature}
        if chosen.temperature > 0
        else {"do_sample": False}
    )
    for index, prompt in enumerate(chosen.prompts):
        if index:
            print("---", flush=True)
        torch.manual_seed(chosen.seed)
        ids = torch.tensor([asked(tokenizer, prompt, bos=bos, chat=chosen.chat)], device=device)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=chosen.tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=chosen.chat, skip_special_tokens=True),
            **sampling,
        )


def _bos(recipe: str | None) -> Bos:
    """What stood before the texts that the model was made and judged on."""
    return yaml.safe_load(recipe or "{}").get("corpus", {}).get("bos", "auto")


if __name__ == "__main__":
    sys.exit(main())
