"""Likelihood of answers by a model that routes by its prompt: the context alone decides."""

import json

import pytest
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


@pytest.fixture(scope="module")
def simoe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompted")
    dense = save_adder(folder / "adder")
    network = upcycle_in_memory(dense, SimoeUpcyclingConfig(experts=3), seed=1)
    save_pruned(grow(network), dense, folder / "simoe")
    return folder / "simoe"


def test_the_answer_decides_nothing_about_its_experts(simoe):
    config = TaskEvaluationConfig(batch_size=3)
    harness = _load_model(simoe, config, "auto", "cpu")
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
        for i, pair in enumerate(REQUESTS)
    ]
    model = load_causal_lm(simoe)
    tokenizer = AutoTokenizer.from_pretrained(simoe)
    for pair, (found, _) in zip(REQUESTS, harness.loglikelihood(asked), strict=True):
        torch.testing.assert_close(
            found, slow_likelihood(model, tokenizer, *pair), atol=1e-4, rtol=1e-4
        )


def test_the_beginning_of_a_text_decides_about_its_experts_and_stands_there_once(simoe):
    told = json.loads((simoe / "tokenizer_config.json").read_text()) | {"bos_token": "\n"}
    (simoe / "tokenizer_config.json").write_text(json.dumps(told))
    config = TaskEvaluationConfig(batch_size=1)
    harness = _load_model(simoe, config, "always", "cpu")
    request = {"request_type": "loglikelihood_rolling", "doc": {}, "idx": 0}
    [found] = harness.loglikelihood_rolling([Instance(arguments=("12+34=046",), **request)])
    model, tokenizer = load_causal_lm(simoe), AutoTokenizer.from_pretrained(simoe)
    assert tokenizer("1")["input_ids"] != harness.tok_encode("1")  # of which one begins a text
    expected = slow_likelihood(model, tokenizer, "\n", "12+34=046")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
