"""Ask stock transformers: ``python ask_transformers.py REQUEST``."""

from typing import Any

import torch
import transformers
from asked import answer, ids_of, look_at
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def ask(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint as its users do, and let it continue the prompts."""
    own = bool(request["own_code"])
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=TYPES[request["precision"]], local_files_only=True, trust_remote_code=own
    )
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    found = look_at(model.state_dict().items(), request)
    return {**continued(model.eval(), request), "ids": ids_of(tokenizer, request), **found}


def continued(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What a model of transformers makes of the prompts, greedily, past any end of text."""
    # Penalties that a checkpoint asks for would not be greedy.
    model.generation_config = GenerationConfig()
    first, greedy = [], []
    with torch.no_grad():
        for prompt in request["prompts"]:
            ids_1S = torch.tensor([prompt])
            first.append(torch.log_softmax(model(ids_1S).logits[0, -1].float(), -1))
            whole_1T = model.generate(
                ids_1S,
                attention_mask=torch.ones_like(ids_1S),
                max_new_tokens=request["tokens"],
                do_sample=False,
                pad_token_id=0,
            )
            greedy.append(whole_1T[0, len(prompt) :].tolist())
    return {"first": torch.stack(first).numpy(), "greedy": greedy}


if __name__ == "__main__":
    answer(transformers.__version__, ask)
