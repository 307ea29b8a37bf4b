"""Ask llama.cpp: ``python ask_llama_cpp.py REQUEST``, with the interpreter of its environment."""

import json
from importlib.metadata import version
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import numpy
import xllamacpp
from asked import answer


def ask(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Load a GGUF file and let it continue the prompts, keys and values kept in fp32."""
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = len(max(request["prompts"], key=len)) + request["tokens"] + 1
    params.n_parallel = 1
    params.warmup = False
    # Its threads wait for each other by spinning, which costs minutes on a machine with other work.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    first, greedy = [], []
    for prompt in request["prompts"]:
        row = numpy.full(request["vocabulary"], -numpy.inf, numpy.float32)
        for one in _next(server, prompt, known=request["vocabulary"], plain=request["plain"]):
            row[one["id"]] = one["logprob"]
        first.append(row)
        said: list[int] = []
        while len(said) < request["tokens"]:
            best = _next(server, [*prompt, *said], known=1, plain=request["plain"])
            said.append(best[0]["id"])
        greedy.append(said)
    ids = [_ids(server, text) for text in request["read"]]
    return {"first": numpy.stack(first), "greedy": greedy, "ids": ids}


def _ids(server: Any, text: str) -> list[int]:
    """What its tokenizer makes of a text, which stays text whatever it names.

    Only the server that it opens on loopback says so.
    """
    asked = {"content": text, "add_special": False, "parse_special": False}
    request = Request(
        f"{server.listening_address}/tokenize",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with build_opener(ProxyHandler({})).open(request) as said:
        return list(json.load(said)["tokens"])


def _next(server: Any, prompt: list[int], *, known: int, plain: int) -> list[dict[str, Any]]:
    """The ``known`` likeliest tokens after a prompt: their ids and logarithms of probability.

    The server says nothing of a token that ends a text, or half a character. So ``plain`` is what
    it must say; the probabilities are those from before it is made to.
    """
    said = server.handle_completions(
        {
            "prompt": prompt,
            "n_predict": 1,
            "temperature": 0,
            "n_probs": known,
            "logit_bias": [[plain, 1000.0]],
        }
    )
    if "choices" not in said:
        raise RuntimeError(f"llama.cpp says {said}")
    return said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]


if __name__ == "__main__":
    answer(version("xllamacpp"), ask)
