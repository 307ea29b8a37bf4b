"""Ask vLLM: ``python ask_vllm.py REQUEST``, with the interpreter of its environment."""

import gc
import json
from pathlib import Path
from typing import Any

import numpy

TYPES = {"fp32": "float32", "bf16": "bfloat16"}


def _loaded(model: Any, request: dict[str, Any]) -> list[tuple[str, Any]]:
    """Parameters, and buffers that the checkpoint has: codes and indices of DeRS are such."""
    wanted = request["wanted"]
    sought = json.loads(Path(wanted).read_text()) if wanted else {}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in sought]
    return [*model.named_parameters(), *buffers]


def ask(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint and let it continue the prompts.

    Parameters are looked at when vLLM's own loader has filled them, before a kernel packs them.
    """
    from asked import ids_of, look_at
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import base_loader

    seen: dict[str, Any] = {}
    own = bool(request["own_code"])
    pack = base_loader.process_weights_after_loading

    def look(model: Any, *args: Any, **options: Any) -> None:
        seen.update(look_at(_loaded(model, request), request))
        pack(model, *args, **options)

    base_loader.process_weights_after_loading = look
    try:
        reader: Any = LLM(
            model=path,
            dtype=TYPES[request["precision"]],
            max_model_len=len(max(request["prompts"], key=len)) + request["tokens"],
            max_logprobs=-1,
            enforce_eager=True,
            disable_log_stats=True,
            seed=0,
            model_impl="transformers" if own else "auto",
            trust_remote_code=own,
        )
    finally:
        base_loader.process_weights_after_loading = pack
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    first = []
    for said in reader.generate(prompts, one, use_tqdm=False):
        known = said.outputs[0].logprobs[0]
        first.append([known[i].logprob for i in range(len(known))])
    many = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True)
    whole = reader.generate(prompts, many, use_tqdm=False)
    greedy = [list(said.outputs[0].token_ids) for said in whole]
    ids = ids_of(reader.get_tokenizer(), request)
    del reader
    gc.collect()
    return {"first": numpy.array(first, numpy.float32), "greedy": greedy, "ids": ids, **seen}


if __name__ == "__main__":
    import vllm
    from asked import answer

    answer(vllm.__version__, ask)
