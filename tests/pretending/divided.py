"""``python -m tests.pretending.divided FOLDER``: models that answer on two pretended GPUs at once.

Prints as JSON what each gave there and on the CPU, and which of the two its first and last layer
lay on.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.utils import compute_module_sizes
from lm_eval.api.instance import Instance
from transformers.utils import logging

from tests.pretending.gpu import NAME, pretended_gpu  # isort: skip  (before what it changes)
from tests.pico import CONFIGS, save_pico
from tests.upcycle_core.ders.grown import grow as grow_moe
from tests.upcycle_core.evaluation.tasks.test_harness_routing import Bench
from tests.upcycle_core.simoe.grown import grow as grow_simoe
from upcycle_core.checkpoints import divided
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig
from upcycle_core.evaluation.tasks.adapter import _load_model
from upcycle_core.evaluation.tasks.config import TaskEvaluationConfig
from upcycle_core.evaluation.text.pieces import Variant
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.prune import save_pruned
from upcycle_core.simoe.upcycle import upcycle_in_memory

GPUS = [f"{NAME}:{index}" for index in range(2)]
LAYERS = {"num_hidden_layers": 4}
CODECS = [
    CodecConfig(codec="sparse", drop_rate=0.5),
    CodecConfig(codec="quantised", bits=4),
    CodecConfig(codec="low_rank", rank=4),
]
CHOICES = [("12+34=", "46"), ("12+34=", "7"), ("for ", "i in x"), ("1+", "1=2")]
PROMPTS = ["12+34=", "WHEREAS"]


def made(folder: Path) -> dict[str, Path]:
    """Models of every kind that is scored on tasks."""
    found = {"dense": save_pico(folder / "dense", tie_word_embeddings=True, **LAYERS)}
    for family in CONFIGS:
        grown = grow_moe(folder / family, family, **LAYERS)
        copy_tokenizer(grown.seed, grown.model)
        found[family] = grown.model
    seed = folder / "llama" / "seed"
    for codec in CODECS:
        name = f"ders {codec.codec}"
        found[name] = folder / name
        compress(found["llama"], found[name], config=codec, base=seed)
        copy_tokenizer(seed, found[name])
    for routing in ("instance", "token"):
        network = upcycle_in_memory(seed, SimoeUpcyclingConfig(experts=3, routing=routing), seed=1)
        found[f"simoe {routing}"] = folder / f"simoe-{routing}"
        save_pruned(grow_simoe(network), seed, found[f"simoe {routing}"])
    return found


def answers(model: Path, device: str) -> dict[str, Any]:
    """Likelihoods of answers, and what is generated."""
    harness = _load_model(model, TaskEvaluationConfig(batch_size=3), "auto", device)
    likely = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index)
        for index, pair in enumerate(CHOICES)
    ]
    settings = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}
    asked = [
        Instance(request_type="generate_until", doc={}, arguments=(prompt, settings), idx=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    return {
        "likelihoods": [value for value, _ in harness.loglikelihood(likely)],
        "generated": harness.generate_until(asked),
    }


def ways(bench: Bench) -> dict[str, Callable[[str], dict[str, float]]]:
    """How a MoE is asked, beside as it was saved."""
    hows: dict[str, dict[str, Any]] = {
        "other routers": {"variant": Variant(routers=bench.routers[1])},
        "two experts": {"variant": Variant(top_k=2)},
        "one expert": {"experts": {"law": 0, "code": 1}},
    }
    return {
        name: lambda device, how=how: bench.values(bench.moe(), device=device, **how)
        for name, how in hows.items()
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    models, asked = made(folder), ways(Bench(folder / "bench"))
    found: dict[str, Any] = {
        "cpu": {name: answers(path, "cpu") for name, path in models.items()},
        "ways cpu": {name: way("cpu") for name, way in asked.items()},
    }
    places = {}

    def half(model: Any, rooms: Any) -> Any:
        """As ``divide`` with room for little more than half of the model on each."""
        size = compute_module_sizes(model)[""]
        whole = divided.divide(model, dict.fromkeys(GPUS, 9 * size // 10))
        places[model.name_or_path] = sorted({str(w.device) for w in whole.parameters()})
        return whole

    with (
        pretended_gpu(),
        mock.patch("upcycle_core.checkpoints.load.divide", half),
        mock.patch("upcycle_core.checkpoints.load.entrance", return_value=GPUS[0]),
        mock.patch("upcycle_core.evaluation.tasks.memory.free_on", return_value=10**9),
    ):
        found["gpus"] = {name: answers(path, "auto") for name, path in models.items()}
        found["ways gpus"] = {name: way("auto") for name, way in asked.items()}
    print(json.dumps({**found, "places": list(places.values())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
