"""Experts that exist already: nothing is trained, the router can be solved layer by layer, and what
fits as it is is on the disk once."""

import html
import json

import pytest
import torch
from disk import shares_blocks
from pico import save_pico
from project import Project
from safetensors.torch import load_file, save
from texts import save_recipe, write_texts

# The flow of the demo with given experts: minutes.
pytestmark = pytest.mark.faults

DOMAINS = ("letters", "numbers")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ready")
    texts = write_texts(folder / "texts", domains=DOMAINS)
    values = {
        "name": "pico",
        "folder": str(texts),
        "domains": {
            domain: {
                "expert": str(
                    save_pico(
                        folder / domain,
                        "qwen2",
                        seed=i,
                        intermediate_size=64,
                        max_position_embeddings=128 >> i,
                    )
                ),
                "calibration": {"files": [f"{{folder}}/{domain}/train.txt"]},
                "heldout": {"files": [f"{{folder}}/{domain}/heldout.txt"]},
            }
            for i, domain in enumerate(DOMAINS)
        },
        "router": {"solve": "sequential", "ridge_lambda": "cross-validate"},
        "moe": {"top_k": 2},
        "statistics": {"sequence_length": 32, "batch_size": 4},
        "evaluation": {"sequence_length": 32, "random_routing_seeds": [0]},
        "versions": {"given_weights": "link"},
        "compute": {"cpus": 2},
    }
    project = Project(folder, save_recipe(folder / "recipe.yaml", values))
    project.flow()
    return project


def test_nothing_is_trained(project):
    calls = project.calls()
    assert calls["train"] == 0
    assert calls["train_tokenizer"] == 0
    assert calls["assemble"] == 2  # one to send tokens through while routers are solved
    assert not (project.workspace / "seed").exists()


def test_report_has_no_seed_row(project):
    metrics = json.loads((project.workspace / "report" / "metrics.json").read_text())
    assert "seed" not in metrics["normalised_average"]
    assert {"random_routing", "model_averaging", "dume", "oracle"} <= set(
        metrics["normalised_average"]
    )


def test_the_smallest_length_counts_and_page_and_card_say_so(project):
    workspace = project.workspace
    config = json.loads((workspace / "model" / "config.json").read_text())
    assert config["max_position_embeddings"] == 64
    told = "letters: max_position_embeddings: 128 -> 64, the smallest of all models counts"
    for place in ("report/report.html", "model/README.md"):
        said = html.unescape((workspace / place).read_text())
        assert told in said
        assert "numbers: max_position" not in said


def test_model_holds_the_experts_as_they_were(project):
    model = load_file(project.workspace / "model" / "model.safetensors")
    config = json.loads((project.workspace / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2MoeForCausalLM"]
    assert config["num_experts_per_tok"] == 2
    for index, domain in enumerate(DOMAINS):
        expert = load_file(project.workspace / "experts" / domain / "model.safetensors")
        for layer in range(2):
            for part in ("gate_proj", "up_proj", "down_proj"):
                mine = model[f"model.layers.{layer}.mlp.experts.{index}.{part}.weight"]
                assert torch.equal(mine, expert[f"model.layers.{layer}.mlp.{part}.weight"])
    routers = [model[f"model.layers.{layer}.mlp.gate.weight"] for layer in range(2)]
    for router in routers:
        torch.testing.assert_close(router.norm(dim=1), torch.ones(2), atol=1e-5, rtol=0)


def given_and_published(project, domain):
    """An expert's weights where the user has them, and in the workspace."""
    weights = "model.safetensors"
    return (
        project.recipe.parent / domain / weights,
        project.workspace / "experts" / domain / weights,
    )


def test_what_fits_as_it_is_is_a_link_and_what_does_not_a_file_of_its_own(project):
    given, published = given_and_published(project, "numbers")
    assert published.samefile(given) or shares_blocks(project.workspace)
    if published.samefile(given):
        assert given.stat().st_mode & 0o222 == 0  # who changes it must mean to
    given, published = given_and_published(project, "letters")
    assert not published.samefile(given)
    assert given.stat().st_mode & 0o200


def test_weights_that_are_written_over_through_a_link_are_another_expert(project):
    before, given = project.digests(), given_and_published(project, "numbers")[0]
    weights = load_file(given)
    weights["model.norm.weight"] = weights["model.norm.weight"] + 0.5
    given.chmod(0o644)
    given.write_bytes(save(weights))
    project.flow()
    after = project.digests()
    changed = {name for name in before if before[name] != after[name]}
    assert "experts/numbers/model.safetensors" in changed
    assert "model/model.safetensors" in changed
    assert "experts/letters/model.safetensors" not in changed
