"""Likelihood of answers by a model that routes by its prompt: the context alone decides."""

import torch
from lm_eval.api.instance import Instance
from transformers import AutoTokenizer

from tests.upcycle_core.evaluation.tasks.addition import save_adder
from tests.upcycle_core.simoe.grown import grow
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.evaluation.tasks.adapter import _load_model
from upcycle_core.evaluation.tasks.config import TaskEvaluationConfig
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.prune import save_pruned
from upcycle_core.simoe.upcycle import upcycle_in_memory

REQUESTS = [
    ("12+34=", "46"),
    ("12+34=", "7"),
    ("5+5=", "10\n"),
    ("1+", "1=2"),
    ("12+35=", "4"),
]


def slow_likelihood(model, tokenizer, context, answer):
    """One request at a time: coefficients of the context, then the logits with them."""
    whole = tokenizer(context + answer, return_tensors="pt")["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        alpha = model.coefficients(whole[:, :start])
        logs = model(whole, coefficients=alpha).logits.log_softmax(-1)[0]
    return sum(float(logs[place - 1, whole[0, place]]) for place in range(start, whole.shape[1]))


def test_the_answer_decides_nothing_about_its_experts(tmp_path):
    dense = save_adder(tmp_path / "adder")
    network = upcycle_in_memory(dense, SimoeUpcyclingConfig(experts=3), seed=1)
    save_pruned(grow(network), dense, tmp_path / "simoe")
    config = TaskEvaluationConfig(batch_size=3)
    harness = _load_model(tmp_path / "simoe", config, "auto", "cpu")
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
        for i, pair in enumerate(REQUESTS)
    ]
    model = load_causal_lm(tmp_path / "simoe")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "simoe")
    for pair, (found, _) in zip(REQUESTS, harness.loglikelihood(asked), strict=True):
        torch.testing.assert_close(
            found, slow_likelihood(model, tokenizer, *pair), atol=1e-4, rtol=1e-4
        )
