import pytest

from infra.recipe.paths import rooted
from upcycle_core.errors import InputError


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "models" / "code").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_paths_are_seen_from_where_the_recipe_is_read(here):
    given = {
        "name": "models",
        "folder": "texts",
        "domains": {
            "code": {
                "expert": "models/code",
                "train": {"files": ["a.txt", "{folder}/b.txt", "/c/*.txt", "~/d.txt"]},
                "origin": {"model": "~/models/code"},
            },
            "law": {"expert": "owner/law", "heldout": {"dataset": "models"}},
        },
        "seed_model": {"model": "models/code", "training": {"steps": 3}},
        "registry": {"model": "models"},
        "instructions": {
            "sources": {"sni": {"definitions": "d.jsonl", "task_lists": ["{folder}/t", "split/t"]}}
        },
        "tasks": {"sni": {"superni": {"instances": "i.jsonl", "tasks": "/t.jsonl"}, "shots": 2}},
        "task_evaluation": {"folder": "bench"},
    }
    found = rooted(given)
    source = found["instructions"]["sources"]["sni"]
    assert source == {
        "definitions": f"{here}/d.jsonl",
        "task_lists": ["{folder}/t", f"{here}/split/t"],
    }
    task = {"superni": {"instances": f"{here}/i.jsonl", "tasks": "/t.jsonl"}, "shots": 2}
    assert found["tasks"] == {"sni": task}
    assert found["task_evaluation"] == {"folder": f"{here}/bench"}
    code, law = found["domains"]["code"], found["domains"]["law"]
    assert found["folder"] == f"{here}/texts"
    assert code["expert"] == code["origin"]["model"] == f"{here}/models/code"
    files = [f"{here}/a.txt", "{folder}/b.txt", "/c/*.txt", f"{here}/d.txt"]
    assert code["train"]["files"] == files
    assert law == {"expert": "owner/law", "heldout": {"dataset": f"{here}/models"}}
    assert found["seed_model"] == {"model": f"{here}/models/code", "training": {"steps": 3}}
    assert found["registry"] == {"model": "models"}
    assert given["folder"] == "texts"


def test_a_definition_begins_at_the_checkout_or_at_home(here):
    given = {"a": "recipes/tasks/gsm8k.yaml", "b": "~/b.yaml", "c": "/c.yaml"}
    found = rooted({"tasks": {name: {"definition": path} for name, path in given.items()}})["tasks"]
    assert {name: task["definition"] for name, task in found.items()} == given | {
        "b": f"{here}/b.yaml"
    }


def test_values_of_the_wrong_kind_stay_for_those_who_judge_them(here):
    given = {"folder": 3, "domains": [1], "seed_model": {"model": ["x"]}, "outside": {"a": None}}
    given |= {"tasks": {"a": {"superni": [1]}, "b": 3}, "task_evaluation": {"folder": 3}}
    assert rooted(given) == given
    odd = {"domains": {"a": {"expert": "", "train": {"files": "x"}}, "b": {"expert": "x" * 5000}}}
    assert rooted(odd) == odd


def test_the_home_of_nobody_is_a_fault(here):
    with pytest.raises(InputError, match=r"domains\.a\.expert = '~nosuchuser/x'"):
        rooted({"domains": {"a": {"expert": "~nosuchuser/x"}}})
