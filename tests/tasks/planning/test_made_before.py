"""What a plan takes to be made: what its stages would not make again."""

import os
import shutil
from dataclasses import replace

import pytest
from pico import pico_config, save_pico
from texts import TRAINING, pico_recipe, write_texts

from flows.grow import begun_with
from flows.making import builds
from flows.making.dume import updated
from flows.shrink import begun_without
from tasks.data.sources import write_sources
from tasks.engine.stage_run import Session, StageRun
from tasks.engine.workspace import Workspace, enclosing, fingerprint
from tasks.living.lineage import begin
from tasks.methods import stages_of
from tasks.planning.ders import compared_row
from tasks.planning.machine import Machine
from tasks.planning.made import EVERYTHING, Aim
from tasks.planning.parts import Subjects
from tasks.planning.plan import BASELINES, plan
from tasks.recipes import validate
from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.checkpoints.known import KnownFiles
from upcycle_core.planning.shape import Shape

ROOMY = Machine(memory=10**12, cpus=8, disk=10**13)


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


@pytest.fixture
def values(texts):
    return pico_recipe(texts)


def published(recipe, home):
    """A workspace in which each stage has published a file for each thing that is read of it."""
    workspace = Workspace(home / recipe.name)
    session = Session(recipe, workspace, log=lambda text: None)
    pairs = [(stage, item) for stage in stages_of(recipe) for item in stage.items(recipe)]
    read = {name for stage, item in pairs for name in stage.inputs(recipe, item)}
    for stage, item in pairs:
        artifact = stage.artifact(item)
        out = workspace.stage(artifact)
        if stage.always:
            write_sources(StageRun(session, stage, item, out=out, mark="", recorder=None))
        for name in read:
            inside = out / name.removeprefix(f"{artifact}/")
            if artifact in enclosing(name) and artifact != name and not inside.exists():
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.write_text(name)
        (out / "made").write_text(artifact)
        made_from = stage.made_from(session, item)
        mark = fingerprint(made_from)
        workspace.publish(out, artifact, {**made_from, "fingerprint": mark})
    return workspace


def again(recipe, home, aim=EVERYTHING):
    """{stage: how many of its items a plan takes to be to come}"""
    rows = plan(recipe, home, ROOMY, base=0, aim=aim).rows
    return {row.stage: row.items - row.made for row in rows if not row.is_done}


def test_nothing_is_to_come_of_a_recipe_that_is_as_it_was(values, tmp_path):
    recipe = validate(values)
    published(recipe, tmp_path)
    made = plan(recipe, tmp_path, ROOMY, base=0)
    assert all(row.is_done for row in made.rows)
    assert made.disk_to_come == 0
    assert made.line() == f"plan: nothing is to come, all of {len(made.rows)} stages are made"


def test_a_setting_has_what_it_decides_made_again_and_all_that_reads_it(values, tmp_path):
    published(validate(values), tmp_path)
    values["statistics"]["tokens"] = 100
    found = again(validate(values), tmp_path)
    assert found == {"statistics": 3, "router": 1, "model": 1, "report": 1}


def test_what_reads_something_that_is_gone_is_not_done_either(values, tmp_path):
    recipe = validate(values)
    shutil.rmtree(published(recipe, tmp_path).path("backbone"))
    found = again(recipe, tmp_path)
    assert found == {"backbone": 1, "statistics": 3, "router": 1, "model": 1, "report": 1}


def test_a_night_with_new_text_is_planned_as_what_it_makes(values, texts, tmp_path):
    recipe = validate(values)
    workspace = published(recipe, tmp_path)
    night = begin(recipe, workspace)
    assert again(night, tmp_path) == {}
    with (texts / "letters" / "train.txt").open("a") as file:
        file.write("omega")
    assert again(night, tmp_path) == {
        **dict.fromkeys(("sources", "documents", "corpora", "parents", "experts"), 1),
        **dict.fromkeys(("statistics", "router", "model", "report"), 1),
    }
    made = plan(night, tmp_path, ROOMY, base=0)
    rows = {row.stage: row for row in made.rows}
    assert made.disk_to_come > rows["model"].kept + rows["experts"].kept / 3
    small = replace(made, machine=replace(ROOMY, memory=1000, disk=1000))
    assert {"disk", "compute.experts"} <= {fault.field for fault in small.faults()}


def test_an_expert_that_goes_on_is_kept_beside_what_it_becomes(values, texts, tmp_path):
    recipe = validate(values)
    night = begin(recipe, published(recipe, tmp_path))
    with (texts / "letters" / "train.txt").open("a") as file:
        file.write("omega")
    rows = {row.stage: row for row in plan(night, tmp_path, ROOMY, base=0).rows}
    assert rows["parents"].kept == rows["experts"].kept / 3


def test_another_given_model_is_seen_without_reading_it(values, tmp_path, monkeypatch):
    monkeypatch.setattr("upcycle_core.checkpoints.known.SETTLED_NS", 0)
    for domain, own in values["domains"].items():
        save_pico(tmp_path / domain, seed=len(domain))
        own["expert"] = str(tmp_path / domain)
    recipe = validate(values)
    published(recipe, tmp_path / "home")

    def read(self, file, size):
        assert file.suffix == ".txt", f"{file} is read"
        return sha256_file(file)

    monkeypatch.setattr(KnownFiles, "_digest", read)
    assert again(recipe, tmp_path / "home") == {}
    [weights] = (tmp_path / "letters").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    found = again(recipe, tmp_path / "home")
    assert found == {
        **dict.fromkeys(("sources", "documents", "experts"), 1),
        **dict.fromkeys(("backbone", "router", "model", "report"), 1),
        "statistics": 3,
    }


def test_a_given_model_whose_hashes_are_forgotten_is_as_it_was_unless_it_is_newer(values, tmp_path):
    """As after a mount; a folder beside the weights is no file of the model."""
    domain, own = next(iter(values["domains"].items()))
    given = save_pico(tmp_path / domain)
    (given / "tokenizer").mkdir()
    own["expert"] = str(given)
    recipe = validate(values)
    workspace = published(recipe, tmp_path / "home")
    assert again(recipe, tmp_path / "home") == {}
    workspace.known.path.unlink()
    assert again(recipe, tmp_path / "home") == {}
    [weights] = given.glob("*.safetensors")
    later = workspace.path(f"sources/{domain}.json").stat().st_mtime + 10
    os.utime(weights, (later, later))
    assert "experts" in again(recipe, tmp_path / "home")


def test_a_given_model_that_takes_the_place_of_one_is_another_whatever_its_times(values, tmp_path):
    domain, own = next(iter(values["domains"].items()))
    given = save_pico(tmp_path / domain)
    own["expert"] = str(given)
    recipe = validate(values)
    workspace = published(recipe, tmp_path / "home")
    [weights] = given.glob("*.safetensors")
    aged = weights.stat().st_mtime - 3600
    os.utime(weights, (aged, aged))
    workspace.known.sha256(weights, own=True)
    weights.chmod(0o600)  # changes the inode alone
    assert again(recipe, tmp_path / "home") == {}
    other = tmp_path / "other"
    content = weights.read_bytes()
    other.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(other, (aged, aged))
    other.rename(weights)
    assert "experts" in again(recipe, tmp_path / "home")


@pytest.mark.parametrize("still_named", [True, False])
def test_what_is_planned_of_a_shrink_is_the_model_without_the_domain(values, tmp_path, still_named):
    rest = dict(values["domains"])
    whole = validate({**values, "domains": {**rest, "leaving": next(iter(rest.values()))}})
    workspace = published(whole, tmp_path)
    recipe = whole if still_named else validate(values)
    begun = begun_without(recipe, workspace, domain="leaving", rebuild=False)
    assert set(begun.domains) == set(rest)
    assert begun.lineage is not None
    to_come = again(begun, tmp_path)
    assert "experts" not in to_come
    assert to_come["model"] == 1


def wrote(texts, domain, split):
    """Text that is new since it was looked at."""
    with (texts / domain / f"{split}.txt").open("a") as file:
        file.write("omega")


def test_new_text_to_judge_by_trains_nothing(values, texts, tmp_path):
    recipe = validate(values)
    night = begin(recipe, published(recipe, tmp_path))
    wrote(texts, "letters", "heldout")
    assert again(night, tmp_path) == dict.fromkeys(("sources", "documents", "corpora", "report"), 1)


def test_new_text_beside_a_given_model_copies_it_and_changes_nothing_of_it(values, texts, tmp_path):
    for domain, own in values["domains"].items():
        save_pico(tmp_path / domain, seed=len(domain))
        own["expert"], own["calibration"] = str(tmp_path / domain), own.pop("train")
    values["seed_model"], values["tokenizer"] = {}, {}
    recipe = validate(values)
    published(recipe, tmp_path / "home")
    wrote(texts, next(iter(recipe.domains)), "train")
    found = again(recipe, tmp_path / "home")
    copied = ("sources", "documents", "corpora", "tokenizer", "experts")
    assert found == dict.fromkeys((*copied, "statistics", "router", "model", "report"), 1)


def test_what_a_stopped_flow_goes_on_with_is_not_to_come_once_more(values, texts, tmp_path):
    recipe = validate(values)
    workspace = published(recipe, tmp_path)
    values["statistics"]["tokens"] = 100
    changed = validate(values)
    before = plan(changed, tmp_path, ROOMY, base=0)
    session = Session(changed, workspace, log=lambda text: None)
    stage = next(stage for stage in stages_of(changed) if stage.name == "statistics")
    mark = fingerprint(stage.made_from(session, "letters"))
    size = before.disk_to_come // 2
    (workspace.pieces_of("statistics@letters", mark) / "whole").write_bytes(bytes(size))
    (workspace.pieces_of("statistics@letters", "0" * 64) / "whole").write_bytes(bytes(size))
    after = plan(changed, tmp_path, ROOMY, base=0)
    assert before.disk_to_come - after.disk_to_come == size + len("statistics@letters")
    free = replace(ROOMY, disk=after.disk_to_come)
    assert not list(plan(changed, tmp_path, free, base=0).faults())
    assert list(replace(before, machine=free).faults())
    wrote(texts, "letters", "train")  # of which its statistics are other ones
    assert plan(changed, tmp_path, ROOMY, base=0).begun == 0


def test_experts_that_are_left_are_planned_as_what_they_are(values, texts, tmp_path):
    """Of three that have been trained one goes on by an adapter: the others need no memory now."""
    training = values["experts"]["training"]
    values["experts"]["continued"] = {**training, "method": "lora", "steps": 5}
    recipe = validate(values)
    workspace = published(recipe, tmp_path)
    whole = plan(recipe, tmp_path / "elsewhere", ROOMY, base=0)
    night = begin(recipe, workspace)
    wrote(texts, "letters", "train")
    made = plan(night, tmp_path, ROOMY, base=0)
    [row] = [row for row in made.coming if row.stage == "experts"]
    [usual] = [row for row in whole.coming if row.stage == "experts"]
    assert (row.items, row.pieces) == (1, 1)
    assert row.each < usual.each
    assert row.flops is not None
    assert usual.flops is not None
    assert row.flops < usual.flops / 3
    assert row.kept < usual.kept


def test_a_flow_is_planned_as_the_stages_that_it_runs(values, tmp_path):
    values["baselines"] = {"btx": {"method": "btx", "training": {**TRAINING, "steps": 5}}}
    recipe = validate(values)
    published(recipe, tmp_path)
    shutil.rmtree(tmp_path / recipe.name / "baselines")
    assert again(recipe, tmp_path) == {"baselines": 1, "comparison": 1}
    assert again(recipe, tmp_path, Aim(updated)) == {}
    assert again(recipe, tmp_path, builds.aim(recipe)) == {}


def test_who_comes_or_leaves_is_planned_without_news_of_others(values, texts, tmp_path):
    domains = dict(values["domains"])
    few = validate({**values, "domains": {name: domains[name] for name in list(domains)[:2]}})
    workspace = published(few, tmp_path)
    wrote(texts, next(iter(domains)), "train")
    recipe, new = validate(values), list(domains)[2]
    grown = begun_with(recipe, workspace, domain=new, rebuild=False)
    found = again(grown, tmp_path, builds.aim(recipe, changed=[new]))
    assert found["experts"] == found["documents"] == found["statistics"] == 1
    assert again(grown, tmp_path)["experts"] == 2
    four = validate({**values, "domains": {**domains, "more": domains[new]}})
    workspace = published(four, tmp_path / "four")
    begun = begun_without(four, workspace, domain="more", rebuild=False)
    wrote(texts, next(iter(domains)), "train")
    found = again(begun, tmp_path / "four", builds.aim(four, changed=[]))
    assert not {"sources", "documents", "experts", "statistics"} & set(found)


def test_a_night_that_was_stopped_once_it_had_looked_is_planned_as_before(values, texts, tmp_path):
    recipe = validate(values)
    workspace = published(recipe, tmp_path)
    night = begin(recipe, workspace)
    wrote(texts, "letters", "train")
    before = again(night, tmp_path)
    sources, documents = stages_of(recipe)[:2]
    looked_again(recipe, workspace, [sources])
    after = again(night, tmp_path)
    assert before == {**after, "sources": 1}
    assert after["parents"] == after["experts"] == 1
    looked_again(recipe, workspace, [documents, stages_of(recipe)[3]])
    assert again(night, tmp_path) == {
        stage: count for stage, count in after.items() if stage not in ("documents", "corpora")
    }


def looked_again(recipe, workspace, stages):
    """What reads the text of a domain, published anew."""
    session = Session(recipe, workspace, log=lambda text: None)
    for stage in stages:
        item = "" if stage.always else "letters"
        artifact = stage.artifact(item)
        before = workspace.path(artifact)
        out = workspace.stage(artifact)
        for name in workspace.record(artifact)["files"]:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(f"{(before / name).read_text()} again")
        if stage.always:
            write_sources(StageRun(session, stage, item, out=out, mark="", recorder=None))
        made_from = stage.made_from(session, item)
        workspace.publish(out, artifact, {**made_from, "fingerprint": fingerprint(made_from)})


@pytest.mark.parametrize("missing", ["large", "small"])
def test_baselines_that_are_made_ask_for_nothing(values, tmp_path, missing):
    large = {"method": "btx", "training": {**TRAINING, "batch_size": 4096}}
    small = {"method": "btx", "training": {**TRAINING, "batch_size": 1}}
    recipe = validate({**values, "baselines": {"small": small, "large": large}})
    shutil.rmtree(published(recipe, tmp_path).path(f"baselines/{missing}"))
    assert again(recipe, tmp_path) == {"baselines": 1, "comparison": 1}
    made = plan(recipe, tmp_path, ROOMY, base=0)
    [row] = [row for row in made.rows if row.stage == "baselines"]
    refused = replace(made, machine=replace(ROOMY, memory=row.memory // 2)).faults()
    assert [fault.field for fault in refused] == ["compute.baselines"] * (missing == "large")


@pytest.mark.parametrize("row_of", [compared_row, *BASELINES.values()])
def test_a_row_of_some_baselines_is_of_those_alone(values, row_of):
    rows = {
        name: {"method": "btx", "training": {**TRAINING, "batch_size": size}}
        for name, size in (("small", 1), ("large", 4096))
    }
    recipe = validate({**values, "baselines": rows})
    subjects = Subjects(Shape.of_config(pico_config().to_dict(), 4), {}, {}, {})
    small, both = (row_of(recipe, subjects, n) for n in (["small"], ["small", "large"]))
    assert (small.items, both.items) == (1, 2)
    assert small.memory < both.memory / 2
    assert small.kept == both.kept / 2
