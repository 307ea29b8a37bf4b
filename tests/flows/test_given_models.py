"""Experts as GGUF files and as a registered adapter: the model that safetensors make."""

import json

import pytest
import torch
from forms import save_adapter, save_bpe_model, save_gguf, save_merged, save_rounded
from project import Project
from safetensors.torch import load_file
from texts import WORDS, save_recipe, write_texts

from infra import settings
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker

# Two flows with given experts: minutes.
pytestmark = pytest.mark.faults


def recipe(name, texts, seed, experts):
    return {
        "name": name,
        "folder": str(texts),
        "seed_model": {"model": str(seed)},
        "domains": {
            domain: {
                "expert": str(expert),
                "calibration": {"files": [f"{{folder}}/{domain}/train.txt"]},
                "heldout": {"files": [f"{{folder}}/{domain}/heldout.txt"]},
            }
            for domain, expert in experts.items()
        },
        "statistics": {"sequence_length": 32, "batch_size": 4},
        "evaluation": {"sequence_length": 32, "random_routing_seeds": [0]},
        "compute": {"cpus": 2},
    }


def register(project, checkpoint):
    """Make a checkpoint the champion of ``letters``, as our flows or another's do."""
    place = settings.read(project.environment())
    registry = Registry(place)
    with Tracker(place, "elsewhere").start_run("made") as run:
        version = registry.register("letters", checkpoint, Registration(), run=run)
    registry.set_alias(version, "champion")


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    texts = write_texts(folder / "texts")
    words = [" ".join(own) for own in WORDS.values()] * 5
    seed = save_bpe_model(folder / "seed", words)
    plain = {d: save_bpe_model(folder / d, words, seed=i) for i, d in enumerate(WORDS, 1)}
    adapter, tuned = save_adapter(folder / "adapter", seed, target_modules=["up_proj", "q_proj"])
    plain["letters"] = save_merged(folder / "merged", tuned, seed)
    given = {
        "letters": "models:/letters@champion",
        "numbers": save_gguf(folder / "numbers.gguf", plain["numbers"]),
        "colours": save_gguf(folder / "colours.gguf", plain["colours"], matrices="Q8_0"),
    }
    save_rounded(plain["colours"], "Q8_0")
    found = {}
    for name, experts in (("plain", plain), ("given", given)):
        values = recipe(name, texts, seed, experts)
        found[name] = Project(folder, save_recipe(folder / f"{name}.yaml", values), name)
        register(found[name], adapter) if name == "given" else None
        found[name].flow()
    return found


def test_the_model_is_the_same_to_the_last_bit(projects):
    ours, theirs = (
        load_file(projects[name].workspace / "model" / "model.safetensors")
        for name in ("given", "plain")
    )
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_card_and_report_say_what_experts_were(projects):
    workspace = projects["given"].workspace
    adapter = "letters: LoRA adapter (rank 4, 4 matrices) merged into its base"
    file = "numbers: GGUF file (F32), dequantised to float32"
    for place in ("model/README.md", "report/report.html"):
        said = (workspace / place).read_text()
        assert adapter in said
        assert file in said
        assert "colours: GGUF file (Q8_0), dequantised to bfloat16" in said
    assert "LoRA" not in (projects["plain"].workspace / "model" / "README.md").read_text()


def test_what_was_looked_at_is_the_converted_checkpoint(projects):
    sources = json.loads((projects["given"].workspace / "sources" / "letters.json").read_text())
    assert {"given_as.json", "model.safetensors", "tokenizer.json"} <= set(sources["expert"])
    assert projects["given"].calls()["merge_adapter"] == 1
