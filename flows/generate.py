"""Generate text from a registered model: ``python -m flows.generate NAME@champion "prompt"``."""

import argparse
import sys

from flows.running.arguments import parser_of
from flows.running.command_line import command
from flows.running.registered import Registered, load, registered, room
from infra import settings as environment


@command
def main(arguments: list[str] | None = None) -> None:
    """Print a continuation of each prompt by ``models:/NAME@ALIAS``, a line of --- between them."""
    chosen = parser_of("generate").parse_args(arguments)
    generate(registered(chosen.model, environment.configure()), chosen)


def generate(found: Registered, chosen: argparse.Namespace) -> None:
    """Print each prompt and its continuation, or the answer to it, as it comes."""
    import torch
    from transformers import TextStreamer

    from upcycle_core.corpora.encoding import answer_ends, asked

    model, tokenizer = load(found.directory, chosen)
    sampling = (
        {"do_sample": True, "temperature": chosen.temperature}
        if chosen.temperature > 0
        else {"do_sample": False}
    )
    prompts = [asked(tokenizer, p, bos=found.bos, chat=chosen.chat) for p in chosen.prompts]
    rooms = [room(model, p, ids) for p, ids in zip(chosen.prompts, prompts, strict=True)]
    for index, (prompt_ids, left) in enumerate(zip(prompts, rooms, strict=True)):
        if index:
            print("---", flush=True)
        torch.manual_seed(chosen.seed)
        ids = torch.tensor([prompt_ids], device=model.device)
        ends = {"eos_token_id": answer_ends(tokenizer, model, chat=True)} if chosen.chat else {}
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=chosen.tokens if left is None else min(chosen.tokens, left),
            streamer=TextStreamer(tokenizer, skip_prompt=chosen.chat, skip_special_tokens=True),
            **sampling,
            **ends,
        )


if __name__ == "__main__":
    sys.exit(main())
