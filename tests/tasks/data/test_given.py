"""Given models are read by several stages, maybe hours apart: all read what was looked at."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pico import save_pico
from texts import pico_recipe, write_texts

from infra.recipe.schema import Lineage, resolve
from tasks.data import seed, tokenizer
from tasks.data import sources as looked
from tasks.dume import experts
from tasks.engine.artifacts import FORMS
from tasks.engine.stage import Session, StageRun
from tasks.engine.workspace import Workspace
from tasks.recipes import validate
from tasks.symphony import experts as strangers
from tasks.symphony import sources as strange
from tests.tasks.living.test_lineage import publish
from upcycle_core.backbone.form import Form, changes
from upcycle_core.checkpoints import known
from upcycle_core.checkpoints.copy import PATTERNS, belongs
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.errors import InputError

DOMAINS = ("letters", "numbers")
CHANGED = "changed while the flow ran (model.safetensors); run it again"


class Flow:
    """A recipe of a given seed and two given experts, which lie where links lead to."""

    def __init__(self, folder: Path, **more) -> None:
        texts = write_texts(folder / "texts", domains=DOMAINS)
        for number, name in enumerate(("first", "second", "third")):
            save_pico(folder / name, seed=number)
        for name, version in {"seed": "first", "letters": "first", "numbers": "second"}.items():
            (folder / name).symlink_to(folder / version)
        domains = {
            domain: {
                "expert": str(folder / domain),
                "calibration": {"files": [f"{texts}/{domain}/train.txt"]},
                "heldout": {"files": [f"{texts}/{domain}/heldout.txt"]},
            }
            for domain in DOMAINS
        }
        values = {"name": "pico", "seed_model": {"model": str(folder / "seed")}, "domains": domains}
        values |= {section: {"sequence_length": 32} for section in ("statistics", "evaluation")}
        recipe = validate(values | more)
        self.folder = folder
        self.session = Session(recipe, Workspace(folder / "home" / "pico"), log=print)

    def move(self, name: str, version: str = "third") -> None:
        """Let a name mean other files, as an alias of a registry does."""
        (self.folder / name).unlink()
        (self.folder / name).symlink_to(self.folder / version)

    def refused(self, stage, item: str = "") -> str:
        with pytest.raises(InputError) as error:
            stage.ensure(self.session, item)
        return str(error.value)


@pytest.fixture
def flow(tmp_path):
    made = Flow(tmp_path)
    looked.sources.ensure(made.session)
    return made


def test_files_that_nobody_looked_at_are_not_placed(flow):
    flow.move("letters")
    said = flow.refused(experts.experts, "letters")
    assert f"domains.letters.expert = '{flow.folder / 'letters'}': {CHANGED}" in said
    assert not flow.session.workspace.path("experts/letters").exists()
    flow.move("seed")
    assert f"seed_model.model = '{flow.folder / 'seed'}': {CHANGED}" in flow.refused(seed.seed)
    looked.sources.ensure(flow.session)  # run again
    assert experts.experts.ensure(flow.session, "letters")
    assert experts.experts.ensure(flow.session, "numbers")
    assert seed.seed.ensure(flow.session)


def test_files_that_change_while_they_are_copied_are_not_published(flow, monkeypatch):
    from tasks.data import given

    def write(*arguments, **more):
        write_in_form(*arguments, **more)
        shutil.copy(flow.folder / "third" / "model.safetensors", flow.folder / "first")

    write_in_form = given.write_in_form
    monkeypatch.setattr(given, "write_in_form", write)
    assert CHANGED in flow.refused(experts.experts, "letters")
    assert not flow.session.workspace.path("experts/letters").exists()


def test_a_tokenizer_that_nobody_looked_at_is_not_copied(flow):
    changed = flow.folder / "letters" / "tokenizer.json"
    changed.write_text(changed.read_text() + "\n")
    said = flow.refused(tokenizer.tokenizer)
    assert "domains.letters.expert" in said
    assert CHANGED.replace("model.safetensors", "tokenizer.json") in said


def test_an_adapter_beside_weights_that_is_left_alone_is_said(tmp_path, capsys):
    """transformers would load it on top of what it names; a merged model may lie there as well."""
    made = Flow(tmp_path)
    (tmp_path / "second" / "adapter_config.json").write_text("{}")
    looked.sources.ensure(made.session)
    lines = [line for line in capsys.readouterr().out.splitlines() if "an adapter lies" in line]
    (line,) = lines
    assert "WARNING: numbers: " in line


def test_what_lies_beside_a_checkpoint_may_change(flow):
    (flow.folder / "letters" / "README.md").write_text("Read me.\n")
    (flow.folder / "letters" / "checkpoint-10").mkdir()
    (flow.folder / "letters" / "checkpoint-10" / "model.safetensors").write_text("of a training")
    assert experts.experts.ensure(flow.session, "letters")


def test_weights_that_have_not_changed_are_not_read_again_to_compare_them(tmp_path, monkeypatch):
    monkeypatch.setattr(known, "SETTLED_NS", -(10**12))
    flow, read = Flow(tmp_path), []
    looked.sources.ensure(flow.session)
    digest = known._sha256_of
    monkeypatch.setattr(known, "_sha256_of", lambda path: read.append(path) or digest(path))
    experts.experts.ensure(flow.session, "letters")
    weights = tmp_path / "first" / "model.safetensors"
    assert weights not in [path.resolve() for path in read]


def again(flow, domain):
    """What an expert is after the text beside it has changed: its files' inodes, and its digest."""
    with (flow.folder / "texts" / domain / "train.txt").open("a") as file:
        file.write("omega")
    looked.sources.ensure(flow.session)
    assert experts.experts.ensure(flow.session, domain)
    workspace = flow.session.workspace
    weights = workspace.path(f"experts/{domain}") / "model.safetensors"
    return weights.stat().st_ino, workspace.digest(f"experts/{domain}")


@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_an_expert_beside_new_text_is_the_one_that_is_there(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(known, "SETTLED_NS", -(10**12))
    flow = Flow(tmp_path, experts={"dtype": dtype})
    workspace = flow.session.workspace
    first = again(flow, "letters")
    read = []
    digest = known._sha256_of
    monkeypatch.setattr(known, "_sha256_of", lambda path: read.append(path.name) or digest(path))
    assert again(flow, "letters") == first
    assert workspace.provenance("experts/letters") is not None
    assert "model.safetensors" not in read  # also once the one of before is gone
    flow.move("letters")
    inode, other = again(flow, "letters")
    assert inode != first[0]
    assert other != first[1]


def test_an_expert_that_is_damaged_is_copied_again(flow):
    first = again(flow, "letters")
    weights = flow.session.workspace.path("experts/letters") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    inode, digest = again(flow, "letters")
    assert (inode != first[0], digest) == (True, first[1])


def test_models_that_share_no_seed_are_held_against_what_was_looked_at_too(tmp_path):
    flow = Flow(tmp_path, seed_model={}, symphony={"calibration": {"sequence_length": 32}})
    strange.sources.ensure(flow.session)
    flow.move("numbers")
    assert CHANGED in flow.refused(strangers.experts, "numbers")
    assert strangers.experts.ensure(flow.session, "letters")


def joined(folder, **overrides):
    """Two strangers that were trained from given models; a third may come."""
    short = {"sequence_length": 32}
    flow = Flow(folder, experts={"training": short}, symphony={"calibration": short}, seed_model={})
    flow.values = resolve(flow.session.recipe)
    for number, (name, domain) in enumerate(flow.values["domains"].items()):
        model = save_pico(folder / f"{name}-begins", seed=number, dtype="bfloat16", **overrides)
        domain |= {"train": domain["calibration"], "origin": {"model": str(model)}, "expert": None}
    flow.session.recipe = validate(flow.values)
    strange.sources.ensure(flow.session)
    workspace = flow.session.workspace
    for name in DOMAINS:
        form = f"sources/{FORMS}/{name}"
        publish(workspace, f"experts/{name}", **{form: workspace.digest(form)})
    return flow


def comes(flow, *, anew=False, **overrides):
    """A third stranger joins the two, with a lineage; what its form and theirs are."""
    third = save_pico(flow.folder / "begins", seed=5, **overrides)
    text = flow.folder / "colours.txt"
    text.write_text("red blue green\n" * 40)
    flow.values["domains"]["colours"] = {
        "train": {"files": [str(text)]},
        "origin": {"model": str(third)},
    }
    lineage = None if anew else Lineage(anchor="letters")
    flow.session.recipe = replace(validate(flow.values), lineage=lineage)
    strange.sources.ensure(flow.session)
    folder = flow.session.workspace.path("sources") / FORMS
    return {n: Form.load(folder / n) for n in ("colours", *DOMAINS)}


def test_a_stranger_that_comes_gives_those_that_are_trained_no_other_form(tmp_path):
    """For it they would be trained again; what is joined has a type and a length for all."""
    flow = joined(tmp_path)
    workspace, names = flow.session.workspace, [f"sources/{FORMS}/{name}" for name in DOMAINS]
    before = list(map(workspace.digest, names))
    found = comes(flow, max_position_embeddings=64)
    assert list(map(workspace.digest, names)) == before
    assert found["letters"].dtype == torch.bfloat16
    flow.session.recipe = replace(flow.session.recipe, lineage=None)  # all anew
    strange.sources.ensure(flow.session)
    anew = Form.load(workspace.path(names[0]))
    assert anew.dtype == torch.float32
    assert anew.config["max_position_embeddings"] == 64


@pytest.mark.parametrize(("positions", "warns"), [(64, False), (16, True)])
def test_a_stranger_that_comes_with_fewer_positions_than_are_read_is_told(
    tmp_path, capsys, positions, warns
):
    """Another length would train the others again, so that it is the person's to choose."""
    flow = joined(tmp_path)
    comes(flow, max_position_embeddings=positions)
    warned = f"longer than the {positions} positions of domains.colours" in capsys.readouterr().out
    assert warned == warns


def test_a_model_that_is_given_anew_takes_the_form_of_now(tmp_path):
    flow = joined(tmp_path)
    save_pico(tmp_path / "numbers-begins", seed=7, dtype="bfloat16")
    found = comes(flow, max_position_embeddings=64)
    assert found["letters"].config == {}
    assert found["numbers"].config["max_position_embeddings"] == 64


def test_a_head_of_its_own_is_refused_beside_trained_models_that_have_none(tmp_path):
    flow = joined(tmp_path, tie_word_embeddings=True)
    with pytest.raises(InputError, match=r"domains\.letters\.origin\.model = .*--rebuild"):
        comes(flow)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own_is_refused_beside_one_that_was_trained_on_without(tmp_path, tied):
    """What goes on from itself is made from no form; it was refused when all was trained."""
    flow = joined(tmp_path, tie_word_embeddings=True)
    workspace = flow.session.workspace
    for name in DOMAINS:
        publish(workspace, f"experts/{name}", **{f"parents/{name}": "a"})
        save_pico(workspace.path(f"experts/{name}"), tie_word_embeddings=True)
    if tied:
        config = comes(flow, tie_word_embeddings=True)["letters"].config
        assert "tie_word_embeddings" not in config
        return
    with pytest.raises(InputError, match=r"domains\.letters\.origin\.model = .*--rebuild"):
        comes(flow)


def test_models_keep_the_heads_that_one_brought_which_has_left(tmp_path):
    """Its leaving was refused, and a model that comes then needs a head beside theirs."""
    flow = joined(tmp_path, tie_word_embeddings=True)
    comes(flow, anew=True)
    workspace = flow.session.workspace
    for name in DOMAINS:
        form = f"sources/{FORMS}/{name}"
        publish(workspace, f"experts/{name}", **{form: workspace.digest(form)})
        save_pico(workspace.path(f"experts/{name}"), tie_word_embeddings=False)
    before = [workspace.digest(f"sources/{FORMS}/{name}") for name in DOMAINS]
    found = comes(flow, tie_word_embeddings=True)  # another in its place, without one
    assert [workspace.digest(f"sources/{FORMS}/{name}") for name in DOMAINS] == before
    assert found["colours"].config["tie_word_embeddings"] is False


def test_parts_of_a_checkpoint_are_told_by_their_names():
    for name in (*PATTERNS, "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        assert belongs(name.replace("*", "x"))
    for name in ("README.md", "optimizer.pt", "checkpoint-1/config.json", "a/model.safetensors"):
        assert not belongs(name)


@pytest.mark.parametrize(
    ("dtype", "method", "refused"),
    [
        ("bf16", "full", True),
        ("fp16", "ffn", True),
        ("bf16", "lora", False),
        ("fp32", "full", False),
        ("auto", "full", False),
    ],
)
def test_ready_experts_have_the_type_in_which_training_ends(tmp_path, dtype, method, refused):
    """All experts of a model have one: what is said when it is assembled, hours later."""
    texts = write_texts(tmp_path / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    del values["tokenizer"]
    seed_model = save_pico(tmp_path / "seed")
    values["seed_model"] = {"model": str(seed_model)}
    values["experts"]["dtype"] = dtype
    values["experts"]["training"]["method"] = method
    values["domains"]["letters"]["expert"] = str(save_pico(tmp_path / "expert", seed=1))
    faults = looked.model_faults(validate(values), tmp_path / "models")
    assert [fault.field for fault in faults] == ["experts.dtype"] * refused
    assert all("(numbers) is fp32" in fault.remedy for fault in faults)
    values["domains"]["numbers"]["expert"] = str(save_pico(tmp_path / "other", seed=2))
    assert not looked.model_faults(validate(values), tmp_path / "models")


@pytest.mark.parametrize("kept", ["bfloat16", "float32"])
@pytest.mark.parametrize("stays", [True, False])
def test_a_trained_expert_takes_the_type_of_a_backbone_that_stays(
    tmp_path, monkeypatch, kept, stays
):
    """A backbone in bf16 cannot hold fp32: that was said at the model, after the training."""
    recipe = validate(pico_recipe(tmp_path, domains=DOMAINS))
    workspace = Workspace(tmp_path / "home" / "pico")
    save_pico(workspace.path("backbone"), dtype=kept)
    if stays:
        recipe = replace(recipe, lineage=Lineage(pinned={"backbone": "a"}))
    monkeypatch.setattr(experts, "say_lacking", lambda *_, **__: None)
    monkeypatch.setattr(experts, "train_one", lambda run, *_, **__: save_pico(run.out, seed=1))
    session = Session(recipe, workspace, log=print)
    out = workspace.stage("experts/letters")
    run = StageRun(session, experts.experts, "letters", out=out, mark="", recorder=None)
    experts.experts.function(run)
    expert, trained = CheckpointReader(out), CheckpointReader(save_pico(tmp_path / "as", seed=1))
    is_rounded = stays and kept == "bfloat16"
    assert expert.config["dtype"] == ("bfloat16" if is_rounded else "float32")
    for name in trained.tensors:
        whole = trained.tensor(name)
        assert torch.equal(expert.tensor(name), whole.bfloat16() if is_rounded else whole), name
    said = "weights rounded to bfloat16, the type of the backbone that stays"
    assert changes(out) == [said] * is_rounded
    assert load_tokenizer(out) is not None
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_joined_strangers_have_the_type_in_which_training_ends(tmp_path):
    texts = write_texts(tmp_path / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    values |= {"symphony": {"calibration": {"sequence_length": 32}}, "moe": {"top_k": 2}}
    del values["seed_model"], values["tokenizer"]
    for name in ("sweep_top_k", "sweep_ridge_lambda", "sweep_window"):
        del values["evaluation"][name]
    values["experts"]["dtype"] = "bf16"
    values["domains"]["letters"]["expert"] = str(save_pico(tmp_path / "letters"))
    numbers = {"model": str(save_pico(tmp_path / "numbers", seed=1))}
    values["domains"]["numbers"]["origin"] = numbers
    faults = strange.model_faults(validate(values), tmp_path / "models")
    assert [fault.field for fault in faults] == ["experts.dtype"]


SHARD = 20_000


@pytest.mark.parametrize("stage", [experts.experts, strangers.experts], ids=["dume", "symphony"])
def test_a_given_expert_that_is_written_anew_gets_files_of_the_size_that_is_asked_for(
    tmp_path, stage
):
    flow = Flow(tmp_path, experts={"dtype": "bf16"})
    looked.sources.ensure(flow.session)
    assert stage.ensure(flow.session, "letters")
    expert = flow.session.workspace.path("experts/letters")
    assert [file.name for file in expert.glob("*.safetensors")] == ["model.safetensors"]
    # What is recorded of a model with the default, as an earlier release has: nothing else decides.
    assert not [key for key in stage.keys(flow.session.recipe, "letters") if "shard" in key]
    moe = replace(flow.session.recipe.moe, max_shard_bytes=SHARD)
    flow.session.recipe = replace(flow.session.recipe, moe=moe)
    assert stage.ensure(flow.session, "letters")
    sizes = [file.stat().st_size for file in expert.glob("*.safetensors")]
    assert len(sizes) > 1
    assert not stage.ensure(flow.session, "letters")


def test_the_size_of_files_trains_no_expert_again(tmp_path):
    before = validate(pico_recipe(tmp_path))
    given = replace(before.seed_model, model="/models/seed")
    for recipe in (before, replace(before, seed_model=given)):
        after = replace(recipe, moe=replace(recipe.moe, max_shard_bytes=SHARD))
        for stage, item in ((experts.experts, "letters"), (seed.seed, "")):
            assert stage.values(recipe, item) == stage.values(after, item)
