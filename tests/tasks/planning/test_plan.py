"""A plan from config.json alone: of five models of Llama-3.1-8B's shape, on many machines."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace

import httpx
import pytest
import yaml
from forms import change_json, save_adapter, save_bpe_model, save_gguf
from huggingface_hub.errors import RemoteEntryNotFoundError
from pico import pico_config

from infra.cluster.memory import GPU_SHARE
from infra.recipe.resources import WorkerResources
from tasks.planning.machine import Machine, remote_directory
from tasks.planning.parts import CHECKPOINTS, training
from tasks.planning.plan import plan
from tasks.planning.row import gigabytes
from tasks.recipes import validate
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.errors import InputError
from upcycle_core.given.resolve import resolve_model
from upcycle_core.planning import memory, work
from upcycle_core.planning.rates import Rates
from upcycle_core.planning.shape import Shape
from upcycle_core.training.config import ExpertTrainingConfig

DOMAINS = ("law", "code", "history", "music", "art")
WHOLE, FFNS, LAYERS, HIDDEN = 8_030_261_248, 32 * 3 * 4096 * 14336, 32, 4096
GPU = {"gpus": 1}
REQUEST = httpx.Request("GET", "https://hub.example")
HELD = {"streamed": "never"}
FEW = {"steps": 4, "warmup_steps": 1, "gradient_accumulation": 4, "batch_size": 1}
OFTEN = FEW | {"checkpoint_steps": 1}
START = 2
"""Bytes a weight of what a row begins with, in the type of given models."""
BASELINES = {
    "baselines": {"btx": {"method": "btx", "training": FEW}},
    "comparison": {"tokens": 10**6},
}
RATES = Rates(fp32=4e9, bf16=8e9, fp32_one=1e9, bf16_one=2e9, memory=1e10, read=1e9, write=1e9)


def made(tmp_path, llama, *, ready=True, machine=None, **sections):
    """A plan of five experts, ready or trained here."""
    own = {"expert": str(llama)} if ready else {}
    values = {
        "name": "large",
        "domains": {name: {"train": {"files": [f"{name}.txt"]}, **own} for name in DOMAINS},
        "experts": {"training": {"batch_size": 2, "sequence_length": 512, "precision": "bf16"}},
        "statistics": {"precision": "bf16", "batch_size": 4},
        "evaluation": {"precision": "bf16", "batch_size": 4},
        **({} if ready else {"seed_model": {"model": str(llama)}}),
        **sections,
    }
    there = machine or Machine(memory=10**12, cpus=8, disk=10**13)
    return plan(validate(values), tmp_path, there, base=500_000_000)


def rows(found):
    return {row.stage: row for row in found.rows}


def test_what_is_kept_of_ready_experts(tmp_path, llama):
    kept = {stage: row.kept for stage, row in rows(made(tmp_path, llama)).items()}
    assert kept["experts"] == 5 * 2 * WHOLE
    assert kept["backbone"] == 2 * (WHOLE - FFNS)
    assert kept["model"] == 2 * (WHOLE + 4 * FFNS + LAYERS * 5 * HIDDEN)
    triangle = HIDDEN * (HIDDEN + 1) // 2
    assert kept["statistics"] == 5 * LAYERS * (8 * (triangle + HIDDEN) + 8)
    assert kept["router"] == 4 * LAYERS * 5 * HIDDEN


def test_a_report_of_own_rows_is_less_work(tmp_path, llama):
    whole, own = (
        rows(made(tmp_path, llama, evaluation={"tokens": 4096, **asked}))["report"]
        for asked in ({}, {"rows": [], "cross_scores": "own"})
    )
    # Five experts, their average, the MoE and what the oracle puts together; then without two.
    assert (whole.pieces, own.pieces) == (5 + 1 + 2, 5 + 1)
    assert 0 < own.flops < 0.25 * whole.flops  # 10 of 25 + 5 x 6 passes
    assert whole.read - own.read == 2 * WHOLE + rows(made(tmp_path, llama))["model"].kept


def test_hidden_states_lie_in_files_where_a_pass_goes_layer_by_layer(tmp_path, llama):
    report = {"tokens": 4096, "rows": [], "sweep_top_k": [], "sweep_ridge_lambda": []}
    machine = Machine(memory=10**12, cpus=8, disk=10**13)
    asked = {"evaluation": report | {"precision": "bf16"}}
    asked |= {"statistics": {"tokens": 8192, "precision": "bf16", "shards": 1}}
    held, streamed = (
        rows(made(tmp_path, llama, compute={key: {"streamed": how} for key in asked}, **asked))
        for how in ("never", "always")
    )
    before_and_behind = 2 * 2 * HIDDEN
    for stage, tokens in {"report": 5 * 4096, "statistics": 5 * 8192}.items():
        more = streamed[stage].holding(machine) - held[stage].holding(machine)
        assert more == before_and_behind * tokens, stage


def test_a_fitted_head_is_one_tensor_more_of_a_tied_model(tmp_path, llama):
    tied = tmp_path / "tied"
    tied.mkdir()
    config = json.loads((llama / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(config))
    head, repair = 128256 * HIDDEN, {"repair": "down+head_target"}
    merge = {"embeddings": "counts"}
    plain, fitted = (
        rows(made(tmp_path, tied, backbone={"merge": how}, experts=repair))
        for how in (merge, merge | {"head": "fitted"})
    )
    for stage, copies in {"backbone": 1, "repaired": 5, "model": 1, "experts": 0}.items():
        assert fitted[stage].kept - plain[stage].kept == copies * 2 * head, stage
    assert fitted["backbone"].alone > plain["backbone"].memory + 4 * head
    assert plain["backbone"].flops == 0
    assert fitted["backbone"].alone_flops > 6 * 5 * 2 * head * HIDDEN  # one step


def test_the_remote_has_another_copy_and_the_registry_shares_the_newest(tmp_path, llama):
    beside, alone = made(tmp_path, llama), made(tmp_path, llama, versions={"remote": None})
    kept, model = sum(row.kept for row in alone.rows), rows(alone)["model"].kept
    assert alone.disk == kept
    assert beside.disk == 2 * kept - model  # which is put together again from what is pushed
    assert f"| registry, an older version | {gigabytes(model)} |" in alone.places()


def test_a_full_disk_is_said_with_what_each_setting_leaves_to_come(tmp_path, llama):
    machine = Machine(memory=10**12, cpus=8, disk=100 * 10**9)
    remedy = faults(made(tmp_path, llama, machine=machine))["disk"][1]
    elsewhere = made(tmp_path, llama, versions={"remote": "s3://models/here"})
    assert f"versions.remote on another disk (then {gigabytes(elsewhere.disk_to_come)})" in remedy
    linked = made(tmp_path, llama, versions={"given_weights": "link"})
    assert f"versions.given_weights = link (then {gigabytes(linked.disk_to_come)})" in remedy
    for versions, left in (({"given_weights": "link"}, "link"), ({"remote": None}, "remote")):
        found = made(tmp_path, llama, machine=machine, versions=versions)
        assert left not in faults(found)["disk"][1]


def test_a_remote_whose_server_is_away_keeps_nobody_from_a_plan(tmp_path, monkeypatch):
    """A night does its work all the same; what is missing there is pushed when it is back."""
    there, stat = tmp_path / "away" / "remote", os.stat

    def away(path, **options):
        if "away" in str(path):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", away)
    assert Machine.here(tmp_path, 8, there).remote_disk is None


def test_a_remote_on_another_disk_has_its_copies_there(tmp_path, llama, monkeypatch):
    (tmp_path / "big").mkdir()
    disks = {tmp_path / "big": 2}
    monkeypatch.setattr("tasks.planning.machine.device_of", lambda path: disks.get(path, 1))

    def planned(remote):
        place = remote_directory(remote, tmp_path)
        there = replace(Machine.here(tmp_path, 8, place), memory=10**12, disk=10**13)
        return made(tmp_path, llama, machine=there, versions={"remote": remote})

    alone, beside, apart = (planned(to) for to in (None, "remote", str(tmp_path / "big")))
    assert beside.disk - alone.disk == apart.pushed_to_come > 0
    assert (apart.disk, apart.disk_to_come) == (alone.disk, alone.disk_to_come)
    assert f"| DVC's remote | {gigabytes(apart.pushed_to_come)} on another disk |" in apart.places()
    need = apart.pushed_to_come
    enough, full = (replace(apart.machine, remote_disk=free) for free in (need, need - 1))
    assert not faults(replace(apart, machine=enough))
    full = replace(apart, machine=full)
    assert set(faults(full)) == {"versions.remote"}
    assert {fault.field for fault in full.faults(is_local=False)} == {"versions.remote"}


@pytest.mark.parametrize("free", [None, 1])
def test_without_a_remote_nothing_is_counted_for_one(tmp_path, llama, free):
    machine = Machine(memory=10**12, cpus=8, disk=10**13, remote_disk=free)
    found = made(tmp_path, llama, machine=machine, versions={"remote": None})
    assert (found.pushed_to_come, faults(found)) == (0, {})
    assert "| DVC's remote | none |" in found.places()
    assert "remote" not in found.summary()
    full = replace(found, machine=replace(machine, disk=1))
    assert "remote" not in faults(full)["disk"][1]


def test_linked_experts_are_on_the_disk_already(tmp_path, llama):
    copied = made(tmp_path, llama)
    linked = made(tmp_path, llama, versions={"given_weights": "link"})
    assert copied.disk - linked.disk == 5 * 2 * WHOLE
    assert copied.disk_to_come - linked.disk_to_come == 5 * 2 * WHOLE
    assert rows(linked)["experts"].kept == rows(linked)["experts"].pushed == 5 * 2 * WHOLE
    assert "| hard links to given models | 80.3 GB |" in linked.places()
    assert "hard links to given" not in copied.places()


def test_experts_on_another_disk_are_copied(tmp_path, llama, monkeypatch):
    monkeypatch.setattr("tasks.planning.plan._is_near", lambda model, home: False)
    found = made(tmp_path, llama, versions={"given_weights": "link"})
    assert found.disk == made(tmp_path, llama).disk


def test_training_whole_needs_sixteen_bytes_a_parameter(tmp_path, llama):
    experts = rows(made(tmp_path, llama, ready=False))["experts"]
    assert 16 * WHOLE < experts.memory < 16.5 * WHOLE
    assert experts.kept == 5 * 4 * WHOLE


def test_an_expert_with_new_text_is_planned_as_it_is_continued(tmp_path, llama):
    training = {"method": "lora", "steps": 100, "batch_size": 2, "sequence_length": 512}
    continued = {**training, "steps": 50, "warmup_steps": 10, "method": "full"}
    usual = rows(made(tmp_path, llama, ready=False, experts={"training": training}))
    learning = {"experts": {"training": training, "continued": continued}}
    learning["lineage"] = {"parents": {"law": "0" * 64}}
    found = rows(made(tmp_path, llama, ready=False, **learning))
    assert usual["experts"].memory < 4 * WHOLE
    assert found["experts"].memory > 16 * WHOLE
    assert found["experts"].kept == (4 * 2 + 4) * WHOLE  # merged in bf16, or whole in fp32
    assert usual["backbone"].kept == 2 * (WHOLE - FFNS)
    assert found["backbone"].kept == 4 * (WHOLE - FFNS)
    # Half as many steps, with gradients of the weights: a forward pass, and two of its size.
    assert found["experts"].flops == pytest.approx((4 + 0.5 * 3 / 2) / 5 * usual["experts"].flops)
    small = Machine(memory=64 * 10**9, cpus=8, disk=10**13)
    refused = made(tmp_path, llama, ready=False, machine=small, **learning)
    assert "experts.continued.method = lora" in faults(refused)["compute.experts"][1]


def test_checkpoints_lie_beside_the_trainings_that_run(tmp_path, llama):
    checkpoints = CHECKPOINTS * 12 * WHOLE
    for cpus, together in ((8, 5), (2, 2), (1, 1)):
        there = Machine(memory=10**12, cpus=cpus, disk=10**13)
        found = made(tmp_path, llama, ready=False, machine=there, versions={"remote": None})
        experts = rows(found)["experts"]
        assert experts.holding(there) == together * checkpoints
        assert experts.writes >= 5 * checkpoints / CHECKPOINTS
    seed, kept = rows(found)["seed"].kept, rows(found)["experts"].kept
    assert found.disk_to_come == seed + kept + checkpoints
    free = replace(there, disk=found.disk_to_come)
    full = replace(found, machine=free)
    assert not [fault for fault in full.faults() if fault.field == "disk"]
    # Of a cluster it is not known how many run at once.
    assert "disk" in {fault.field for fault in full.faults(is_local=False)}


def test_every_row_of_a_comparison_that_runs_has_checkpoints(tmp_path, llama):
    two = {name: {"method": "btx", "training": OFTEN} for name in ("one", "two")}
    for cpus in (1, 2):
        there = Machine(memory=10**13, cpus=cpus, disk=10**14)
        found = made(tmp_path, llama, machine=there, **BASELINES | {"baselines": two})
        whole = WHOLE + 4 * FFNS + LAYERS * 5 * HIDDEN
        assert rows(found)["baselines"].holding(there) == cpus * (CHECKPOINTS * 12 + START) * whole


def test_what_deltas_are_trained_of_is_planned(tmp_path, llama):
    """A universal FFN of its own is a whole FFN more; what is frozen has no moments."""
    training = {"steps": 10, "warmup_steps": 0, "batch_size": 1, "sequence_length": 16}

    def planned(universal, trainable):
        ders = {"codec": "low_rank", "rank": 4, "universal": universal, "combine": "sum"}
        row = {"method": "ders", "copies": 4, "top_k": 1, "training": training, "ders": ders}
        rival = {**row, "objective": {"trainable": trainable, "balance_coefficient": 0.01}}
        seed = {"model": str(llama)}
        return rows(made(tmp_path, llama, baselines={"rival": rival}, seed_model=seed))["baselines"]

    none, own, delta = (planned(how, ["all"]) for how in ("none", "own", "delta"))
    assert own.kept - none.kept == 4 * FFNS
    assert 0 < delta.kept - none.kept < 0.01 * 4 * FFNS
    assert own.memory - none.memory == pytest.approx(16 * FFNS)
    assert own.memory > 16 * (WHOLE + FFNS)
    router = planned("own", ["router"])
    assert 4 * (WHOLE + FFNS) < router.memory < own.memory - 11 * (WHOLE + FFNS)
    based = planned("own", ["router", "shared_base"])
    assert based.memory - router.memory == pytest.approx(12 * FFNS, rel=0.01)


def test_the_best_checkpoint_lies_beside_the_newest_two(tmp_path, llama):
    best = OFTEN | {"keep": "best", "evaluation_steps": 4}
    row = {"method": "btx", "training": best}
    found = rows(made(tmp_path, llama, **BASELINES | {"baselines": {"btx": row}}))["baselines"]
    assert found.each == (4 * 12 + START) * (WHOLE + 4 * FFNS + LAYERS * 5 * HIDDEN)


@pytest.mark.parametrize(("steps", "count"), [(4, 1), (3, 2), (2, 2), (1, 3)])
def test_no_more_checkpoints_lie_there_than_are_written(tmp_path, llama, steps, count):
    """Of four steps; the last one is always written."""
    own = FEW | {"checkpoint_steps": steps}
    best = own | {"keep": "best", "evaluation_steps": steps, "sequence_length": 512}
    sections = {
        "experts": {"training": own},
        "baselines": {"btx": {"method": "btx", "training": best}},
        "comparison": {"tokens": 5 * 4 * 4 * 1024 + 4 * 4 * 512},  # experts count too
    }
    found = rows(made(tmp_path, llama, ready=False, **sections))
    assert found["experts"].each == count * 12 * WHOLE
    written = -(-4 // steps)
    assert found["experts"].writes == 5 * (4 + written * 12) * WHOLE
    mixture = WHOLE + 4 * FFNS + LAYERS * 5 * HIDDEN
    kept = count + (steps == 1)  # the best one, apart from those that are the newest
    assert found["baselines"].each == (kept * 12 + 4) * mixture


def test_moments_in_bf16_are_written_as_such(tmp_path, llama):
    narrow = OFTEN | {"optimizer_state": "bf16", "adam_beta1": 0.9, "adam_beta2": 0.95}
    row = {"method": "btx", "training": narrow}
    found = rows(made(tmp_path, llama, **BASELINES | {"baselines": {"btx": row}}))["baselines"]
    assert found.each == (CHECKPOINTS * 8 + START) * (WHOLE + 4 * FFNS + LAYERS * 5 * HIDDEN)


def test_shards_of_the_domains_that_run_lie_beside_their_sums(tmp_path, llama):
    for cpus, shards, files in ((8, 2, 10), (1, 2, 2), (2, 3, 6)):
        there = Machine(memory=10**12, cpus=cpus, disk=10**13)
        statistics = {"shards": shards, "precision": "bf16"}
        row = rows(made(tmp_path, llama, machine=there, statistics=statistics))["statistics"]
        assert row.holding(there) == files * row.kept // 5
        assert row.writes == (1 + shards) * row.kept


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_given_experts_beside_trained_ones_get_their_type(tmp_path, llama, dtype):
    domains = {name: {"train": {"files": [f"{name}.txt"]}} for name in DOMAINS}
    domains["law"]["expert"] = str(llama)
    experts = {"dtype": dtype, "training": {"batch_size": 2, "sequence_length": 512}}
    sections = {"domains": domains, "seed_model": {"model": str(llama)}, "experts": experts}
    found = rows(made(tmp_path, llama, **sections))
    assert found["experts"].kept == 5 * 4 * WHOLE
    assert found["seed"].kept == 4 * WHOLE
    assert found["backbone"].kept == 4 * (WHOLE - FFNS)
    assert found["experts"].holding(None) == 4 * CHECKPOINTS * 12 * WHOLE  # none of the given one


@pytest.mark.parametrize(("dtype", "size"), [("auto", 2), ("fp16", 2), ("fp32", 4)])
def test_given_experts_get_the_type_that_is_asked_for(tmp_path, llama, dtype, size):
    found = made(tmp_path, llama, experts={"dtype": dtype}, versions={"given_weights": "link"})
    of = rows(found)
    assert of["experts"].kept == 5 * size * WHOLE
    assert of["model"].kept == size * (WHOLE + 4 * FFNS + LAYERS * 5 * HIDDEN)
    assert of["experts"].linked == (5 * 2 * WHOLE if dtype == "auto" else 0)


def test_given_models_are_planned_in_the_narrowest_type_that_holds_all(tmp_path, llama):
    """That of the widest, whichever comes first; bf16 and fp16 are both held by fp32 alone."""
    config, models = json.loads((llama / "config.json").read_text()), {}
    for name in ("bfloat16", "float16", "float32"):
        models[name] = tmp_path / name
        models[name].mkdir()
        (models[name] / "config.json").write_text(json.dumps(config | {"torch_dtype": name}))

    def planned(seed, *types, **versions):
        own = {
            domain: {"train": {"files": ["text.txt"]}, "expert": str(models[name])}
            for domain, name in zip(DOMAINS, types, strict=False)
        }
        seed = {"model": str(models[seed])} if seed else {}
        sections = {"domains": own, "seed_model": seed, "versions": versions}
        return rows(made(tmp_path, llama, **sections))

    bf16, fp16, fp32 = models
    for types, size in (((bf16, bf16), 2), ((bf16, fp32), 4), ((bf16, fp16), 4)):
        assert planned(None, *types)["experts"].kept == 2 * size * WHOLE
    found = planned(fp32, bf16, bf16, given_weights="link")
    assert (found["seed"].kept, found["experts"].kept) == (4 * WHOLE, 2 * 4 * WHOLE)
    assert (found["seed"].linked, found["experts"].linked) == (4 * WHOLE, 0)
    assert planned(bf16, bf16, fp32)["seed"].kept == 4 * WHOLE


def test_adapters_and_gguf_files_beside_a_seed_are_planned_without_being_made(
    tmp_path, llama, monkeypatch
):
    """An adapter of the hub has no config.json; its type is its base's."""

    def none(repository, name, **options):
        raise RemoteEntryNotFoundError("404", response=httpx.Response(404, request=REQUEST))

    def make(*_):
        raise AssertionError("it is converted or merged")

    monkeypatch.setattr("tasks.planning.subjects.hf_hub_download", none)
    monkeypatch.setattr("tasks.planning.subjects.given_model", make)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    experts = (str(adapter), "our-org/medicine-lora", str(tmp_path / "expert.gguf"))
    own = {
        domain: {"train": {"files": ["text.txt"]}, "expert": expert}
        for domain, expert in zip(DOMAINS, experts, strict=False)
    }
    sections = {"domains": own, "seed_model": {"model": str(llama)}}
    assert rows(made(tmp_path, llama, **sections))["experts"].kept == 3 * 2 * WHOLE


def test_an_adapter_of_the_hub_is_planned_from_the_base_that_it_names(tmp_path, llama, monkeypatch):
    """Of its repository a small file is fetched; a base that is an adapter too is said."""
    names = {"our-org/lora": str(llama), "our-org/loop": "our-org/loop"}

    def fetch(repository, name, *, cache_dir):
        if name != "adapter_config.json" or repository not in names:
            raise RemoteEntryNotFoundError("404", response=httpx.Response(404, request=REQUEST))
        cache_dir.mkdir(parents=True, exist_ok=True)
        (cache_dir / name).write_text(json.dumps({"base_model_name_or_path": names[repository]}))
        return str(cache_dir / name)

    monkeypatch.setattr("tasks.planning.subjects.hf_hub_download", fetch)

    def planned(expert):
        experts = dict.fromkeys(DOMAINS, str(llama)) | {"art": expert}
        own = {d: {"train": {"files": ["text.txt"]}, "expert": experts[d]} for d in DOMAINS}
        return rows(made(tmp_path, llama, domains=own, seed_model={}))["experts"].kept

    assert planned("our-org/lora") == planned(str(llama))
    for reference in ("our-org/loop", "our-org/absent"):
        said = f"domains.art.expert = '{reference}': its config.json is neither"
        with pytest.raises(InputError, match=said):
            planned(reference)


@pytest.mark.parametrize("matrices", ["Q8_0", "F16"])
def test_the_first_model_may_be_a_gguf_file_and_another_its_adapter(
    tmp_path, monkeypatch, matrices
):
    """Planned from headers: what they become is what is planned, and nothing becomes it yet."""
    dense = save_bpe_model(tmp_path / "dense", ["alpha beta"] * 9)
    file = save_gguf(tmp_path / "model.gguf", dense, matrices=matrices)
    made_of = resolve_model(str(file), tmp_path / "cache")
    adapter, _ = save_adapter(tmp_path / "adapter", dense)
    change_json(adapter / "adapter_config.json", base_model_name_or_path=str(file))
    monkeypatch.setattr("tasks.planning.subjects.given_model", None)
    short = {name: {"sequence_length": 64} for name in ("statistics", "evaluation")}
    short["statistics"]["window"] = None
    for given in (file, adapter):
        other = tmp_path / f"other-{given.name}"
        shutil.copytree(given, other) if given.is_dir() else shutil.copyfile(given, other)
        own = {
            name: {"train": {"files": ["a.txt"]}, "expert": str(expert)}
            for name, expert in {"a": given, "b": other}.items()
        }
        found = plan(
            validate({"name": "small", "domains": own, **short}),
            tmp_path / "new",
            Machine(memory=10**12, cpus=8, disk=10**13),
            base=500_000_000,
        )
        stored = Shape.of(made_of).stored
        assert rows(found)["experts"].kept == 2 * stored
        # What is converted and merged lies beside the workspace; of adapters, with their base.
        cached = (2 if given == file else 3) * stored
        assert rows(found)["sources"].cached == pytest.approx(cached, rel=0.01)
        assert "| models, as safetensors beside it |" in found.places()
    assert not (tmp_path / "new").exists()


def test_a_model_that_two_domains_name_is_refused(tmp_path, llama):
    """Where there is a config.json alone, it stands for models that are to come."""
    file = save_gguf(tmp_path / "one.gguf", save_bpe_model(tmp_path / "dense", ["alpha beta"] * 9))
    for given in (file, tmp_path / "dense"):
        own = {
            name: {"train": {"files": ["a.txt"]}, "expert": str(given)} for name in ("a", "b", "c")
        }
        with pytest.raises(InputError) as found:
            made(tmp_path, llama, domains=own)
        said = [str(fault) for fault in found.value.faults if "same model" in fault.remedy]
        assert said == [
            f"domains.{name}.expert = '{given}': is the same model as domains.a.expert; "
            "give each model once"
            for name in ("b", "c")
        ]


def test_models_in_the_cache_are_not_to_come(tmp_path, llama, monkeypatch):
    monkeypatch.setattr("upcycle_core.checkpoints.known.SETTLED_NS", -(10**12))
    dense = save_bpe_model(tmp_path / "dense", ["alpha beta"] * 9)
    file = save_gguf(tmp_path / "one.gguf", dense)
    adapter, _ = save_adapter(tmp_path / "adapter", dense)
    own = {
        name: {"train": {"files": ["a.txt"]}, "expert": str(given)}
        for name, given in {"a": file, "b": adapter}.items()
    }
    short = {name: {"sequence_length": 64} for name in ("statistics", "evaluation")}
    short["statistics"]["window"] = None

    def planned(**versions):
        values = {"domains": own, "seed_model": {"model": str(dense)}, "versions": versions}
        return made(tmp_path, llama, ready=False, **values, **short)

    before = planned()
    cached = [resolve_model(str(given), tmp_path / "models") for given in (file, adapter)]
    sizes = [sum(f.stat().st_size for f in one.glob("*.safetensors")) for one in cached]
    assert rows(before)["sources"].cached == pytest.approx(sum(sizes), rel=0.05)
    after = planned()
    assert before.disk == after.disk
    assert before.disk_to_come - after.disk_to_come == rows(before)["sources"].cached
    types = {reader: Shape.of(reader).dtype for reader in (*cached, dense)}
    linked = rows(planned(given_weights="link"))
    same = [one for one in cached if types[one] == types[dense]]
    assert linked["experts"].linked == len(same) * Shape.of(dense).stored > 0


def faults(found):
    return {fault.field: (str(fault.value), fault.remedy) for fault in found.faults()}


def test_all_limits_are_named_at_once_with_what_would_fit(tmp_path, llama):
    small = Machine(memory=40 * 10**9, cpus=8, disk=10**11)
    compute = dict.fromkeys(("statistics", "evaluation"), HELD)
    found = faults(made(tmp_path, llama, ready=False, machine=small, compute=compute))
    assert set(found) == {"compute.experts", "compute.statistics", "compute.evaluation", "disk"}
    assert "experts.training.method = lora" in found["compute.experts"][1]
    said, remedy = found["compute.statistics"]
    assert "8 x" in said
    threads = int(remedy.rpartition("compute.statistics.cpus = ")[2])
    compute["statistics"] = {**HELD, "cpus": threads}
    fits = faults(made(tmp_path, llama, ready=False, machine=small, compute=compute))
    assert "compute.statistics" not in fits
    assert set(found) - set(fits) == {"compute.statistics"}
    reserved = int(re.search(r"compute\.statistics\.memory = (\d+)", remedy)[1])
    compute["statistics"] = {**HELD, "memory": reserved}
    fits = faults(made(tmp_path, llama, ready=False, machine=small, compute=compute))
    assert set(found) - set(fits) == {"compute.statistics"}


def test_a_gpu_is_asked_for_what_it_holds(tmp_path, llama):
    compute = dict.fromkeys(("statistics", "evaluation"), GPU)
    common = {"memory": 64 * 10**9, "cpus": 16, "disk": 10**13}
    one, tight, small = (Machine(**common, gpus=1, gpu_memory=gb * 10**9) for gb in (80, 65, 48))
    assert not faults(made(tmp_path, llama, machine=one, compute=compute))
    assert not faults(made(tmp_path, llama, machine=small, compute=compute))
    held = {**compute, "evaluation": {**GPU, **HELD}}
    found = faults(made(tmp_path, llama, machine=small, compute=held))
    assert set(found) == {"compute.evaluation"}  # 61 GB of weights
    assert "GPU memory" in found["compute.evaluation"][0]
    assert "compute.evaluation.streamed = auto" in found["compute.evaluation"][1]
    found = faults(made(tmp_path, llama, machine=tight, compute=held))
    assert "62.7 GB of GPU memory, there are 59.8 GB to plan with" in found["compute.evaluation"][0]
    none = faults(made(tmp_path, llama, machine=Machine(**common), compute=compute))
    lacking = ("1", "Ray has 0 in all; ask for less, or start Ray with more")
    assert [none[f"compute.{kind}.gpus"] for kind in compute] == [lacking, lacking]


def test_cores_gpus_and_memory_that_the_machine_has_not_are_refused_with_all_else(tmp_path, llama):
    compute = {"statistics": {"cpus": 12}, "experts": {"gpus": 1, "workers": 2}}
    compute["assembly"] = {"memory": 2 * 10**9}
    small = Machine(memory=10**9, cpus=8, disk=10**9, gpus=1, gpu_memory=10**9)
    sections = {"compute": compute, "experts": {"training": FEW}}
    found = made(tmp_path, llama, ready=False, machine=small, **sections)
    said = {field: value for field, (value, _) in faults(found).items()}
    assert (said["compute.statistics.cpus"], said["compute.experts.gpus"]) == ("12", "2")
    assert said["compute.assembly.memory"] == str(2 * 10**9)
    assert {"disk", "compute.experts", "compute.statistics"} <= set(said)
    assert {fault.field for fault in found.faults(is_local=False)} == {"disk"}
    enough = replace(found, machine=replace(small, cpus=12, gpus=2, memory=2 * 10**9))
    counted = (".cpus", ".gpus", ".memory")
    assert not [field for field in faults(enough) if field.endswith(counted)]


def test_a_gpu_is_shared_by_those_that_run_at_once(tmp_path, llama):
    compute = {"statistics": GPU, "evaluation": {**HELD, "gpus": 0.5}}
    common = {"memory": 64 * 10**9, "disk": 10**13, "gpus": 1, "gpu_memory": 80 * 10**9}
    several, one = (Machine(**common, cpus=cpus) for cpus in (16, 1))
    said, remedy = faults(made(tmp_path, llama, machine=several, compute=compute))[
        "compute.evaluation"
    ]
    assert "2 x 62.7 GB of GPU memory" in said
    assert "compute.evaluation.gpus = 1" in remedy
    alone = {**compute, "evaluation": {**compute["evaluation"], "gpus": 1}}
    assert not faults(made(tmp_path, llama, machine=several, compute=alone))
    plan = made(tmp_path, llama, machine=one, compute=compute)
    assert not faults(plan)  # there is one core: one piece after the other
    assert plan.gpu_memory < 80 * 10**9


def test_a_seed_that_does_not_fit_is_not_told_of_experts(tmp_path, llama):
    small = Machine(memory=10**9, cpus=8, disk=10**13)
    found = faults(made(tmp_path, llama, ready=False, machine=small, seed_model={}))
    _, remedy = found["compute.seed"]
    assert "seed_model.training.batch_size = 1" in remedy
    assert "compute.seed.sharding = full" in remedy
    assert "experts" not in remedy
    assert "method" not in remedy


@pytest.mark.parametrize(
    ("gpu", "workers", "said"),
    [
        (80, 1, ["experts.training.method = lora", "compute.experts.workers = 4 and sharding"]),
        (160, 2, ["compute.experts.workers = 2 and sharding"]),
        (20, 1, ["experts.training.gradient_checkpointing = true and", "accumulation = 8"]),
    ],
)
def test_each_setting_that_is_named_makes_a_training_fit(tmp_path, llama, gpu, workers, said):
    machine = Machine(10**12, 64, 10**13, gpus=4, gpu_memory=gpu * 10**9)
    full = {"batch_size": 2, "sequence_length": 512, "gradient_accumulation": 4}
    compute = {"experts": {"gpus": 1, "workers": workers}}

    def of(training, compute):
        sections = {"experts": {"training": training}, "compute": {"experts": compute}}
        return faults(made(tmp_path, llama, ready=False, machine=machine, **sections))

    _, remedy = of(full, compute["experts"])["compute.experts"]
    for beginning in said:
        assert beginning in remedy
    for setting in remedy.split(" or "):
        if "several machines" in setting:
            continue
        changes = dict(re.findall(r"(\w+) = (\w+)", setting))
        parsed = {name: yaml.safe_load(value) for name, value in changes.items()}
        mine = {name: parsed[name] for name in parsed if name in ("workers", "sharding")}
        rest = {name: parsed[name] for name in parsed if name not in mine}
        assert "compute.experts" not in of(full | rest, compute["experts"] | mine), setting


@pytest.mark.parametrize("memory", [500, 110])
def test_each_setting_that_is_named_makes_all_fit_that_runs_side_by_side(tmp_path, llama, memory):
    machine = Machine(memory * 10**9, 32, 10**13)
    full = {"batch_size": 1, "sequence_length": 512, "gradient_checkpointing": True}

    def of(training, **resources):
        sections = {"experts": {"training": training}, "compute": {"experts": resources}}
        return faults(made(tmp_path, llama, ready=False, machine=machine, **sections))

    said, remedy = of(full)["compute.experts"]
    assert said.startswith("experts: 5 x")
    settings = [one for one in remedy.split(" or ") if "several machines" not in one]
    assert len(settings) > 1
    for setting in settings:
        changes = dict(re.findall(r"(\w+) = (\w+)", setting))
        parsed = {name: yaml.safe_load(value) for name, value in changes.items()}
        mine = {name: parsed.pop(name) for name in ("cpus", "memory") if name in parsed}
        assert "compute.experts" not in of(full | parsed, **mine), setting


def test_workers_that_are_named_fit_with_the_accumulation_that_they_share(tmp_path, llama):
    machine = Machine(10**12, 64, 10**13, gpus=8, gpu_memory=80 * 10**9)
    training = {"batch_size": 2, "sequence_length": 512, "gradient_checkpointing": True}

    def of(**workers):
        compute = {"experts": {"gpus": 1, **workers}}
        own = {"training": {**training, "gradient_accumulation": workers.get("workers", 1)}}
        sections = {"experts": own, "compute": compute}
        return faults(made(tmp_path, llama, ready=False, machine=machine, **sections))

    _, remedy = of()["compute.experts"]
    count = int(re.search(r"workers = (\d+) and sharding", remedy)[1])
    assert "compute.experts" not in of(workers=count, sharding="full")


def test_workers_that_shared_a_gpu_have_one_each_where_more_divide_it(tmp_path, llama):
    machine = Machine(10**12, 64, 10**13, gpus=4, gpu_memory=160 * 10**9)
    training = {"batch_size": 1, "sequence_length": 512, "gradient_checkpointing": True}
    training["gradient_accumulation"] = 4

    def of(**workers):
        sections = {"experts": {"training": training}, "compute": {"experts": workers}}
        return faults(made(tmp_path, llama, ready=False, machine=machine, **sections))

    _, remedy = of(gpus=0.5)["compute.experts"]
    assert "compute.experts.workers = 4 and sharding = full and gpus = 1 (then" in remedy
    assert "compute.experts" not in of(gpus=1, workers=4, sharding="full")


def test_workers_are_named_with_what_else_they_need(tmp_path, llama):
    """Two that divide a training hold too much still, for what a batch keeps."""
    machine = Machine(10**12, 64, 10**13, gpus=2, gpu_memory=120 * 10**9)
    training = {"batch_size": 16, "sequence_length": 1024, "gradient_accumulation": 2}

    def of(compute=None, **more):
        compute = {"experts": {"gpus": 1, **(compute or {})}}
        sections = {"experts": {"training": training | more}, "compute": compute}
        return faults(made(tmp_path, llama, ready=False, machine=machine, **sections))

    _, remedy = of()["compute.experts"]
    setting = "workers = 2 and sharding = full and experts.training.gradient_checkpointing = true"
    assert f"compute.experts.{setting} (then" in remedy
    two = {"workers": 2, "sharding": "full"}
    assert "compute.experts" in of(two)
    assert "compute.experts" not in of(two, gradient_checkpointing=True)


@pytest.mark.parametrize(
    ("kind", "section", "memory"),
    [("evaluation", "evaluation", 80), ("statistics", "statistics", 40)],
)
def test_each_setting_that_is_named_makes_a_pass_over_text_fit(
    tmp_path, llama, kind, section, memory
):
    """In a GPU, where all of it is held."""
    common = {"memory": 500 * 10**9, "cpus": 16, "disk": 10**13}
    machine = Machine(**common, gpus=1, gpu_memory=memory * 10**9)

    def of(**changes):
        own = {"precision": "bf16", "batch_size": 256, "sequence_length": 1024} | changes
        sections = {section: own, "compute": {kind: GPU | HELD}}
        return faults(made(tmp_path, llama, machine=machine, **sections)).get(f"compute.{kind}")

    _, remedy = of()
    rows_at_once = int(re.search(rf"{section}\.batch_size = (\d+)", remedy)[1])
    assert 1 < rows_at_once < 256
    assert of(batch_size=rows_at_once) is None
    assert of(batch_size=2 * rows_at_once) is not None
    assert "precision" not in remedy  # it is bf16
    _, remedy = of(precision="fp32", batch_size=1) or ("", "")
    assert ("precision = bf16" in remedy) == (kind == "evaluation")  # 32 GB fit, 122 do not


def test_an_adapter_of_layers_that_are_not_there_is_refused(tmp_path, llama):
    training = {**FEW, "method": "lora", "lora": {"modules": ["q_prj"]}}
    with pytest.raises(InputError, match=r"training\.lora\.modules.* did you mean q_proj\?"):
        made(tmp_path, llama, ready=False, experts={"training": training})


def test_a_method_without_a_plan_is_refused(tmp_path, llama, monkeypatch):
    monkeypatch.setattr("tasks.planning.plan.ROWS", {})
    with pytest.raises(InputError, match="can be planned so far"):
        made(tmp_path, llama)


def test_a_cluster_s_machines_are_not_asked_but_its_disk_is(tmp_path, llama):
    found = made(tmp_path, llama, machine=Machine(memory=1, cpus=8, disk=1))
    assert {fault.field for fault in found.faults(is_local=False)} == {"disk"}
    assert "compute.evaluation" in faults(found)


def test_what_does_not_fit_goes_layer_by_layer(tmp_path, llama):
    small = Machine(memory=24 * 10**9, cpus=4, disk=10**13)
    found = made(tmp_path, llama, machine=small, compute={"evaluation": {"cpus": 4}})
    assert not faults(found)
    report = rows(found)["report"].memory
    layer = 2 * 5 * FFNS // LAYERS  # five experts' FFNs, put together
    assert layer < report < 3 * layer
    held = {"evaluation": {"cpus": 4, **HELD}}
    assert rows(made(tmp_path, llama, machine=small, compute=held))["report"].memory > 2 * 5 * FFNS


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tasks_are_scored_by_models_that_are_held_whole(tmp_path, llama, precision):
    small = Machine(memory=24 * 10**9, cpus=4, disk=10**13)
    tasks = {"tasks": {"words": {"heldout": "last_word", "domain": "law"}}}
    tasks["task_evaluation"] = {"precision": precision}
    found = made(tmp_path, llama, machine=small, **tasks)
    needed = rows(found)["task_scores"].memory
    width = {"fp32": 4, "bf16": 2}[precision]
    assert width * 5 * FFNS <= needed < width * (WHOLE + 4 * FFNS) + 10**6
    assert rows(found)["report"].memory < 0.1 * needed
    assert set(faults(found)) == {"compute.evaluation"}
    assert ("precision = bf16" in faults(found)["compute.evaluation"][1]) == (precision == "fp32")
    assert found.seconds is None
    line = replace(found, rates=RATES).line()
    assert re.search(r"time \d[^,]* \(scaled\), and more: not known of every stage$", line)
    # The average of all is put together beside the models that are there.
    assert rows(found)["task_scores"].passing == 2 * WHOLE


def test_a_model_that_one_gpu_cannot_hold_for_tasks_is_divided_among_so_many(tmp_path, llama):
    common = {"memory": 10**12, "cpus": 64, "disk": 10**13, "gpu_memory": 24 * 10**9}
    tasks = {"tasks": {"words": {"heldout": "last_word", "domain": "law"}}}
    tasks["task_evaluation"] = {"precision": "bf16"}
    said, held = {}, {}
    for there in (3, 8):
        machine = Machine(**common, gpus=there)
        for asked in (None, 1, 3, 4):
            compute = {"evaluation": GPU, "statistics": GPU}
            compute |= {"task_evaluation": {"gpus": asked}} if asked else {}
            found = made(tmp_path, llama, machine=machine, compute=compute, **tasks)
            said[there, asked] = {key: remedy for key, (_, remedy) in faults(found).items()}
            held[asked] = rows(found)["task_scores"].memory
    weights = 2 * (WHOLE + 4 * FFNS)
    assert held[None] == held[1] == weights
    assert weights / 4 < held[4] < 0.6 * weights / 2
    assert held[4] < GPU_SHARE * common["gpu_memory"] < held[3]
    assert "compute.task_evaluation.gpus = 4" in said[8, None]["compute.evaluation"]
    for asked in (1, 3):
        assert "compute.task_evaluation.gpus = 4" in said[8, asked]["compute.task_evaluation"]
        assert ".gpus" not in said[3, asked]["compute.task_evaluation"]
    assert not said[8, 4]
    assert said[3, 4].keys() == {"compute.task_evaluation.gpus"}


def test_a_comparison_goes_layer_by_layer_where_all_its_models_can(tmp_path, llama):
    small = Machine(memory=24 * 10**9, cpus=4, disk=10**13)
    there = {"machine": small, "compute": {"evaluation": {"cpus": 4}}}
    needed = {}
    for method in ("btx", "branch-train-merge", "bam"):
        row = {"method": method} | ({} if method.startswith("branch") else {"training": FEW})
        found = made(tmp_path, llama, baselines={"row": row}, comparison={"tokens": 10**6}, **there)
        needed[method] = rows(found)["comparison"].memory
    layer = 2 * 5 * FFNS // LAYERS
    assert layer < needed["btx"] < 3 * layer
    assert needed["branch-train-merge"] < needed["bam"]  # one dense model, mapped; all experts
    assert needed["bam"] > 2 * 5 * FFNS


def test_all_workers_of_a_training_are_on_the_machine(tmp_path, llama):
    training = {"experts": {"training": FEW}}

    def of(stage="experts", kind="experts", **resources):
        compute = {kind: resources}
        found = made(tmp_path, llama, ready=False, compute=compute, **training, **BASELINES)
        return found, rows(found)[stage]

    plan_of_one, one = of()
    plan_of_four, four = of(workers=4)
    _, shared = of(workers=4, sharding="full")
    assert [row.at_once(plan_of_one.machine) for row in (one, four)] == [5, 2]  # 8 cores
    assert four.memory == one.memory + 4 * WHOLE  # gradients that are sent are held twice
    assert plan_of_four.memory == 2 * 4 * (four.memory + plan_of_four.base)
    assert one.memory - 16 * WHOLE < shared.memory - 4 * WHOLE < one.memory - 15 * WHOLE
    assert four.seconds(plan_of_four.machine, RATES) < one.seconds(plan_of_four.machine, RATES)
    row, each = (of("baselines", "baselines", **w)[1] for w in ({}, {"workers": 4}))
    assert each.memory == row.memory + 4 * (WHOLE + 4 * FFNS + LAYERS * 5 * HIDDEN)
    divided = of("baselines", "baselines", workers=4, sharding="full")[1]
    experts = 5 * FFNS // LAYERS
    gathered = 2 * 4 * (experts + 10**9)  # a layer with its gradient, and states for the ends
    held = row.memory - 12 * (WHOLE + 4 * FFNS)  # three quarters of 16 bytes a parameter
    assert held < divided.memory < held + gathered


@pytest.mark.parametrize(
    ("memory", "workers", "fitting"),
    [
        (400, 4, {"workers": 2, "cpus": 4}),  # of five experts two would be side by side
        (700, 6, {"workers": 3, "cpus": 3}),  # four fit, and do not share what six do
        (200, 4, {"workers": 1, "cpus": 8}),
    ],
)
def test_workers_that_fit_are_named_with_what_keeps_others_from_beside_them(
    tmp_path, llama, memory, workers, fitting
):
    small = Machine(memory=memory * 10**9, cpus=8, disk=10**14)
    training = {**FEW, "gradient_accumulation": 12}

    def refusal(**resources):
        sections = {"experts": {"training": training}, "compute": {"experts": resources}}
        found = made(tmp_path, llama, ready=False, machine=small, **sections)
        return faults(found).get("compute.experts", ("", ""))

    said, remedy = refusal(workers=workers)
    assert f"{8 // workers * workers} x" in said
    named = " and ".join(f"{name} = {value}" for name, value in fitting.items())
    assert f"compute.experts.{named}" in remedy
    assert not any(refusal(**fitting))


def test_as_many_workers_as_there_are_are_no_remedy(tmp_path, llama):
    """Two fit, of five experts' two each: fewer at once do."""
    small = Machine(memory=400 * 10**9, cpus=8, disk=10**13)

    def remedy(**resources):
        sections = {"experts": {"training": FEW}, "compute": {"experts": resources}}
        found = faults(made(tmp_path, llama, ready=False, machine=small, **sections))
        return found.get("compute.experts", (None, ""))[1]

    said = remedy(workers=2)
    assert "compute.experts.workers" not in said
    assert "compute.experts.cpus = 4" in said
    assert not remedy(workers=2, cpus=4)


def test_a_division_that_is_set_already_is_no_remedy_for_a_gpu_that_is_shared(tmp_path, llama):
    machine = Machine(10**12, 64, 10**13, gpus=2, gpu_memory=160 * 10**9)
    resources = {"gpus": 0.5, "workers": 2, "sharding": "full"}
    sections = {"experts": {"training": FEW}, "compute": {"experts": resources}}
    found = faults(made(tmp_path, llama, ready=False, machine=machine, **sections))
    said, remedy = found["compute.experts"]
    assert "2 x" in said
    assert "compute.experts.workers = 2" not in remedy
    assert "compute.experts.gpus = 1" in remedy


@pytest.mark.parametrize("own", [False, True])
def test_statistics_read_a_share_of_the_text_or_its_own(tmp_path, llama, own):
    (tmp_path / "train.txt").write_text("x" * 400_000)
    (tmp_path / "calibration.txt").write_text("x" * 100_000)
    domain = {"expert": str(llama), "train": {"files": [str(tmp_path / "train.txt")]}}
    if own:
        domain["calibration"] = {"files": [str(tmp_path / "calibration.txt")]}
    sections = {
        "domains": dict.fromkeys(DOMAINS, domain),
        "statistics": {"tokens": None, "precision": "bf16"},
    }
    found, tokens = rows(made(tmp_path, llama, **sections)), 25_000 if own else 10_000
    length = StatisticsConfig().sequence_length
    shape = Shape.of(llama)
    assert found["statistics"].flops == 5 * work.statistics_flops(shape, tokens, length)
    repaired = rows(made(tmp_path, llama, **sections, experts={"repair": "down"}))["repaired"]
    config = StatisticsConfig(tokens=None, precision="bf16")
    assert repaired.memory == memory.repair_bytes(shape, config, tokens, head=False)
    assert found["documents"].read == 5 * (400_000 + 100_000 * own)


def test_another_machine_is_described_in_words():
    here = Machine(memory=1, cpus=1, disk=1)
    there = here.changed(["memory=24GB", "cpus=2", "disk=1.5 TB", "gpus=1", "gpu_memory=80G"])
    assert there == Machine(24 * 10**9, 2, 1_500_000_000_000, 1, 80 * 10**9)
    as_programs_say = here.changed(["memory=23Gi", "disk=1.5TiB"])
    assert as_programs_say == Machine(23 * 2**30, 1, 3 * 2**39)
    with pytest.raises(InputError, match="ram=24GB") as refusal:
        here.changed(["ram=24GB", "cpus=many"])
    assert "cpus=many" in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["memory=24"], r"memory=24'?: is 24 bytes; give a unit, as 24GB"),
        (["gpus=2"], r"gpus=2'?: say how much memory each has, as gpu_memory=80GB"),
        (["gpus=1", "gpu_memory=80"], r"is 80 bytes; give a unit, as 24GB"),
        ([f"memory={'9' * 400}"], r"memory=9+\.*'?: is more than any machine has"),
    ],
)
def test_a_machine_that_is_half_described_is_refused(changes, said):
    with pytest.raises(InputError, match=said):
        Machine(memory=1, cpus=1, disk=1).changed(changes)


@pytest.mark.parametrize("change", ["cpus=8GB", "cpus=1.9", "gpus=0.5", "gpus=1k", "cpus="])
def test_what_a_machine_counts_is_a_whole_number(change):
    name = change.partition("=")[0]
    said = rf"{change}'?: {name} is a whole number without a unit, as {name}=2"
    with pytest.raises(InputError, match=said):
        Machine(memory=1, cpus=1, disk=1).changed([change, "gpu_memory=80GB"])


def test_a_machine_may_be_without_gpus_but_not_without_cpus():
    here = Machine(memory=1, cpus=1, disk=1, gpus=1, gpu_memory=80 * 10**9)
    assert here.changed(["gpus=0"]).gpus == 0
    with pytest.raises(InputError, match=r"cpus=0'?: a machine has at least one CPU"):
        here.changed(["cpus=0"])


def test_checkpoints_of_an_adapter_hold_the_frozen_weights_too():
    shape = Shape.of_config(pico_config().to_dict(), 2)
    planned = training(shape, ExpertTrainingConfig(method="lora"), WorkerResources())
    assert planned.each >= CHECKPOINTS * 2 * shape.whole


def test_an_adapter_whose_base_is_elsewhere_is_named_with_what_helps(tmp_path):
    dense = save_bpe_model(tmp_path / "dense", ["alpha beta"] * 9)
    adapter, _ = save_adapter(tmp_path / "adapter", dense)
    change_json(adapter / "adapter_config.json", base_model_name_or_path="../dense")
    own = {
        name: {"train": {"files": ["a.txt"]}, "expert": str(given)}
        for name, given in {"a": adapter, "b": dense}.items()
    }
    with pytest.raises(InputError) as caught:
        made(tmp_path, dense, domains=own)
    [fault] = [f for f in caught.value.faults if f.field == "domains.a.expert"]
    assert fault.value == str(adapter)
    assert "its base, by adapter_config.json, is ../dense" in fault.remedy
    assert "name the base in seed_model.model" in fault.remedy
