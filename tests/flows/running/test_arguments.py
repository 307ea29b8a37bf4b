"""What a command refuses before it imports what it would compute with."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows.running.arguments import ARGUMENTS, look_first, parser_of

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {"torch", "prefect", "mlflow", "ray", "transformers", "datasets"}
OF_PIECES = {
    *("transformers.modeling_utils", "transformers.trainer_callback", "peft", "datasets"),
    *("accelerate", "torch.distributed.fsdp"),
}
"""What computes; it takes as long to import as all the rest of a flow."""


def imported(*words):
    """A command, and the packages that it imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    names = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M)
    assert "pydantic" in names  # the list is what it is taken for
    return done, {name.partition(".")[0] for name in names}


def test_every_command_has_its_arguments_here():
    files = (ROOT / "flows").glob("*.py")
    commands = {file.stem for file in files if "def main(" in file.read_text()}
    assert commands == set(ARGUMENTS)


def test_help_imports_nothing_heavy():
    done, names = imported("-m", "flows.dume", "--help")
    assert done.returncode == 0
    assert "DUME end to end" in done.stdout
    assert "--rebuild" in done.stdout
    assert "\npython -m flows.dume recipes/demo.yaml [--set" in done.stdout  # a line of its own
    assert not names & HEAVY


def test_no_parser_imports_anything_heavy():
    program = "from flows.running.arguments import ARGUMENTS, parser_of\n"
    program += "for command in ARGUMENTS: parser_of(command).format_help()"
    done, names = imported("-c", program)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not names & HEAVY


def test_a_flow_imports_no_model_and_no_trainer():
    """Pieces do, in their workers."""
    program = f"import sys; sys.argv = ['x']; import {', '.join(f'flows.{c}' for c in ARGUMENTS)}\n"
    program += f"print(sorted({OF_PIECES} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


def test_a_wrong_key_is_refused_before_anything_heavy_is_imported():
    settings = ("--set", "router.lamda=3", "--set", "experts.training.steps=-1")
    done, names = imported("-m", "flows.retrain", "recipes/demo.yaml", *settings)
    assert done.returncode == 2
    assert "router.lamda = 3: no such key; did you mean ridge_lambda?" in done.stderr
    assert "experts.training.steps = -1: must be at least 1" in done.stderr
    assert not names & HEAVY


def test_texts_and_models_that_are_missing_are_refused_together_before_it(tmp_path):
    values = yaml.safe_load((ROOT / "recipes" / "nightly.yaml").read_text())
    values["folder"] = str(tmp_path)
    values["domains"]["cpp"]["expert"] = str(tmp_path / "gone")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    done, names = imported("-m", "flows.dume", str(recipe))
    assert done.returncode == 2
    assert f"domains.python.train.files = '{tmp_path}/python/*.txt': there is no" in done.stderr
    assert f"domains.python.heldout.files = '{tmp_path}/heldout/*.txt': there is" in done.stderr
    assert f"domains.cpp.expert = '{tmp_path}/gone': there is no such file" in done.stderr
    assert not names & HEAVY


@pytest.mark.parametrize("recipe", ["no-such-file.yaml", "flows"])
def test_a_recipe_that_cannot_be_read_is_refused_before_it(recipe):
    done, names = imported("-m", "flows.make", recipe)
    assert done.returncode == 2
    assert f"recipe = '{recipe}'" in done.stderr
    assert not names & HEAVY


def test_the_budget_of_a_comparison_is_a_setting_like_others():
    """A recipe may be right with it alone: it is part of what is looked at first."""
    words = ["r.yaml", "rows.yaml", "--set", "seed=1", "--tokens", "2_000", "--set", "name=a"]
    chosen = parser_of("compare").parse_args(words)
    assert chosen.set == ["seed=1", "comparison.tokens=2_000", "name=a"]


def test_a_text_that_is_gone_does_not_stop_who_reads_none(tmp_path):
    values = yaml.safe_load((ROOT / "recipes" / "nightly.yaml").read_text())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**values, "folder": str(tmp_path)}))
    look_first(["python", "-m", "flows.tidy", str(recipe)])
    look_first(["python", "-m", "flows.shrink", str(recipe), "python"])
    with pytest.raises(SystemExit):
        look_first(["python", "-m", "flows.grow", str(recipe), "python"])


def test_a_plan_names_every_model_that_is_gone_and_asks_for_no_text(tmp_path, capsys):
    values = yaml.safe_load((ROOT / "recipes" / "nightly.yaml").read_text())
    values["folder"] = str(tmp_path)
    for domain in values["domains"].values():
        domain["expert"] = str(tmp_path / "gone")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    with pytest.raises(SystemExit):
        look_first(["python", "-m", "flows.plan", str(recipe)])
    *said, end = capsys.readouterr().err.split("\n")
    gone = f" = '{tmp_path}/gone': there is no such file or folder; check the path"
    assert (said, end) == ([f"domains.{name}.expert{gone}" for name in values["domains"]], "")


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("rollback", "moe --because slow 7", {"name": "moe", "because": "slow", "version": 7}),
        ("restore", "moe --into home 3", {"name": "moe", "into": "home", "version": "3"}),
        ("generate", "moe one --tokens 3 two", {"model": "moe", "prompts": ["one", "two"]}),
        ("generate", "--tokens 3 -- moe -one", {"model": "moe", "prompts": ["-one"], "tokens": 3}),
        ("serve", "moe --port 9", {"model": "moe", "port": 9, "options": []}),
        ("serve", "moe -- --port 8 x", {"port": 8000, "options": ["--port", "8", "x"]}),
        ("serve", "moe --port 9 -- --port 8 -- x", {"options": ["--port", "8", "--", "x"]}),
    ],
)
def test_options_stand_where_people_put_them_and_what_follows_dashes_is_none(
    command, words, expected
):
    assert expected.items() <= vars(parser_of(command).parse_args(words.split())).items()


@pytest.mark.parametrize("command", ["seeds", "compare", "simoe"])
def test_a_seed_that_is_given_twice_is_refused(command, capsys, tmp_path):
    arguments = ["recipe.yaml", "--out", str(tmp_path), "--seeds", "0"]
    assert parser_of(command).parse_args([*arguments, "1"]).seeds == [0, 1]
    with pytest.raises(SystemExit):
        parser_of(command).parse_args([*arguments, "0"])
    assert "--seeds: a seed is given twice" in capsys.readouterr().err
