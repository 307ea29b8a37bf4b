"""A version whose certificate is required: champion if it arrives, and not before."""

import re
from dataclasses import replace
from threading import Thread

import pytest
from databases import home_with_database

from flows.certify import main
from infra import settings
from infra.readers.reader import PROGRAMS, READERS, Reader
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker, open_database
from infra.versioning.versions import Versions
from tasks.engine.sources import CODE
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.recipes import load_recipe
from tasks.release import certificate as of_certificate
from tasks.release import register as of_register
from tasks.release.certificate import certify_version, refusal, revoke, with_earlier
from tasks.release.gate import Decision
from tasks.release.history import PENDING_TAG, PREVIOUS_TAG, REVOKED_TAG, ROLLED_BACK_TAG
from tasks.release.register import Registrar
from tasks.release.verdict import Row, as_json
from tasks.release.versions import (
    CARD,
    DECISION_TAG,
    IF_ARRIVED,
    OUTCOME_TAG,
    settled,
    with_aliases,
)
from tests.tasks.release.test_certify import build, one_thread, tokenizer  # noqa: F401  (fixtures)

LOSSY = f"""
import sys
sys.path.insert(0, {str(PROGRAMS)!r})
import torch, transformers, ask_transformers
from types import SimpleNamespace
from asked import answer
load = transformers.AutoModelForCausalLM.from_pretrained

def loses_an_expert(path, **options):
    model = load(path, **options)
    with torch.no_grad():
        weight = model.model.layers[1].mlp.experts.down_proj
        weight[1] = weight[0]
    return model

ask_transformers.AutoModelForCausalLM = SimpleNamespace(from_pretrained=loses_an_expert)
answer(transformers.__version__, ask_transformers.ask)
"""
"""Stock transformers, which writes one expert's weights into another, as converters did."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return home_with_database(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def registry(place):
    return Registry(place)


@pytest.fixture(scope="module")
def run(place):
    with Tracker(place, "flows").start_run("moe") as run:
        yield run


@pytest.fixture
def name(request):
    """A registered model of each test's own."""
    return re.sub(r"\W", "-", request.node.name)


@pytest.fixture
def registrar(place, registry, run, name, tmp_path):
    """Of a workspace with a model, whose recipe requires a certificate by transformers."""
    return Registrar(session_of(place, name, tmp_path), registry, Versions(tmp_path), run)


def session_of(place, name, folder):
    workspace = Workspace(folder / "workspace")
    out = workspace.stage("model")
    for file in (folder / "model").iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    workspace.publish(out, "model", {"fingerprint": "x"})
    recipe = load_recipe(CODE / "recipes" / "demo.yaml")
    how = {"model": name, "certificate": "required", "readers": ("transformers",)}
    required = replace(recipe, registry=replace(recipe.registry, **how))
    return Session(required, workspace, log=lambda text: None)


@pytest.fixture
def any_model(tmp_path):
    """Files that no reader is asked for."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")


@pytest.fixture
def moe(tmp_path, tokenizer):  # noqa: F811  (the fixture)
    build(tmp_path / "made", tokenizer).rename(tmp_path / "model")


FAILED = Row("vllm", "fp32", verdict="failed", why="logits are 3 off", logits=3.0)
SILENT = Row("vllm", "fp32", verdict="failed", why="did not answer within 1 s")
ARRIVED = Row("transformers", "fp32", verdict="arrived")
ABSENT = Row("llama.cpp", "F16", why="not installed: make readers (llama_cpp)")
DECISION = Decision(True, "promoted: 91.00, the first", "there was no champion", 91.0, None)
CUT = '{"readers": [{"reader": "vllm", "fo'
SAID = {"champion": None, "metrics": {}, "scores": {}, "description": "Ours."}


@pytest.mark.faults
@pytest.mark.usefixtures("moe")
def test_a_version_that_a_reader_loses_is_no_champion(
    registry, request, name, tmp_path, monkeypatch
):
    program = tmp_path / "lossy.py"
    program.write_text(LOSSY)
    lossy = Reader("transformers", str(program), None, "transformers")
    monkeypatch.setitem(READERS, "transformers", lossy)
    own = request.getfixturevalue("registrar")
    files = {CARD: f"# A model\n\nGate: {DECISION.reason}."}
    outcome = own.register_model(DECISION, **SAID, files=files)
    version = outcome.version
    assert version.aliases == ("challenger",)
    assert registry.find(name, "champion") is None
    lost = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
    why = f"did not arrive in transformers (transformers: tensors: {lost}"
    assert version.tags[OUTCOME_TAG] == "refused: did not arrive in transformers"
    assert version.tags[DECISION_TAG] == outcome.decision
    assert outcome.decision.startswith(f"{DECISION.reason}; {why}")
    assert version.description.startswith("refused: did not arrive in transformers. Ours.")
    assert "promoted" not in version.description
    assert f"Gate: {outcome.decision}." in version.description
    assert "### Arrival certificate" in version.description
    assert f"Gate: {outcome.decision}." in registry.text(version, CARD)
    assert PENDING_TAG not in version.tags
    assert version.params["registry.certificate"] == "required"
    again = own.offered()
    assert (again.is_new, again.version.aliases) == (False, ("challenger",))


@pytest.mark.usefixtures("any_model")
@pytest.mark.parametrize("arrives", [True, False])
def test_what_a_killed_flow_left_is_certified_by_the_next(
    registry, request, name, monkeypatch, arrives
):
    own = request.getfixturevalue("registrar")

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(of_certificate, "certify", killed)
    with pytest.raises(KeyboardInterrupt):
        own.register_model(DECISION, **SAID)
    [waiting] = registry.versions(name)
    assert waiting.aliases == ("challenger",)
    assert waiting.tags[PENDING_TAG] == IF_ARRIVED
    monkeypatch.setattr(
        of_certificate, "certify", lambda *_, **__: [ARRIVED if arrives else FAILED]
    )
    outcome = own.offered()
    assert not outcome.is_new
    assert PENDING_TAG not in outcome.version.tags
    if arrives:
        assert set(outcome.version.aliases) == {"challenger", "champion"}
        assert outcome.version.tags[PREVIOUS_TAG] == "none"
        assert outcome.decision == DECISION.reason
    else:
        assert outcome.version.aliases == ("challenger",)
        assert outcome.version.tags[OUTCOME_TAG] == "refused: did not arrive in vllm"
        why = "did not arrive in vllm (vllm: logits are 3 off)"
        assert outcome.decision == f"{DECISION.reason}; {why}"
        assert registry.description(outcome.version).startswith("refused: did not arrive in vllm. ")


@pytest.mark.usefixtures("any_model")
def test_a_certificate_and_what_a_flow_says_of_a_version_both_stay_on_its_page(
    place, registry, request, name, monkeypatch
):
    """A person certifies it while its flow refuses it."""
    monkeypatch.setattr(of_certificate, "certify", lambda *_, **__: [ARRIVED])
    own = request.getfixturevalue("registrar")
    monkeypatch.setattr(of_register, "settled", lambda registry, version, _: version)
    waiting = own.register_model(DECISION, **SAID).version
    refuse = Thread(target=settled, args=(Registry(place), waiting, ("too late", "it is too late")))
    describe = registry.describe

    def slow(version, page):
        refuse.start()
        refuse.join(1)
        describe(version, page)

    monkeypatch.setattr(registry, "describe", slow)
    certify_version(registry, waiting, own.session.workspace.path("model"))
    refuse.join()
    page = registry.description(waiting)
    assert page.startswith("refused: too late. Ours.")
    assert "### Arrival certificate" in page


@pytest.mark.parametrize(
    ("rows", "short"),
    [
        ([ARRIVED, ABSENT], None),
        ([ARRIVED, FAILED, ABSENT], "did not arrive in vllm"),
        ([ARRIVED, SILENT], "did not arrive in vllm"),
        ([ABSENT], "no reader could be asked"),
        ([], "no reader could be asked"),
    ],
)
def test_one_reader_that_fails_is_enough_and_none_that_arrives_too(rows, short):
    found = refusal(rows)
    assert (found and found[0]) == short
    if found:
        asked = [row for row in rows if row.verdict == "failed"] or rows
        assert all(row.why in found[1] for row in asked)


def test_a_reader_that_the_recipe_names_and_that_is_not_there_is_no_arrival():
    absent = {"vllm": "not installed: make readers (vllm)"}
    short, full = refusal([ARRIVED], absent)
    assert short == "vllm could not be asked"
    assert "make readers (vllm)" in full
    assert refusal([ARRIVED, FAILED], absent)[0] == "did not arrive in vllm"


@pytest.mark.usefixtures("any_model")
def test_a_named_reader_that_tried_no_form_leaves_no_champion(
    registry, registrar, name, monkeypatch
):
    recipe = registrar.session.recipe
    named = replace(recipe.registry, readers=("transformers", "mlflow"))
    registrar.session.recipe = replace(recipe, registry=named)
    untried = Row("mlflow", "fp32", why="takes no such model")
    monkeypatch.setattr(of_certificate, "certify", lambda *_, **__: [ARRIVED, untried])
    version = registrar.register_model(DECISION, **SAID).version
    assert version.aliases == ("challenger",)
    assert version.tags[OUTCOME_TAG] == "refused: mlflow could not be asked"
    assert "mlflow: takes no such model" in version.tags[DECISION_TAG]


@pytest.fixture
def champions(registry, run, name, tmp_path):
    """Registers versions that become champion, one after the other; returns the last."""

    def register(count, *, required=True, readers=None):
        (tmp_path / "config.json").write_text("{}")
        certificate = "required" if required else "at-hand"
        params = {"registry": {"certificate": certificate, "readers": readers}}
        for _ in range(count):
            made = Registration(params=params, marks={PENDING_TAG: "champion"})
            found = with_aliases(registry, registry.register(name, tmp_path, made, run=run))
        return found

    return register


@pytest.mark.parametrize(
    ("row", "required", "left"), [(FAILED, True, 1), (SILENT, True, 2), (FAILED, False, 2)]
)
def test_a_champion_that_is_lost_later_is_taken_back(
    registry, champions, name, row, required, left
):
    version = champions(2, required=required)
    faults = revoke(registry, version, [ARRIVED, row])
    assert registry.find(name, "champion").number == left
    assert bool(faults) == (left == 1)
    if faults:
        assert f"is none any more; models:/{name}/1 is" in str(faults[0])
        [_, taken] = registry.versions(name)
        assert taken.tags[REVOKED_TAG] == "did not arrive in vllm"
        assert ROLLED_BACK_TAG not in taken.tags


@pytest.mark.parametrize(("readers", "left"), [(["transformers"], 2), (["vllm"], 1), (None, 1)])
def test_readers_that_the_recipe_does_not_name_take_no_champion_back(
    registry, champions, name, readers, left
):
    version = champions(2, readers=readers)
    assert bool(revoke(registry, version, [ARRIVED, FAILED])) == (left == 1)
    assert registry.find(name, "champion").number == left


def test_who_is_champion_by_the_time_that_readers_have_answered_stays_it(
    registry, champions, name, monkeypatch
):
    first, second = champions(1), champions(1)
    assert "champion" in first.aliases
    assert revoke(registry, first, [ARRIVED, FAILED]) == []
    monkeypatch.setattr(registry, "pointed", lambda *_: first.number)  # it changes just now
    [fault] = revoke(registry, first, [ARRIVED, FAILED])
    assert f"models:/{name}/2" in str(fault)
    assert "is champion by now, not version 1" in str(fault)
    assert registry.find(name, "champion").number == second.number
    assert not {ROLLED_BACK_TAG, REVOKED_TAG} & registry.find(name, "champion").tags.keys()


def test_the_only_champion_stays_and_the_command_says_so(
    place, registry, champions, name, monkeypatch, capsys
):
    champions(1)
    monkeypatch.setattr(of_certificate, "certify", lambda *_, **__: [FAILED])
    monkeypatch.setattr(settings, "configure", lambda: place)
    assert main([f"{name}@champion"]) != 0
    said = capsys.readouterr()
    assert "\n- vllm: logits are 3 off\n" in said.out
    assert "has no champion before it that is still registered" in said.err
    assert registry.find(name, "champion").number == 1


def test_a_version_that_has_no_place_for_a_certificate_is_refused_before_readers_are_asked(
    place, registry, name, monkeypatch, tmp_path, capsys
):
    client, asked = open_database(place), []
    (tmp_path / "config.json").write_text("{}")
    client.create_registered_model(name)
    client.create_model_version(name, source=str(tmp_path))
    monkeypatch.setattr(of_certificate, "certify", lambda *_, **__: asked.append(1) or [ARRIVED])
    monkeypatch.setattr(settings, "configure", lambda: place)
    assert main([f"{name}/1"]) == 2
    assert "not a model that it has logged" in capsys.readouterr().err
    assert asked == []


def test_rows_of_readers_and_forms_of_another_release_stay_behind_the_others():
    others = [Row("another", "fp32", why="no reason"), Row("llama.cpp", "Q2", why="no reason")]
    kept = with_earlier([FAILED, ARRIVED], as_json(others))
    assert kept == [ARRIVED, FAILED, others[1], others[0]]


@pytest.mark.parametrize("before", [CUT, '{"readers": 3}', "[]"])
def test_an_earlier_certificate_that_was_cut_off_keeps_nobody_from_a_new_one(before):
    assert with_earlier([ARRIVED], before) == [ARRIVED]
