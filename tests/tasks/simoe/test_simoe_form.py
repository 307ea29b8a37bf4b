"""In which form a model that was tuned on instructions is given away."""

import copy
import json
from pathlib import Path

import pytest
from pico import save_pico
from test_simoe_faults import VALID
from transformers import AutoTokenizer

from tasks.recipes import validate
from tasks.simoe.answers import answer_arguments, answers, champion_piece
from tasks.simoe.model import baselines, model, simoe_piece
from tasks.training import Instructions, train_piece
from upcycle_core.progress import Silent
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.training.config import TrainingConfig

CONFIG = TrainingConfig(steps=2, batch_size=2, sequence_length=16, warmup_steps=1, precision="fp32")
FORM = "<|endoftext|>two and two?\n\nfour<|endoftext|>"


@pytest.fixture
def instructions(tmp_path):
    (tmp_path / "instructions" / "train").mkdir(parents=True)
    file = tmp_path / "instructions" / "train" / "all.jsonl"
    file.write_text(json.dumps({"prompt": "two and two?", "response": "four"}) + "\n")
    return tmp_path / "instructions"


def written(directory):
    said = [
        {"role": "user", "content": "two and two?"},
        {"role": "assistant", "content": "four"},
    ]
    return AutoTokenizer.from_pretrained(directory).apply_chat_template(said, tokenize=False)


def test_the_model_and_its_rivals_bring_the_form_in_which_they_were_tuned(tmp_path, instructions):
    common = {"progress": Silent(), "config": CONFIG, "seed": 0, "device": "cpu"}
    common["start"] = save_pico(tmp_path / "seed")
    simoe_piece(
        out=tmp_path / "model",
        instructions=instructions,
        cuts=True,
        bos="always",
        simoe=SimoeUpcyclingConfig(experts=2, masks="real"),
        max_shard_bytes=10**9,
        **common,
    )
    data = Instructions(files=[instructions / "train" / "all.jsonl"], bos="always")
    train_piece(out=tmp_path / "rival", data=data, **common)
    assert written(tmp_path / "model") == written(tmp_path / "rival") == FORM


@pytest.mark.parametrize(("has_form", "bos"), [(True, "auto"), (False, "never")])
def test_a_champion_of_before_is_asked_as_it_was_tuned(tmp_path, monkeypatch, has_form, bos):
    given = {}
    save_pico(tmp_path / "model")
    if has_form:
        (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    monkeypatch.setattr("tasks.simoe.answers.answers_piece", lambda **found: given.update(found))
    champion_piece(model=tmp_path / "model", bos="auto", out=tmp_path / "out")
    assert given == {"model": tmp_path / "model", "bos": bos, "out": tmp_path / "out"}


def test_a_recipe_s_bos_is_that_of_tuning_and_judging():
    values = copy.deepcopy(VALID)
    before, after = (validate(values | {"corpus": {"bos": bos}}) for bos in ("never", "always"))
    for stage, item in ((model, ""), (baselines, "dense"), (answers, "simoe")):
        assert stage.values(before, item) != stage.values(after, item)
    assert answer_arguments(after, Path)["bos"] == "always"


def test_the_precision_of_answers_counts_where_it_is_not_the_default():
    """Answers of before, in fp32, stay."""
    values = copy.deepcopy(VALID)
    values["tuning"] = values.get("tuning", {}) | {"precision": "bf16"}
    before, after = validate(copy.deepcopy(VALID)), validate(values)
    assert "tuning.precision" not in answers.values(before, "simoe")
    assert answers.values(after, "simoe")["tuning.precision"] == "bf16"
    assert answer_arguments(after, Path)["precision"] == "bf16"
