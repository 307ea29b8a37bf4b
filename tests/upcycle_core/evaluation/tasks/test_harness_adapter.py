"""One model scored three ways: our adapter, the harness's command line, ten lines of torch."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.upcycle_core.evaluation.tasks.addition import save_adder, sums, write_definition
from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks.adapter import evaluate_tasks
from upcycle_core.evaluation.tasks.config import EvaluationTask, TaskEvaluationConfig
from upcycle_core.evaluation.tasks.definitions import write_task

COUNT = 60
QUESTIONS = dict(sums()[:COUNT])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_adder(tmp_path_factory.mktemp("adder"))


@pytest.fixture(scope="module")
def definition(tmp_path_factory):
    return write_definition(tmp_path_factory.mktemp("definition"), COUNT)


def task_set(folder, name="addition", texts=(), **task):
    out = folder / name
    write_task(
        EvaluationTask(**task), out, folder=None, root=Path("/"), seed=0, texts=lambda: texts
    )
    return {name: out}


def run(model, sets, **config):
    return evaluate_tasks(model, sets, config=TaskEvaluationConfig(**config))


def oracle(model):
    """Greedy answers, one question at a time."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model)
    answers = {}
    for question in QUESTIONS:
        ids = tokenizer(question, return_tensors="pt")["input_ids"]
        while ids.shape[1] < 6 + 6 and ids[0, -1] != tokenizer.eos_token_id:
            with torch.no_grad():
                ids = torch.cat([ids, network(ids).logits[:, -1:].argmax(-1)], 1)
        answers[question] = tokenizer.decode(ids[0, 6:]).removesuffix("\n")
    return answers


def command_line(model, definition, out):
    """{question: (answer, score)} as the harness logs it."""
    options = {
        "model": "hf",
        "model_args": f"pretrained={model}",
        "tasks": "addition",
        "include_path": definition.parent,
        "device": "cpu",
        "batch_size": 7,
        "output_path": out,
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--log_samples"]
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    subprocess.run(command, check=True, capture_output=True)
    [log] = out.rglob("samples_addition_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    return {s["doc"]["prompt"]: (s["filtered_resps"][0], s["exact_match"]) for s in samples}


@pytest.mark.faults
def test_adapter_command_line_and_oracle_agree_on_every_item(model, definition, tmp_path):
    scores, items = run(model, task_set(tmp_path, definition=str(definition)))
    ours = {item.prompt: (item.response, item.score) for item in items}
    answers = oracle(model)
    assert ours == {q: (a, float(a == QUESTIONS[q])) for q, a in answers.items()}
    assert ours == command_line(model, definition, tmp_path / "log")
    assert 0.2 < scores["addition"].mean < 0.98, "a model that is always right shows nothing"
    assert scores["addition"].mean == pytest.approx(sum(s for _, s in ours.values()) / COUNT)
    assert scores["addition"].items == COUNT
    assert {item.id for item in items} == {f"sum-{question}" for question in QUESTIONS}


def test_the_batch_does_not_matter(model, definition, tmp_path):
    sets = task_set(tmp_path, definition=str(definition))
    assert run(model, sets, batch_size=1)[1] == run(model, sets, batch_size=13)[1]


@pytest.mark.parametrize(
    "told", [{"max_new_tokens": 6}, {"repetition_penalty": 9.0}, {"suppress_tokens": [3, 4, 5]}]
)
def test_the_task_alone_says_how_answers_are_drawn(model, definition, tmp_path, told):
    """Two tokens, though the checkpoint asks for more; the likeliest, though it asks for others."""
    other = shutil.copytree(model, tmp_path / "model")
    own = json.loads((model / "generation_config.json").read_text())
    own.pop("_from_model_config", None)
    (other / "generation_config.json").write_text(json.dumps(own | told))
    sets = task_set(tmp_path, definition=str(definition), max_new_tokens=2)
    _, items = run(other, sets)
    assert items == run(model, sets)[1]
    assert {len(item.response) for item in items} == {2}


def test_likelihood_of_text_is_the_models_own(model, tmp_path):
    # Sums only: the model knows no other characters.
    texts = ["\n".join(f"{q}{a}" for q, a in sums()[i : i + 40]) for i in range(0, 400, 40)]
    sets = task_set(tmp_path, "text", texts, heldout="text", domain="any", items=3)
    scores, items = run(model, sets)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model)
    item = items[0]
    ids = tokenizer(item.target, return_tensors="pt")["input_ids"]
    # The harness begins with the end-of-text token and reads windows of the model's length.
    total, window = 0.0, network.config.max_position_embeddings
    ids = torch.cat([torch.tensor([[tokenizer.eos_token_id]]), ids], 1)
    for start in range(0, ids.shape[1] - 1, window):
        end = min(start + window, ids.shape[1] - 1)
        first = end - window if end - start < window and start else start
        with torch.no_grad():
            logits = network(ids[:, first:end]).logits.log_softmax(-1)[0, start - first :]
        total += logits.gather(1, ids[0, start + 1 : end + 1, None]).sum().item()
    assert item.score == pytest.approx(-total / len(item.target) / math.log(2), rel=1e-5)
    assert scores["text"].metric == "bits_per_byte"
    assert not scores["text"].higher_is_better


def test_few_shots_differ_by_seed_and_stand_in_the_prompt(model, definition, tmp_path):
    sets = task_set(tmp_path, definition=str(definition), shots=2, limit=5)
    scores, items = run(model, sets, seeds=(0, 1))
    assert len(scores["addition"].values) == 2
    assert len(items) == 10
    first, second = ({i.id: i.prompt for i in items if i.seed == seed} for seed in (0, 1))
    assert first.keys() == second.keys()
    assert first != second
    assert all(prompt.count("=") == 3 for prompt in first.values())


def test_cut_prompts_are_counted(model, definition, tmp_path):
    sets = task_set(tmp_path, definition=str(definition), shots=8, limit=4)
    assert run(model, sets)[0]["addition"].truncated == 4  # 8 shots of 12 in 64 positions
    sets = task_set(tmp_path, "short", definition=str(definition), shots=1, limit=4)
    assert run(model, sets)[0]["short"].truncated == 0


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"metric": "bleu"}, r"tasks.addition.metric = 'bleu'.*exact_match,none"),
        ({"max_new_tokens": 64}, r"tasks.addition.max_new_tokens = 64.*64 positions"),
    ],
)
def test_what_the_task_or_the_model_lacks_is_said(model, definition, tmp_path, task, message):
    with pytest.raises(InputError, match=message):
        run(model, task_set(tmp_path, definition=str(definition), **task))


def test_a_chat_template_is_needed_to_use_one(model, definition, tmp_path):
    with pytest.raises(InputError, match=r"chat_template = True.*has no chat template"):
        run(model, task_set(tmp_path, definition=str(definition)), chat_template=True)
