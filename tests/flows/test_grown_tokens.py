"""A given expert that comes with tokens of its own: those that are there get rows for them, too."""

import json
import sys

import pytest
from pico import save_pico
from project import Project
from texts import save_recipe, write_texts
from transformers import AutoModelForCausalLM, AutoTokenizer

# Two flows with given experts: minutes.
pytestmark = pytest.mark.faults

TOKENS = ["<|im_start|>", "<|im_end|>"]


def with_tokens(directory):
    """Tokens added the way people do: to the tokenizer, and rows to embedding and head."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(TOKENS, special_tokens=True)
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(directory)
    return directory


def recipe(texts, experts):
    domains = {
        name: {
            "expert": str(expert),
            "calibration": {"files": [f"{{folder}}/{name}/train.txt"]},
            "heldout": {"files": [f"{{folder}}/{name}/heldout.txt"]},
        }
        for name, expert in experts.items()
    }
    return {
        "name": "pico",
        "folder": str(texts),
        "domains": domains,
        "statistics": {"sequence_length": 32, "batch_size": 4},
        "evaluation": {"sequence_length": 32, "random_routing_seeds": [0]},
        "compute": {"cpus": 2},
    }


@pytest.mark.parametrize("rebuild", [False, True], ids=["grown", "rebuilt"])
def test_a_domain_whose_expert_has_more_tokens_joins(tmp_path, rebuild):
    texts = write_texts(tmp_path / "texts")
    experts = {d: save_pico(tmp_path / d, seed=i) for i, d in enumerate(("letters", "numbers"))}
    project = Project(tmp_path, save_recipe(tmp_path / "recipe.yaml", recipe(texts, experts)))
    project.flow()
    experts["colours"] = with_tokens(save_pico(tmp_path / "colours", seed=2))
    save_recipe(project.recipe, recipe(texts, experts))
    more = ["--rebuild"] if rebuild else []
    project.run(sys.executable, "-m", "flows.grow", str(project.recipe), "colours", *more)
    metrics = json.loads((project.workspace / "report" / "metrics.json").read_text())
    assert set(metrics["perplexity"]["dume"]) >= set(experts)
    rows = json.loads((project.workspace / "model" / "config.json").read_text())["vocab_size"]
    said = f"lacks 2 tokens of colours ({', '.join(TOKENS)})"  # with --rebuild, too: it is pinned
    assert rows == 96 + (len(TOKENS) if rebuild else 0)  # the pinned backbone has no more
    summary = " ".join((project.workspace / "summary.txt").read_text().split())
    assert said in summary
