"""One flow, disturbed by SIGKILL once a phase, with secrets in its environment.

Twice it is the flow itself, which is started again, and twice a Ray worker.
"""

import base64
import os
import urllib.parse
from collections import Counter
from pathlib import Path

import pytest
from disturbed import Disturbed, kill_flow, kill_worker
from texts import pico_recipe, save_recipe, write_texts

from infra.registry import Registry
from infra.settings import read
from upcycle_core.checkpoints.hashing import tree_digest

DOMAINS = ("letters", "numbers")
KILLS = {
    "experts": kill_flow,
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


def recipe_of(folder, texts):
    values = pico_recipe(texts, domains=DOMAINS)
    values["experts"]["training"]["steps"] = 25
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    values["versions"] = {"remote": str(folder / "remote")}
    return save_recipe(folder / "recipe.yaml", values)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"), domains=DOMAINS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("undisturbed")
    project = Disturbed(folder, recipe_of(folder, texts))
    project.flow()
    project.all_calls = project.calls()
    return project


@pytest.fixture(scope="module")
def killed(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("killed")
    project = Disturbed(folder, recipe_of(folder, texts), **SECRETS)
    project.starts = project.run_through(KILLS)
    project.all_calls = project.calls()
    return project


def test_flow_with_a_kill_in_every_phase_ends_with_the_same_bytes(undisturbed, killed):
    assert killed.starts == 3
    assert killed.digests() == undisturbed.digests()


def test_what_was_finished_before_a_kill_is_not_made_again(undisturbed, killed):
    extra = killed.all_calls - undisturbed.all_calls
    # What ran when the flow was killed: a piece on each of the two CPUs.
    assert extra <= Counter(train=2, domain_statistics=2, assemble=1)
    assert not undisturbed.all_calls - killed.all_calls


def test_version_of_a_killed_flow_is_registered_once_and_whole(undisturbed, killed, tmp_path):
    copies = []
    for number, project in enumerate((undisturbed, killed)):
        registry = Registry(read(project.environment()))
        [version] = registry.versions("upcycle-pico")
        assert set(version.aliases) == {"challenger", "champion"}
        copy = registry.download(version.reference, tmp_path / str(number))
        copies.append(tree_digest(copy, exclude=("upcycle/recipe.yaml",)))
    assert copies[0] == copies[1]


def files_below(*folders):
    return (file for folder in folders for file in Path(folder).rglob("*") if file.is_file())


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
    assert any(name.startswith("raylet") for name in names)
