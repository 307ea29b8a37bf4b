"""What comes from elsewhere stays data: no pickle, no foreign code, no path that leads outside."""

import ast
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tasks.recipes import validate
from tests.pico import save_pico
from tests.texts import pico_recipe
from tests.upcycle_core.training.runs import RandomRows, run, settings
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import PICKLE_SUFFIXES, CheckpointReader
from upcycle_core.checkpoints.tokenizer import vocabulary_fingerprint
from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks.config import EvaluationTask
from upcycle_core.evaluation.tasks.definitions import task_faults

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("upcycle_core", "tasks", "flows", "infra")
RUN_CODE = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
"""Modules whose files run code when they are read."""
FORBIDDEN = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "yaml.unsafe_load",
    "yaml.full_load",
    "shutil.unpack_archive",
    "torch.hub.load",
}
WATCHED = FORBIDDEN | {"torch.load", "yaml.load"}
# A program that a model wrote, in a process that may do nothing; a loader made of the safe one.
EXCEPTIONS = {
    "upcycle_core/evaluation/tasks/sandbox_child.py": {"exec"},
    "upcycle_core/evaluation/tasks/definitions.py": {"yaml.load"},
    # Runs beside a registered version, for who asks MLflow for it: DeRS and SIMoE bring their code.
    "infra/tracking/upcycle_serving.py": {
        "AutoModelForCausalLM.from_pretrained without trust_remote_code=False",
        "AutoTokenizer.from_pretrained without trust_remote_code=False",
    },
    # Opens a version as its users do, in a process of its own: the code is that of our checkpoint.
    "infra/readers/ask/ask_transformers.py": {
        "AutoModelForCausalLM.from_pretrained trust_remote_code",
        "AutoModelForCausalLM.from_pretrained without trust_remote_code=False",
    },
    "infra/readers/ask/ask_vllm.py": {"LLM trust_remote_code"},
}


def found_in(file: Path) -> set[str]:
    """Dangerous calls and imports of a module."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & RUN_CODE
            renamed = {alias.name: alias.asname for alias in node.names if alias.asname}
            holders = {name.rpartition(".")[0] for name in WATCHED} & renamed.keys()
            found |= {f"{module} as {renamed[module]}" for module in holders}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} & RUN_CODE
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & WATCHED
        if isinstance(node, ast.Call):
            found |= dangers_of(ast.unparse(node.func), {k.arg: k.value for k in node.keywords})
    return found


def dangers_of(called: str, options: dict[str | None, ast.expr]) -> set[str]:
    """What is dangerous about a call with these keywords."""

    def is_set(option: str, value: bool) -> bool:
        given = options.get(option)
        return isinstance(given, ast.Constant) and given.value is value

    bad = {called} & FORBIDDEN
    if called == "torch.load" and not is_set("weights_only", True):
        bad.add("torch.load")
    if called == "yaml.load" or called.endswith(".extractall"):
        bad.add(called)
    for option in ("shell", "trust_remote_code", "allow_pickle"):
        if option in options and not is_set(option, False):
            bad.add(f"{called} {option}")
    is_loading = called.startswith("Auto") and called.endswith(".from_pretrained")
    if is_loading and not is_set("trust_remote_code", False):
        bad.add(f"{called} without trust_remote_code=False")
    return bad


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_reads_what_can_run_code(package):
    dangers = {
        name: found - EXCEPTIONS.get(name, set())
        for file in sorted((ROOT / package).rglob("*.py"))
        for name, found in [(str(file.relative_to(ROOT)), found_in(file))]
    }
    assert not {name: found for name, found in dangers.items() if found}


@pytest.mark.parametrize(
    ("line", "danger"),
    [
        ("import pickle", "pickle"),
        ("torch.load(path)", "torch.load"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("subprocess.run(command, shell=True)", "subprocess.run shell"),
        ("yaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("eval(text)", "eval"),
        ("from pickle import loads", "pickle"),
        ("from torch import load", "torch.load"),
        ("from subprocess import getoutput as said", "subprocess.getoutput"),
        ("import os as system", "os as system"),
        ("AutoModel.from_pretrained(path, trust_remote_code=trust)", "trust_remote_code"),
        ("AutoTokenizer.from_pretrained(path)", "without trust_remote_code=False"),
        ("numpy.load(path, allow_pickle=True)", "numpy.load allow_pickle"),
        ("tarfile.open(path).extractall(out)", "extractall"),
    ],
)
def test_what_can_run_code_is_recognised(tmp_path, line, danger):
    (tmp_path / "module.py").write_text(line)
    assert any(danger in found for found in found_in(tmp_path / "module.py"))


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


class StopsAt(RandomRows):
    """Rows until one that cannot be read."""

    def __init__(self, count, stop):
        super().__init__(count)
        self.stop = stop

    def __getitem__(self, index):
        if index == self.stop:
            raise KeyboardInterrupt
        return super().__getitem__(index)


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_training_continues_from_no_pickle_that_runs_code(tmp_path, file):
    """What the HF Trainer keeps of a training are pickles; they are read as weights alone."""
    model, config = save_pico(tmp_path / "model"), settings(steps=4, checkpoint_steps=2)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, model, config=config, rows=StopsAt(8, stop=6))
    [checkpoint] = (tmp_path / "out-checkpoints").iterdir()
    pickles = {path.name for path in checkpoint.iterdir() if path.suffix in PICKLE_SUFFIXES}
    assert pickles == {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    torch.save(Payload(tmp_path / "ran"), checkpoint / file)
    # Whoever puts it there also sees to it that the checkpoint counts as whole.
    marker = checkpoint / "complete.json"
    content = json.loads(marker.read_text()) | {"sizes": {}}
    del content["seal"]
    marker.write_text(json.dumps(content))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        run(tmp_path, model, config=config)
    assert not (tmp_path / "ran").exists()
    torch.load(checkpoint / file, weights_only=False)
    assert (tmp_path / "ran").exists(), "the payload would not have run in any case"


def test_code_beside_a_model_is_not_run(tmp_path):
    directory = save_pico(tmp_path / "model")
    making = f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n"
    (directory / "own.py").write_text(f"{making}class C: ...\nclass M: ...\nclass T: ...\n")
    settings_of = directory / "config.json"
    code = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    config = json.loads(settings_of.read_text()) | {"model_type": "own", "auto_map": code}
    settings_of.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_causal_lm(directory)
    (directory / "tokenizer.json").rename(directory / "vocab.txt")
    words = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["own.T", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(words))
    with pytest.raises(InputError, match="tokenizer cannot be read"):
        vocabulary_fingerprint(directory)
    assert not (tmp_path / "ran").exists()


def test_index_that_points_out_of_its_checkpoint_is_refused(tmp_path):
    directory = save_pico(tmp_path / "model")
    shutil.copyfile(directory / "model.safetensors", tmp_path / "other.safetensors")
    (directory / "model.safetensors").unlink()
    weights = {"lm_head.weight": "../other.safetensors"}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(InputError, match=r"\.\./other\.safetensors.*file beside it"):
        CheckpointReader(directory)


def definition(tmp_path, text):
    (tmp_path / "task.yaml").write_text(text)
    return task_faults(
        EvaluationTask(definition="task.yaml"), "tasks.own", folder=tmp_path, root=tmp_path
    )


def test_task_definition_makes_no_objects(tmp_path):
    made = tmp_path / "ran"
    text = f"task: own\ndoc_to_text: !!python/object/apply:os.mkdir ['{made}']\n"
    assert "not YAML" in str(*definition(tmp_path, text))
    assert not made.exists()


@pytest.mark.parametrize("split", ["../../../out", "/out", "a/b", "a b"])
def test_task_definition_writes_nothing_outside_its_folder(tmp_path, split):
    """Its data are copied to files that are named after its splits."""
    (tmp_path / "rows.jsonl").write_text("{}\n")
    files = {"data_files": {split: "{folder}/rows.jsonl"}}
    text = yaml.safe_dump({"task": "own", "dataset_path": "json", "dataset_kwargs": files})
    assert "letters, digits" in str(*definition(tmp_path, text))


def recipe_with(place, value):
    """A recipe with ``value`` at a dotted place; ``*`` names a new entry there."""
    values = pico_recipe(Path("/texts"), domains=("letters", "numbers"))
    values |= {"registry": {}, "versions": {}, "baselines": {}, "tasks": {}, "outside": {}}
    values["compression"] = {"codecs": {}}
    *path, last = place.split(".")
    at = values
    for part in path:
        at = at[part]
    entries = {
        "domains": values["domains"]["letters"],
        "baselines": {"method": "btx"},
        "tasks": {"heldout": "text", "domain": "letters"},
        "outside": {"files": ["/text"]},
        "codecs": {"codec": "quantised", "bits": 4},
    }
    if last == "*":
        at[value] = entries[path[-1]]
    else:
        at[last] = value
    return values


NAMED = ["name", "domains.*", "baselines.*", "tasks.*", "outside.*", "compression.codecs.*"]
BAD = ["../x", "..", "/x", "a/b", "a\\b", "a'b", 'a"b', "a\nb", "a\n", "a;b", "$(a)", "`a`", "a b"]
BAD += ["-a", "", ".a", "a\0b", "a%2fb", "a|b", "${a}", "{a}", "a@b", "ä", "A", "x" * 65]


@pytest.mark.parametrize("place", NAMED)
def test_names_that_could_leave_their_folder_or_their_quotes_are_refused(place):
    for name in BAD:
        with pytest.raises(InputError, match="names a folder in the workspace"):
            validate(recipe_with(place, name))


@pytest.mark.parametrize("name", [*BAD[:-2], "x" * 129, "models:/x"])
def test_registered_names_that_could_leave_a_query_or_an_address_are_refused(name):
    with pytest.raises(InputError, match=r"registry\.model"):
        validate(recipe_with("registry.model", name))


@pytest.mark.parametrize(
    ("place", "name"),
    [
        *(("name", name) for name in ("mlflow", "models", "prefect", "remote", "services")),
        *(("domains.*", name) for name in ("average", "instructions", "seed")),
        *(("domains.*", name) for name in ("licences", "provenance")),
    ],
)
def test_names_of_what_lies_there_already_are_refused(place, name):
    with pytest.raises(InputError, match="in the place of something else"):
        validate(recipe_with(place, name))


@pytest.mark.parametrize("remote", ["--help", "-x", "", "a\nb", "a\0b"])
def test_remote_that_is_no_place_is_refused(remote):
    with pytest.raises(InputError, match=r"versions\.remote = .* names no place"):
        validate(recipe_with("versions.remote", remote))


SECRET = "Pl4nted-s3cret"


@pytest.mark.parametrize("place", ["versions.remote", "folder", "domains.letters.expert"])
@pytest.mark.parametrize(
    "address",
    [
        f"https://user:{SECRET}@host/path",
        f"https://{SECRET}@host/path",
        f"ssh://user:{SECRET}@host/path",
        f"s3://key:{SECRET}@bucket/path",
        f"s3://key:ab/cd+{SECRET}@bucket/path",
        f"s3://key:4200{SECRET}/cd@bucket/path",
        f"s3://key:{SECRET}@host:9000/bucket/path",
        f"https://host/path?X-Amz-Signature={SECRET}&x=1",
        f"https://host/path?a=1&token={SECRET}",
    ],
)
def test_secret_in_a_recipe_is_refused_and_not_shown(place, address):
    with pytest.raises(InputError, match="holds a secret") as refused:
        validate(recipe_with(place, address))
    assert place in str(refused.value)
    assert "host/path" in str(refused.value) or "bucket/path" in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("key", ["hf_token", "password", "aws_secret_access_key", "api_key"])
def test_value_of_an_unknown_key_that_is_a_secret_is_not_shown(key):
    with pytest.raises(InputError, match=f"versions.{key} = .*no such key") as refused:
        validate(recipe_with(f"versions.{key}", SECRET))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "place",
    [
        *("/data/a@b", "ssh://me@host/path", "s3://bucket/path", "../remote", "https://host/a"),
        *("s3://host:9000/folder@v1", "ssh://me@host:22/folder@v1/models"),
    ],
)
def test_places_without_secrets_are_remotes(place):
    assert validate(recipe_with("versions.remote", place) | {"compression": None}).versions.remote
