import json
from dataclasses import replace

import pytest

from tests.pico import save_pico
from tests.upcycle_core.moe.joined import join
from tests.upcycle_core.training.runs import RandomRows, run, settings
from upcycle_core.errors import InputError
from upcycle_core.training.config import MoEObjective
from upcycle_core.training.resume import differences, training_record


def listed(there, here):
    return list(differences(there, here))


def record(config=None, seed=0, objective=None, fingerprint=None):
    return training_record(config or settings(), seed, objective, fingerprint or {})


def as_read(written):
    return json.loads(json.dumps({**written, "loss": 1.0, "seconds": 2.0}))


def test_what_was_written_equals_what_is_read():
    objective = MoEObjective(trainable=("router", "experts"), domain_weights={"law": 2.0})
    one = record(objective=objective, fingerprint={"corpora": {"law": "ab", "code": "cd"}})
    assert not listed(as_read(one), one)


def test_every_difference_is_listed_with_both_values_and_nothing_else():
    old = record(
        seed=1,
        objective=MoEObjective(balance_coefficient=0.1),
        fingerprint={"corpora": {"law": "ab", "code": "cd"}},
    )
    new = record(
        settings(steps=7, learning_rate=1e-4),
        objective=MoEObjective(trainable=("router",)),
        fingerprint={"corpora": {"law": "ef", "code": "cd", "mathematics": "gh"}},
    )
    assert listed(as_read(old), new) == [
        "config.learning_rate was 0.003, is 0.0001",
        "config.steps was 6, is 7",
        "fingerprint.corpora.law was 'ab', is 'ef'",
        "fingerprint.corpora.mathematics was nothing, is 'gh'",
        "objective.balance_coefficient was 0.1, is 0.0",
        "objective.trainable was ['all'], is ['router']",
        "seed was 1, is 0",
    ]


def test_a_record_of_before_has_defaults_for_what_it_does_not_say():
    old = as_read(record())
    for key in ("gradient_checkpointing", "evaluation_steps", "keep"):
        del old["config"][key]
    del old["objective"], old["fingerprint"]
    assert not listed(old, record())
    new = record(replace(settings(), keep="best"), objective=MoEObjective())
    found = listed(old, new)
    assert "config.keep was 'last', is 'best'" in found
    assert "objective.watch_steps was nothing, is 50" in found


def test_which_steps_have_a_checkpoint_matters_to_an_extension_alone():
    config = settings(checkpoint_steps=2)
    for extension, expected in ({}, []), ({"of": "x"}, ["config.checkpoint_steps was 100, is 2"]):
        old, new = (training_record(c, 0, None, {}, extension) for c in (settings(), config))
        assert listed(as_read(old), new) == expected


def test_a_training_goes_on_with_recomputed_activations_and_other_intervals(tmp_path):
    model = save_pico(tmp_path / "model")
    config = settings(checkpoint_steps=4, log_steps=2)
    run(tmp_path, model, "whole", config=config)
    run(tmp_path, model, config=config)
    checkpoints = tmp_path / "out-checkpoints"
    (checkpoints / "checkpoint-6" / "complete.json").unlink()  # as after a kill
    config = replace(config, gradient_checkpointing=True, checkpoint_steps=1, log_steps=1)
    result = run(tmp_path, model, config=config)
    whole, out = (tmp_path / name / "model.safetensors" for name in ("whole", "out"))
    assert whole.read_bytes() == out.read_bytes()
    assert [point["step"] for point in result.curves if "loss" in point] == [1, 2, 4, 5, 6]
    assert {path.name for path in checkpoints.iterdir()} == {"checkpoint-5", "checkpoint-6"}


def test_a_training_refuses_checkpoints_of_other_data(tmp_path):
    model = join(tmp_path / "moe", top_k=2).model
    objective = MoEObjective()
    options = {"objective": objective, "fingerprint": {"corpus": "ab"}}
    run(tmp_path, model, **options)
    before = {path: path.stat().st_mtime for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError) as error:
        run(
            tmp_path,
            model,
            seed=4,
            objective=MoEObjective(z_coefficient=0.5),
            fingerprint={"corpus": "cd"},
        )
    (fault,) = error.value.faults
    assert fault.field == "checkpoints"
    assert "fingerprint.corpus was 'ab', is 'cd'; objective.z_coefficient was 0.0, is 0.5; " in (
        fault.remedy
    )
    assert fault.remedy.endswith("seed was 0, is 4")
    after = {path: path.stat().st_mtime for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
    run(tmp_path, model, **options)


def test_a_checkpoint_of_before_is_continued(tmp_path):
    model = save_pico(tmp_path / "model")
    config = settings(checkpoint_steps=2)
    run(tmp_path, model, "whole", config=config)
    run(tmp_path, model, config=config)
    for marker in (tmp_path / "out-checkpoints").glob("*/complete.json"):
        old = json.loads(marker.read_text())
        for key in ("gradient_checkpointing", "evaluation_steps", "keep"):
            del old["config"][key]
        for key in ("objective", "fingerprint", "sizes", "sha256", "seal"):
            del old[key]
        marker.write_text(json.dumps(old))
    (tmp_path / "out-checkpoints" / "checkpoint-6" / "complete.json").unlink()
    run(tmp_path, model, config=config, rows=RandomRows(12))
    whole, out = (tmp_path / name / "model.safetensors" for name in ("whole", "out"))
    assert whole.read_bytes() == out.read_bytes()
