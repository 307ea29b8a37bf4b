"""The whole pipeline as a user runs it, on texts of a few kilobytes; and once more, disturbed.

The model is joined in closed form: its head is fitted to all experts, and these are repaired twice,
for the merged backbone and for what the solved routers send them.

The second is killed in every phase, with secrets in its environment: a Ray worker while pieces run,
and at the registration the flow itself, which is started again. `make test-faults` kills each of
both, and the servers, in all of the phases.
"""

import base64
import json
import os
import re
import shutil
import sys
import urllib.parse
import urllib.request
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from disturbed import Disturbed, kill_flow, kill_worker
from huggingface_hub import ModelCard
from mlflow import MlflowClient
from prefect_server import prefect_server
from project import ROOT, Project
from texts import pico_recipe, save_recipe, write_texts

from infra.settings import read
from infra.tracking.registry import Registry
from tasks.recipes import load_recipe
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.evaluation.text.pieces import evaluate_checkpoint
from upcycle_core.evaluation.text.scores import Score

DOMAINS = ("letters", "numbers")
DOWN = "model.layers.1.mlp.down_proj.weight"
KILLS = {
    "experts": kill_worker,
    "statistics": kill_worker,
    "assembly": kill_worker,
    "registration": kill_flow,
}
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAPLANTED4TESTS000",
    "AWS_SECRET_ACCESS_KEY": "planted/secret+of=s3",
    "HF_TOKEN": "hf_plantedsecretofthehub0123456789",
    "MLFLOW_TRACKING_PASSWORD": "planted-secret-of-mlflow",
    "PREFECT_API_KEY": "pnu_plantedsecretofprefect",
}
STOCK = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info.values()), info
inputs = AutoTokenizer.from_pretrained(sys.argv[1])("one two", return_tensors="pt")
print(type(model).__name__, model.generate(input_ids=inputs["input_ids"], max_new_tokens=3).shape)
print("ours:", sorted(name for name in sys.modules if name.startswith("upcycle")))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("flow")


@pytest.fixture(scope="module")
def recipe(folder):
    texts = write_texts(folder / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    values["domains"]["letters"]["elsewhere"] = {"files": ["{folder}/letters/elsewhere.txt"]}
    values["experts"]["training"]["steps"] = 25
    values["experts"] |= {"repair": "down+head_target", "repair_tokens": "routed"}
    values["backbone"] = {"merge": {"embeddings": "counts", "head": "fitted"}}
    values["compute"]["cpus"] = 2
    values["versions"] = {"remote": "remote"}
    return save_recipe(folder / "recipe.yaml", values)


@pytest.fixture(scope="module")
def project(folder, recipe):
    project = Project(folder / "whole", recipe, own_server=True)
    project.done = project.flow()
    project.first_calls = project.calls()
    project.own_server = False  # it has been seen to work
    return project


@pytest.fixture(scope="module")
def registry(project):
    return Registry(read(project.environment()))


def test_report_has_every_row(project):
    metrics = json.loads((project.workspace / "report" / "metrics.json").read_text())
    rows = {"seed", "model_averaging", "random_routing", "dume", "dume_ood", "oracle"}
    assert rows <= set(metrics["normalised_average"])
    assert metrics["normalised"]["expert_letters"]["letters"] == pytest.approx(100.0)
    assert set(metrics["sweeps"]) == {"top_k", "ridge_lambda", "window"}
    for picture in ("scores", "routing", "sweep_top_k", "sweep_ridge_lambda", "sweep_window"):
        assert (project.workspace / "report" / f"{picture}.png").stat().st_size > 1000
        assert (project.workspace / "report" / f"{picture}.csv").exists()


def test_terminal_says_scores_places_and_what_to_type(project):
    for text in ("Oracle", "make up", "flows.generate", str(project.workspace / "model")):
        assert text in project.done.stdout
    assert "; there was no champion\n" in project.done.stdout
    assert "tokens/s" in project.done.stderr


def test_each_core_function_was_called_once_a_piece(project):
    calls = project.first_calls
    assert calls["write_documents"] == 2
    assert calls["train"] == 3  # the seed, two experts
    assert calls["domain_statistics"] == 2 * 2 + 2  # two shards a text; letters has another text
    assert calls["assemble"] == 1


def test_the_moe_is_made_of_repaired_experts(project):
    assert (project.first_calls["repair_expert"], project.first_calls["repair_routed"]) == (2, 1)
    moe = CheckpointReader(project.workspace / "model")
    for index, domain in enumerate(DOMAINS):
        expert, repaired, routed = (
            CheckpointReader(project.workspace / kind / domain).tensor(DOWN)
            for kind in ("experts", "repaired", "routed")
        )
        place = f"model.layers.1.block_sparse_moe.experts.{index}.w2.weight"
        assert moe.tensor(place).equal(routed)
        assert not expert.equal(repaired)
        layers = json.loads((project.workspace / "routed" / domain / "repair.json").read_text())
        assert repaired.equal(routed) == (layers[1]["lambda"] is None)
    assert changed_by_routing(project)


def changed_by_routing(project):
    """Down projections that the second repair has moved."""
    readers = {
        domain: [CheckpointReader(project.workspace / k / domain) for k in ("repaired", "routed")]
        for domain in DOMAINS
    }
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)]
    return [
        (domain, name)
        for domain, (before, after) in readers.items()
        for name in names
        if not before.tensor(name).equal(after.tensor(name))
    ]


def test_the_fitted_head_is_everybody_s_and_no_longer_the_embedding(project):
    assert project.first_calls["fitted_head"] == 1
    assert project.first_calls["final_moments"] == len(DOMAINS)
    moe = CheckpointReader(project.workspace / "model")
    heads = [
        CheckpointReader(project.workspace / kind / domain).tensor(LM_HEAD)
        for kind in ("repaired", "routed")
        for domain in DOMAINS
    ]
    assert all(head.equal(moe.tensor(LM_HEAD)) for head in heads)
    assert moe.config["tie_word_embeddings"] is False
    assert not moe.tensor(LM_HEAD).equal(moe.tensor(EMBEDDING))
    more = f"{heads[0].numel():,} parameters more"
    assert f"the head is no longer the embedding: {more}" in project.done.stderr


def test_the_oracle_is_the_repaired_expert(project):
    measured = json.loads((project.workspace / "report/metrics.json").read_text())
    config = load_recipe(project.recipe).evaluation
    for domain in DOMAINS:
        text = {domain: project.workspace / "corpora" / domain / "heldout"}
        expected = evaluate_checkpoint(project.workspace / "routed" / domain, text, config=config)
        (score,) = expected.values()
        assert measured["perplexity"]["oracle"][domain] == pytest.approx(
            Score.from_dict(score).perplexity, rel=1e-5
        )


def test_model_loads_with_stock_transformers(project):
    done = project.run(
        sys.executable, "-c", STOCK, str(project.workspace / "model"), cwd=project.home
    )
    assert "MixtralForCausalLM" in done.stdout
    assert "ours: []" in done.stdout


def test_version_carries_what_made_it(project, registry, tmp_path):
    version = registry.find("upcycle-pico", "champion")
    assert version is not None
    assert version.number == 1
    assert set(version.aliases) == {"challenger", "champion"}
    assert "no champion" in version.tags["upcycle.decision"]
    assert re.fullmatch(r"promoted: \d+\.\d\d, the first", version.tags["outcome"])
    assert version.description.startswith(version.tags["outcome"])
    assert version.metrics["normalised_average/dume"] > 0
    copy = registry.download("models:/upcycle-pico@champion", tmp_path / "model")
    recipe = yaml.safe_load((copy / "upcycle" / "recipe.yaml").read_text())
    assert recipe["name"] == "pico"
    lock = yaml.safe_load((copy / "upcycle" / "dvc.lock").read_text())
    assert "report" in lock["stages"]
    weights = (copy / "model.safetensors").read_bytes()
    assert weights == (project.workspace / "model" / "model.safetensors").read_bytes()


def test_version_has_a_card_that_hubs_read(project, registry):
    text = registry.text(registry.find("upcycle-pico", "champion"), "card.md")
    metrics = json.loads((project.workspace / "report" / "metrics.json").read_text())
    results = ModelCard(text).data.eval_results
    perplexities = {
        r.dataset_type: r.metric_value for r in results if r.metric_type == "perplexity"
    }
    assert perplexities == pytest.approx(metrics["perplexity"]["dume"], abs=1e-3)
    for domain in DOMAINS:
        manifest = json.loads(
            (project.workspace / "documents" / domain / "manifest.json").read_text()
        )
        assert f"`{manifest['splits']['train']['sha256'][:12]}`" in text
    assert "Backbone gap" in text
    assert "there was no champion" in text
    assert ModelCard(text).data.license == "unknown"
    assert "No model was given: its licence is for its makers to choose." in text


def test_card_shows_intervals_and_the_picture_beside_it(project, registry, tmp_path):
    copy = registry.download("models:/upcycle-pico@champion", tmp_path / "model")
    text = (copy / "upcycle" / "card.md").read_text()
    [picture] = re.findall(r"!\[.*\]\((.*)\)", text)
    drawn = project.workspace / "report" / "routing.png"
    assert (copy / "upcycle" / picture).read_bytes() == drawn.read_bytes()
    metrics = json.loads((project.workspace / "report" / "metrics.json").read_text())
    for name in (*DOMAINS, "average"):
        low, high = metrics["interval"]["dume"][name]
        score = {**metrics["normalised"]["dume"], "average": metrics["normalised_average"]["dume"]}
        assert low < score[name] < high
        assert f"| {name} | {score[name]:.1f} | {low:.1f} to {high:.1f} |" in text


def test_runs_say_their_outcome_commit_and_time(project, registry):
    version = registry.find("upcycle-pico", "champion")
    client = MlflowClient(read(project.environment()).mlflow_tracking_uri)
    flow = client.get_run(version.run_id)
    commit = flow.data.tags["mlflow.source.git.commit"]
    assert flow.data.tags["git.commit"] in (commit, f"{commit}-modified")
    assert re.match(
        r"\*\*Version 1 promoted, .*\*\* \(`models:/upcycle-pico/1`: ",
        flow.data.tags["mlflow.note.content"],
    )
    sources = [json.loads(found.dataset.source)["uri"] for found in flow.inputs.dataset_inputs]
    assert "pico/corpora/letters/train" in sources
    parent = f"tags.mlflow.parentRunId = '{flow.info.run_id}'"
    stages = client.search_runs([flow.info.experiment_id], parent)
    assert {"seed", "experts@letters"} <= {run.info.run_name for run in stages}
    assert all(run.data.metrics["seconds"] > 0 for run in stages)
    trained = next(run for run in stages if run.info.run_name == "experts@letters")
    assert [found.dataset.name for found in trained.inputs.dataset_inputs] == ["letters/train"]
    assert trained.data.metrics["peak_memory_bytes"] > 10**7
    assert trained.data.metrics["core_seconds"] > 0
    decided = version.tags["outcome"].replace("promoted:", "promoted,")
    assert re.fullmatch(
        rf"pico \d{{4}}-\d\d-\d\d: version 1 {re.escape(decided)}", flow.info.run_name
    )
    assert flow.data.tags["mlflow.source.name"] == "dume"
    page = flow.data.tags["prefect.page"]
    assert page.endswith(f"/runs/flow-run/{flow.data.tags['prefect.flow_run_id']}")
    assert f"[Its run in Prefect]({page})" in flow.data.tags["mlflow.note.content"]


def test_scores_are_logged_once_and_in_groups(project, registry):
    version = registry.find("upcycle-pico", "champion")
    client = MlflowClient(read(project.environment()).mlflow_tracking_uri)
    keys = set(client.get_run(version.run_id).data.metrics)
    assert {"normalised_average/dume", "perplexity/letters", "seconds/wall"} <= keys
    assert not [key for key in keys if "." in key]
    assert not [key for key in keys if "/" not in key]


def test_documented_command_generates_text(project):
    command = [sys.executable, "-m", "flows.generate", "upcycle-pico@champion"]
    done = project.run(*command, "one two", "three", "--tokens", "5")
    first, second = done.stdout.split("\n---\n")
    assert first.startswith("one two")
    assert second.startswith("three")


@pytest.fixture(scope="module")
def second(project):
    """The flow once more: what it says, what it changed, and its run in Prefect."""
    before = project.digests()
    done = project.flow()
    newest = {"sort": "START_TIME_DESC", "limit": 1}
    [run] = ask("flow_runs/filter", newest)
    return SimpleNamespace(done=done, before=before, calls=project.calls(), run=run)


def ask(path, body=None):
    """What the tests' Prefect server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{prefect_server()}/{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_second_run_calls_nothing_and_registers_nothing(project, registry, second):
    assert not second.calls
    assert project.digests() == second.before
    assert len(registry.versions("upcycle-pico")) == 1
    assert "): as it was registered: version 1 is this very model\n" in second.done.stdout
    assert "no champion" not in second.done.stdout


def test_prefect_s_list_of_runs_says_recipe_and_outcome(second):
    said = "version 1 is this very model"
    assert re.fullmatch(rf"pico \d{{4}}-\d\d-\d\d: {said}", second.run["name"])
    assert second.run["tags"] == ["pico"]
    assert second.run["state"]["message"] == said


def test_prefect_s_graph_has_edges_from_stages_to_those_that_read_them(second):
    graph = ask(f"flow_runs/{second.run['id']}/graph-v2")
    nodes = {identity: node["label"] for identity, node in graph["nodes"]}
    parents = {
        node["label"]: {nodes[parent["id"]] for parent in node["parents"]}
        for _, node in graph["nodes"]
    }
    assert parents["sources"] == set()
    assert parents["documents letters"] == {"sources"}
    # Not the letters' corpus, which the seed has read.
    assert parents["experts letters"] == parents["experts numbers"] == {"seed"}
    assert parents["backbone"] == {"experts letters", "experts numbers"}
    assert "model" in parents["report"]


def test_dvc_finds_what_the_flow_made_up_to_date(project):
    project.run("dvc", "repro", cwd=project.workspace)
    assert not project.calls()


def test_git_keeps_small_files_alone_and_dvc_shows_their_numbers(project):
    def git(*words):
        return project.run("git", *words, cwd=project.workspace).stdout.splitlines()

    assert git("log", "--format=%s") == ["dume pico"] * 2
    kept = {".dvc/config", ".dvcignore", ".gitignore", "dvc.lock", "dvc.yaml"}
    assert set(git("ls-files")) == kept | {"metrics.json", "params.yaml"}
    assert git("status", "--porcelain") == []
    numbers = json.loads((project.workspace / "metrics.json").read_text())
    metrics = json.loads((project.workspace / "report" / "metrics.json").read_text())
    assert numbers["normalised_average.dume"] == metrics["normalised_average"]["dume"]
    assert numbers["perplexity.letters"] == metrics["perplexity"]["dume"]["letters"]
    assert 5 <= len(numbers) <= 12
    shown = project.run("dvc", "metrics", "show", "--md", cwd=project.workspace).stdout
    assert "| normalised_average.dume" in shown.splitlines()[0]


@pytest.fixture(scope="module")
def killed(folder, recipe):
    project = Disturbed(folder / "killed", recipe, **SECRETS)
    project.starts = project.run_through(KILLS)
    project.all_calls = project.calls()
    return project


@pytest.mark.faults
def test_flow_with_a_kill_in_every_phase_ends_with_the_same_bytes(project, killed):
    assert killed.starts == 2
    assert all(killed.killed[phase] for phase in KILLS), killed.killed
    assert killed.digests() == project.digests()


@pytest.mark.faults
def test_what_was_finished_before_a_kill_is_not_made_again(project, killed):
    extra = killed.all_calls - project.first_calls
    # What ran when it was killed.
    assert extra <= Counter(train=1, domain_statistics=1, assemble=1)
    assert not project.first_calls - killed.all_calls


@pytest.mark.faults
def test_version_of_a_killed_flow_is_registered_once_and_whole(project, killed, tmp_path):
    copies = []
    for number, made in enumerate((project, killed)):
        registry = Registry(read(made.environment()))
        [version] = registry.versions("upcycle-pico")
        assert set(version.aliases) == {"challenger", "champion"}
        copy = registry.download(version.reference, tmp_path / str(number))
        copies.append(tree_digest(copy, exclude=["MLmodel"]))  # holds the time and the run
    assert copies[0] == copies[1]


def files_below(*folders):
    return {file for folder in folders for file in Path(folder).rglob("*") if file.is_file()}


@pytest.mark.faults
def test_secrets_in_the_environment_are_in_no_file_and_no_log(killed):
    # One that is there shows that the search would find them.
    planted = killed.home / "mlflow" / "planted"
    planted.write_bytes(b"x\0" + SECRETS["HF_TOKEN"].encode())
    forms = {}
    for name, secret in SECRETS.items():
        encoded = base64.b64encode(secret.encode()).decode()
        for form in (secret, urllib.parse.quote(secret, safe=""), encoded):
            forms[form.encode()] = name
    session = [os.environ[name] for name in ("HOME", "RAY_TMPDIR", "TMPDIR", "PREFECT_HOME")]
    found = []
    for file in files_below(killed.home.parent, *session):
        content = file.read_bytes()
        found += [(file, name) for form, name in forms.items() if form in content]
    assert found == [(planted, "HF_TOKEN")]
    names = {file.name for file in files_below(killed.home.parent, *session)}
    assert {"mlflow.db", "prefect.db", "output", "dvc.lock", "provenance.json"} <= names


@pytest.mark.faults
def test_dvc_makes_the_same_bytes_and_the_flow_finds_them_up_to_date(project):
    before = project.digests()
    done = project.run("dvc", "repro", "--force", "--single-item", "router", cwd=project.workspace)
    assert "Running stage 'router'" in done.stdout
    assert project.calls()["solve_routers"] == 2
    assert project.digests() == before
    project.flow()
    assert not project.calls()


@pytest.mark.faults
def test_damaged_artifact_is_made_again(project):
    before = project.digests()
    weights = project.workspace / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()  # the registered version shares its bytes
    weights.write_bytes(content[:-1] + b"x")
    project.flow()
    assert project.calls()["assemble"] == 1
    assert project.digests() == before


@pytest.mark.faults
def test_other_lambda_runs_from_the_router_on_and_is_judged_and_certified(project, registry):
    certified = ["--set", "registry.certificate=at-hand"]
    project.flow("--set", "router.ridge_lambda=1000000.0", *certified)
    calls = project.calls()
    assert calls["assemble"] == 1
    assert not {"train", "domain_statistics", "write_documents"} & set(calls)
    first, second = registry.versions("upcycle-pico")
    assert "challenger" in second.aliases
    holder = second if "does not beat" not in second.tags["upcycle.decision"] else first
    assert "champion" in holder.aliases
    arrived = re.search(r"arrived: ([^;]*)", second.tags["upcycle.certificate"])[1]
    assert {"transformers", "mlflow"} <= set(arrived.split(", "))
    assert json.loads(registry.text(second, "certificate.json"))["readers"]


@pytest.mark.faults
def test_dvc_compares_yesterday_in_a_workspace_that_was_renamed(project, tmp_path):
    """After the run with another lambda: what has become of parameters, numbers and the model."""
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(project.workspace, moved, symlinks=True)

    def dvc(*words, cwd=moved):
        return project.run("dvc", *words, cwd=cwd).stdout

    assert "router.ridge_lambda" in dvc("params", "diff", "HEAD~1")
    changed = json.loads(dvc("metrics", "diff", "HEAD~1", "--json"))["metrics.json"]
    assert changed["normalised_average.dume"]["diff"] != 0
    assert "router.ridge_lambda" in dvc("exp", "show", "--num", "2", "--csv").splitlines()[0]
    page = dvc("plots", "diff", "HEAD~1", "--out", str(tmp_path / "plots"))
    html = Path(page.strip().removeprefix("file://")).read_text()
    assert "normalised_average" in html
    assert "model_averaging" in html
    dvc("get", str(moved), "router", "--rev", "HEAD~1", "--out", "router", cwd=tmp_path)
    old, new = (tree_digest(folder / "router") for folder in (tmp_path, moved))
    assert old.keys() == new.keys()
    assert old != new


def test_root_pipeline_files_are_those_of_the_demo(tmp_path):
    """params.yaml and dvc.yaml in the repository are generated: see their first lines."""
    from tasks.pipeline import specimens

    files = specimens(load_recipe(ROOT / "recipes" / "demo.yaml"))
    assert set(files) == {"dvc.yaml", "params.yaml"}
    for name, text in files.items():
        assert (ROOT / name).read_text() == text
        assert text.startswith("# A SPECIMEN")
