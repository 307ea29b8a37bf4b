"""What decides whether a stage runs: its code, found by nobody's list; its settings, no more."""

import json
import modulefinder
import shutil
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
from texts import pico_recipe, write_texts

from infra.recipe.schema import Lineage
from tasks import __main__ as command
from tasks.dume.backbone import backbone
from tasks.dume.experts import experts
from tasks.dume.statistics import statistics
from tasks.engine.sources import CODE, LEFT_OUT, deciding_modules, module_digests, package_versions
from tasks.engine.stage import Session, Stage
from tasks.engine.stage_run import StageRun
from tasks.engine.workspace import PROVENANCE, Workspace, fingerprint
from tasks.methods import every_stage, stages_of
from tasks.recipes import load_recipe, validate

OURS = ("infra", "tasks", "upcycle_core")
MODULES = sorted({stage.function.__module__ for stage in every_stage()})


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of our code that may be changed, every folder of it a package."""
    folder = tmp_path_factory.mktemp("checkout")
    for package in OURS:
        shutil.copytree(CODE / package, folder / package, ignore=shutil.ignore_patterns("*.pyc"))
    for directory in [d for package in OURS for d in (folder / package).rglob("*") if d.is_dir()]:
        (directory / "__init__.py").touch()
    return folder


@pytest.fixture(scope="module")
def used(checkout, tmp_path_factory):
    """{module of a stage: files that Python's own finder reaches from it}, by their bytecode."""
    plain = tmp_path_factory.mktemp("plain") / "code"
    shutil.copytree(checkout, plain)
    for file in plain.rglob("*.py"):  # the compiler drops what is for type checkers alone
        file.write_text(file.read_text().replace("if TYPE_CHECKING:", "if False:"))
    with pytest.MonkeyPatch.context() as patched:  # most modules reach the same files
        patched.setattr(modulefinder, "compile", cache(compile), raising=False)
        return {module: reached(module, plain) for module in MODULES}


def reached(module, code):
    left_out = [name.removesuffix(".py").rstrip("/").replace("/", ".") for name in LEFT_OUT]
    finder = modulefinder.ModuleFinder(path=[str(code)], excludes=left_out)
    finder.import_hook(module)
    files = {Path(m.__file__) for m in finder.modules.values() if m.__file__}
    # Finding tasks.x finds all of its packages; what they import counts as well.
    return {file.relative_to(code).as_posix() for file in files}


def digests(module, checkout):
    return module_digests.__wrapped__(module, code=checkout)


@contextmanager
def changed(checkout, names):
    """One more line in each of these files."""
    texts = {name: (checkout / name).read_text() for name in names}
    for name, text in texts.items():
        (checkout / name).write_text(text + "\n# changed\n")
    yield
    for name, text in texts.items():
        (checkout / name).write_text(text)


@pytest.fixture(scope="module")
def elsewhere(checkout, tmp_path_factory):
    """The copy with one more line in every file."""
    folder = tmp_path_factory.mktemp("elsewhere") / "checkout"
    shutil.copytree(checkout, folder)
    for file in folder.rglob("*.py"):
        file.write_text(file.read_text() + "\n# changed\n")
    return folder


@pytest.mark.parametrize("module", MODULES)
def test_a_changed_line_counts_where_the_module_is_used_and_nowhere_else(
    module, checkout, elsewhere, used
):
    before, after = digests(module, checkout), digests(module, elsewhere)
    assert module.replace(".", "/") + ".py" in used[module]
    assert before.keys() == after.keys() == used[module]
    assert not set(before.values()) & set(after.values())


def test_a_changed_line_counts_for_its_file_alone(checkout, used):
    module = MODULES[0]
    before, name = digests(module, checkout), min(used[module])
    with changed(checkout, [name]):
        after = digests(module, checkout)
    assert {n for n in after if after[n] != before[n]} == {name}


def test_a_stage_names_its_own_module_and_the_pieces_it_runs():
    for stage in every_stage():
        own = stage.function.__module__.replace(".", "/") + ".py"
        assert own in stage.sources
    assert "upcycle_core/dume/collect.py" in statistics.sources
    assert "upcycle_core/training/trainer.py" in experts.sources


def test_imports_inside_functions_and_of_packages_count(checkout):
    # register_architectures imports three packages, each of which registers its model's code.
    answers = deciding_modules("tasks.simoe.answers", code=checkout)
    assert "upcycle_core/simoe/model/layers_simoe.py" in answers
    assert "upcycle_core/ders/model/__init__.py" in answers


def test_what_is_left_out_is_there():
    for name in LEFT_OUT:
        assert (CODE / name).exists(), name


def test_the_packages_that_decide_bytes_are_recorded(tmp_path):
    recipe = with_ready_experts(tmp_path)
    workspace = Workspace(tmp_path / "home" / "pico")
    publish(workspace, "experts/letters", "experts/numbers")
    made_from = backbone.made_from(Session(recipe, workspace, log=print), "")
    deciding = {"torch", "transformers", "tokenizers", "datasets", "scipy", "numpy", "lm_eval"}
    assert set(made_from["packages"]) >= deciding


def with_ready_experts(folder, **changes):
    """A recipe of two given experts, whose texts are named for their use."""
    values = pico_recipe(folder, domains=("letters", "numbers"))
    for name, domain in values["domains"].items():
        del domain["train"]
        domain |= {"expert": f"/models/{name}", "calibration": {"files": ["/texts/c.txt"]}}
    return validate({**values, **changes})


def publish(workspace, *artifacts):
    for artifact in artifacts:
        staged = workspace.stage(artifact)
        (staged / "file").write_text(artifact)
        workspace.publish(staged, artifact, {"inputs": {}, "params": {}, "fingerprint": ""})


def settings_of(recipe):
    return {
        stage.label(item): stage.values(recipe, item)
        for stage in stages_of(recipe)
        for item in stage.items(recipe)
        if not stage.always
    }


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 5},
        {"experts": {"training": {"steps": 7, "warmup_steps": 1}}},
        {"seed_model": {"training": {"steps": 7, "warmup_steps": 1}}},
        {"compute": {"statistics": {"cpus": 8}, "evaluation": {"cpus": 8}}},
        {
            "compute": {
                "dashboard": True,
                "statistics": {"gpus": 1, "accelerator": "H100", "memory": 10**9},
                "assembly": {"resources": {"ssd": 1}},
                "baselines": {"workers": 2, "placement": "spread"},
            }
        },
        {"tokenizer": {"vocabulary_size": 500}},
        {"corpus": {"calibration_share": 0.3}},
        {"keep": {"runs": 3}},
        {"registry": {"gate": {"margin": 1.0}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_with_ready_experts_what_only_training_reads_decides_nothing(tmp_path, change):
    before, after = with_ready_experts(tmp_path), with_ready_experts(tmp_path, **change)
    assert before != after
    assert settings_of(before) == settings_of(after)


def test_settings_that_leave_the_weights_alone_do_not_train_again(tmp_path):
    values = pico_recipe(tmp_path)
    before = validate(values)
    training = before.experts.training
    after = replace(
        before, experts=replace(before.experts, training=replace(training, log_steps=7))
    )
    assert settings_of(before) == settings_of(after)
    for change in ({"steps": training.steps + 1}, {"method": "lora"}):
        other = replace(training, **change)
        taught = settings_of(replace(before, experts=replace(before.experts, training=other)))
        changed = {label for label, own in settings_of(before).items() if own != taught[label]}
        assert changed == {"experts@letters", "experts@numbers", "experts@colours", "model"}


def test_whose_backbones_are_merged_and_who_is_first_decides_it_until_it_is_built_upon(tmp_path):
    recipe = validate(pico_recipe(tmp_path))
    named = [
        replace(recipe, backbone=replace(recipe.backbone, experts=experts))
        for experts in (("letters", "numbers"), ("numbers", "letters"))
    ]
    first, other = (settings_of(each) for each in named)
    assert {label for label, own in first.items() if own != other[label]} == {"backbone", "model"}
    lineage = Lineage(pinned={"backbone": "1"}, backbone=("letters", "numbers"), parents={})
    first, other = (backbone.values(replace(each, lineage=lineage), "") for each in named)
    assert first == other


def test_resources_decide_nothing():
    for recipe in (CODE / "recipes").glob("*.yaml"):
        if not recipe.read_text().startswith("name:") and "\nname:" not in recipe.read_text():
            continue  # a file that is added to a recipe
        for own in settings_of(load_recipe(recipe, ["folder=/texts"])).values():
            assert not [key for key in own if key.startswith("compute")]


class Life:
    """A workspace with one input, and a stage that reads it."""

    def __init__(self, folder):
        write_texts(folder / "texts")
        self.recipe = validate(pico_recipe(folder / "texts"))
        self.workspace = Workspace(folder / "home" / "pico")
        self.lines = []
        self.give("one")

    def give(self, text):
        staged = self.workspace.stage("input")
        (staged / "text").write_text(text)
        self.workspace.publish(staged, "input", {"inputs": {}, "params": {}, "fingerprint": text})

    def session(self):
        return Session(self.recipe, self.workspace, log=self.lines.append)

    def ensure(self, stage):
        self.lines.clear()
        ran = stage.ensure(self.session())
        return self.lines[0] if ran else None


def copy(run):
    (run.out / "copy").write_text((run.path("input") / "text").read_text())


STAGE = Stage(
    copy,
    "copied",
    inputs=lambda recipe, item: ["input"],
    params=("seed", "experts.training"),
)


@pytest.fixture
def life(tmp_path):
    life = Life(tmp_path)
    assert life.ensure(STAGE) == "copied runs: it has not been made"
    assert life.ensure(STAGE) is None
    return life


def test_a_flow_that_ended_leaves_what_another_that_was_stopped_goes_on_from(life):
    workspace, session = life.workspace, life.session()
    assert not STAGE.ensure(session)
    for label in ("copied", "baselines-btx"):
        (workspace.pieces_of(label, f"mark of {label}") / "checkpoint-900").write_text("weights")
    (workspace.pieces / "champion-1").mkdir()
    life.give("two")
    assert workspace.sweep(session.made) == len("copied" + "weights")
    assert [folder.name for folder in workspace.pieces.iterdir()] == ["mark of baselines-btx"]
    assert workspace.sweep() > 0
    assert not list(workspace.pieces.iterdir())


def test_a_stage_says_why_it_runs(life, monkeypatch):
    life.give("two")
    assert life.ensure(STAGE) == "copied runs: input changed"
    life.recipe = replace(life.recipe, seed=3)
    assert life.ensure(STAGE) == "copied runs: seed 0 -> 3"
    newer = {**package_versions(), "transformers": "99.0.0"}
    monkeypatch.setattr("tasks.engine.stage.package_versions", lambda: newer)
    now = package_versions()["transformers"]
    assert life.ensure(STAGE) == f"copied runs: transformers {now} -> 99.0.0"
    monkeypatch.setattr(Stage, "sources", {"tasks/dume/router.py": "1", "tasks/dume/model.py": "2"})
    reason = "copied runs: its code changed: tasks/dume/model.py and 1 other modules"
    assert life.ensure(STAGE) == reason
    (life.workspace.path("copied") / "copy").write_text("damaged")
    assert life.ensure(STAGE) == "copied runs: it is not as it was published"


def test_what_a_living_model_was_trained_to_outlives_an_upgrade(life, monkeypatch):
    """Of ours or of a package: a night would else train every expert again."""
    lasting = replace(STAGE, lasting=lambda recipe, item: True)
    never = replace(STAGE, lasting=lambda recipe, item: False)
    newer = {**package_versions(), "transformers": "99.0.0"}
    monkeypatch.setattr("tasks.engine.stage.package_versions", lambda: newer)
    monkeypatch.setattr(Stage, "sources", {"tasks/copied.py": "2"})
    begun = replace(life.recipe, lineage=Lineage())
    for stage, recipe in ((lasting, life.recipe), (STAGE, begun), (never, begun)):
        assert stage.reasons(Session(recipe, life.workspace, log=print))
    life.recipe = begun
    assert life.ensure(lasting) is None
    now = package_versions()["transformers"]
    assert life.lines[0].startswith(f"copied: stays, though transformers {now} -> 99.0.0; its code")
    read = replace(lasting, params=("experts.training",))  # code that reads another setting
    assert life.ensure(read) is None
    life.recipe = replace(begun, seed=3)
    assert life.ensure(lasting).startswith("copied runs: seed 0 -> 3; transformers")
    life.give("two")
    assert life.ensure(lasting) == "copied runs: input changed"


def put(life, artifact, name, text):
    put_all(life, artifact, {name: text})


def put_all(life, artifact, files):
    staged = life.workspace.stage(artifact)
    for name, text in files.items():
        (staged / name).write_text(text)
    life.workspace.publish(staged, artifact, {})


def trained_expert(life, **earlier):
    """Of letters, trained from the seed; ``earlier`` is what it is recorded to have read beside.

    Returns:
        What says why it would be trained again.
    """
    put(life, "sources", "letters.json", "first")
    put(life, "corpora/letters", "train", "first")
    put(life, "seed", "config.json", "first")
    life.recipe = replace(life.recipe, lineage=Lineage())
    made_from = experts.made_from(life.session(), "letters")
    made_from["inputs"] |= earlier
    record = {**made_from, "fingerprint": fingerprint(made_from)}
    life.workspace.publish(life.workspace.stage("experts/letters"), "experts/letters", record)
    return lambda: experts.reasons(life.session(), "letters")


def test_a_held_out_file_more_trains_no_expert_again(life):
    reasons = trained_expert(life)
    put(life, "sources", "letters.json", "a held-out file more, or one of duplicates")
    assert reasons() == []
    put(life, "corpora/letters", "train", "other text")
    assert reasons() == ["corpora/letters/train changed"]


def test_an_expert_of_a_version_that_read_all_text_s_hashes_is_not_trained_again(life):
    assert trained_expert(life, **{"sources/letters.json": "of then"})() == []
    assert life.lines[-1].endswith("letters: stays, though sources/letters.json is read no more")
    continued = trained_expert(life, **{"parents/letters": "what it was continued from"})
    assert continued() == ["parents/letters is read no more"]


@pytest.mark.parametrize(
    ("since", "reasons"),
    [
        ({}, []),
        ({"train": "other"}, ["input/train changed"]),
        ({"heldout": "other"}, ["input/train changed"]),  # it is not known which of them
    ],
    ids=["nothing", "training", "heldout"],
)
def test_where_a_part_is_read_now_a_record_of_the_whole_holds_while_that_is_as_it_was(
    life, monkeypatch, since, reasons
):
    whole = {"train": "first", "heldout": "first"}
    put_all(life, "input", whole)
    record = {**STAGE.made_from(life.session(), ""), "fingerprint": "of then"}
    life.workspace.publish(life.workspace.stage("copied"), "copied", record)
    put_all(life, "input", {**whole, **since})
    life.recipe = replace(life.recipe, lineage=Lineage())
    part = replace(STAGE, inputs=lambda *_: ["input/train"], lasting=lambda *_: True)
    newer = {**package_versions(), "transformers": "99.0.0"}
    monkeypatch.setattr("tasks.engine.stage.package_versions", lambda: newer)
    found = part.reasons(life.session())
    assert [reason for reason in found if "transformers" not in reason] == reasons
    assert bool(found) == bool(reasons)


@pytest.mark.parametrize("is_changed", [False, True])
def test_where_a_key_decides_now_a_record_of_its_section_says_its_value(life, is_changed):
    life.ensure(replace(STAGE, params=("statistics",)))
    own = life.recipe.statistics
    tokens = 77 if is_changed else own.tokens
    life.recipe = replace(
        life.recipe,
        lineage=Lineage(),
        statistics=replace(own, tokens=tokens, shards=own.shards + 1),
    )
    lasting = replace(STAGE, params=("statistics.tokens",), lasting=lambda *_: True)
    said = [f"statistics.tokens {own.tokens} -> 77", "statistics decides no more"]
    assert lasting.reasons(life.session()) == (said if is_changed else [])


def test_the_same_bytes_made_another_way_are_the_same_input(life):
    life.give("one")
    staged = life.workspace.stage("input")
    (staged / "text").write_text("one")
    life.workspace.publish(staged, "input", {"inputs": {}, "params": {}, "fingerprint": "other"})
    assert life.ensure(STAGE) is None


def test_a_stage_reads_what_it_declares_and_nothing_else(life):
    run = StageRun(life.session(), STAGE, "", out=life.workspace.root, mark="", recorder=None)
    assert run.path("input/text").read_text() == "one"
    for name in ("experts/letters", "inputs", "inp", "copied"):
        with pytest.raises(ValueError, match="copied does not declare"):
            run.path(name)


def of_before(life, **changes):
    """Rewrite the record as versions wrote it whose lists of modules were typed."""
    path = life.workspace.path("copied") / PROVENANCE
    record = json.loads(path.read_text())
    del record["packages"]
    record["inputs"] = {"input": life.workspace.record_digest("input")}
    record["params"] = {"seed": 0, "experts": record_of(life), "compute.experts": {"cpus": 1}}
    record["sources"] = {"tasks/dume/router.py": "1"}
    record |= changes
    record["fingerprint"] = fingerprint(record)
    path.write_text(json.dumps(record))


def record_of(life):
    from infra.recipe.schema import resolve

    return resolve(life.recipe)["experts"]


def test_what_an_earlier_version_made_is_taken_over_where_only_its_list_is_new(life, monkeypatch):
    monkeypatch.setattr(Stage, "sources", {"tasks/dume/router.py": "1", "tasks/copied.py": "2"})
    of_before(life)
    before = life.workspace.record_digest("copied")
    assert life.ensure(STAGE) is None
    assert life.lines[0].startswith("copied: taken over")
    assert life.workspace.has_digest("copied", before)
    assert life.ensure(STAGE) is None
    assert life.lines == ["copied: up to date"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sources": {"tasks/dume/router.py": "other"}}, "its code changed"),
        ({"sources": {}}, "its code changed"),
        ({"inputs": {"input": "another"}}, "input changed"),
        ({"params": {"seed": 1}}, "seed 1 -> 0"),
    ],
    ids=["code", "unknown code", "input", "setting"],
)
def test_what_an_earlier_version_made_otherwise_is_made_again(life, monkeypatch, changes, reason):
    monkeypatch.setattr(Stage, "sources", {"tasks/dume/router.py": "1", "tasks/copied.py": "2"})
    of_before(life, **changes)
    assert reason in life.ensure(STAGE)


def test_why_says_what_would_run_and_runs_nothing(tmp_path, capsys):
    recipe = with_ready_experts(tmp_path)
    workspace = Workspace(tmp_path / "pico")
    publish(workspace, "experts/letters", "experts/numbers")
    from tasks.pipeline import params_yaml

    (workspace.root / "params.yaml").write_text(params_yaml(recipe, workspace.root))
    assert command.main(["why", "backbone", "--workspace", str(workspace.root)]) == 0
    said = capsys.readouterr().out
    assert "backbone runs: it has not been made" in said
    assert not workspace.path("backbone").exists()
    assert command.main(["why", "router", "--workspace", str(workspace.root)]) == 0
    said = capsys.readouterr().out
    assert "statistics@letters" in said
    assert "has not been made" in said


@pytest.mark.parametrize("recorded", ["field by field", "as a section"])
def test_settings_that_a_recipe_gives_for_others_are_no_upgrade(life, recorded):
    """Else a model would be said to have been trained as no expert of it was."""
    parents = Lineage(parents={"letters": "the first"})
    own = replace(life.recipe, lineage=parents)
    slower = replace(own.experts.training, learning_rate=own.experts.training.learning_rate / 2)
    life.recipe = own
    put(life, "sources", "letters.json", "first")
    for artifact in ("corpora/letters", "seed", "parents/letters"):
        put(life, artifact, "train", "first")
    made_from = experts.made_from(life.session(), "letters")
    if recorded == "as a section":
        params = {k: v for k, v in made_from["params"].items() if "experts.training" not in k}
        params["experts.training"] = asdict(own.experts.training)
        made_from["params"] = params
    record = {**made_from, "fingerprint": fingerprint(made_from)}
    life.workspace.publish(life.workspace.stage("experts/letters"), "experts/letters", record)
    assert experts.reasons(life.session(), "letters") == []
    for settings, runs in ((own.experts.training, False), (slower, True)):
        life.recipe = replace(own, experts=replace(own.experts, continued=settings))
        assert bool(experts.reasons(life.session(), "letters")) == runs
    reason, *_ = experts.reasons(life.session(), "letters")
    assert reason == "experts.continued decides in the place of experts.training"
