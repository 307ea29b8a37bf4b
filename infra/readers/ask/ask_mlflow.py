"""Ask what MLflow loads: ``python ask_mlflow.py REQUEST``, with the files of a version."""

from importlib.metadata import version
from typing import Any

import mlflow
import torch
from ask_transformers import TYPES, continued
from asked import answer, ids_of, look_at
from transformers import GenerationConfig


def ask(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Load a version as a Python function, and let its model continue the prompts.

    It answers in the precision that is asked for; its weights are the version's own.
    """
    loaded: Any = mlflow.pyfunc.load_model(path)
    generator = loaded.get_raw_model()
    generator.model.to(TYPES[request["precision"]])
    # Text ends where the model ends it; penalties that it asks for would not be greedy.
    ends = generator.model.generation_config.eos_token_id
    generator.model.generation_config = GenerationConfig(eos_token_id=ends)
    asked = {"max_new_tokens": request["tokens"]}
    said = loaded.predict(request["texts"], params=asked)
    found = {
        "texts": said,
        "bos": generator.bos,
        "ids": ids_of(generator.tokenizer, request),
        **look_at(generator.model.state_dict().items(), request),
    }
    return {**continued(generator.model, request), **found}


if __name__ == "__main__":
    with torch.inference_mode():
        answer(version("mlflow"), ask)
