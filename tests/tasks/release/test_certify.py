"""Certificates: what arrives, and each way in which experts are lost on the way."""

import json
import math
import shutil
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from databases import home_with_database
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from infra.readers.reader import PROGRAMS, READERS, Reader
from infra.tracking.descriptions import with_room
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from tasks.release import source as of_source
from tasks.release.certificate import CERTIFICATE_TAG, FILE, certify_version
from tasks.release.certify import certify
from tasks.release.source import AS_IT_IS
from tasks.release.verdict import Row, as_json, as_table, rows_of
from tests.pico import save_pico
from tests.upcycle_core.simoe.grown import grow
from upcycle_core.corpora.config import TokenizerConfig
from upcycle_core.corpora.tokenizer import train_tokenizer
from upcycle_core.errors import InputError
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.prune import save_pruned
from upcycle_core.simoe.upcycle import upcycle_in_memory

VOCABULARY = 300
MOE = "model.layers.1.block_sparse_moe"
EXPERT = MOE + ".experts.1.{}.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.layers.1.post_attention_layernorm.weight"
SHARED_GATE = "model.layers.0.mlp.shared_expert_gate.weight"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Threads of readers that wait for each other starve on a busy machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """One that llama.cpp can be told of."""
    folder = tmp_path_factory.mktemp("text")
    text = [f"def f{n}(x):\n    return x + {n}\n" * 20 for n in range(50)]
    parquet.write_table(pyarrow.table({"text": text}), folder / "train.parquet")
    config = TokenizerConfig(vocabulary_size=VOCABULARY)
    train_tokenizer({"code": folder / "train.parquet"}, folder / "tokenizer", config=config)
    return folder / "tokenizer"


def build(folder, tokenizer, family="llama", experts=3, top_k=2, **shape):
    """A MoE of random experts, large enough for the kernels of all readers."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32}
    sizes["vocab_size"] = VOCABULARY
    dense = {}
    for i, name in enumerate("abcdefg"[:experts]):
        dense[name] = save_pico(folder / name, family, seed=i, **sizes, **shape)
        shutil.copytree(tokenizer, dense[name], dirs_exist_ok=True)
    routers = random_routers(2, 64, experts, std=1.0, seed=0)
    out = folder / f"{family}-{experts}-{top_k}"
    assemble(dense, None, routers, out, top_k=top_k, max_shard_bytes=10**9)
    return out


@pytest.fixture(scope="module")
def moe(tmp_path_factory, tokenizer):
    return build(tmp_path_factory.mktemp("moe"), tokenizer)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory, tokenizer):
    return build(tmp_path_factory.mktemp("qwen2"), tokenizer, "qwen2")


def silent(_line):
    pass


def damaged(source, out, damage):
    """A copy of a checkpoint whose tensors ``damage`` has changed."""
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    damage(tensors, source)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def drop_an_expert(tensors, source):
    for part in ("w1", "w2", "w3"):
        del tensors[EXPERT.format(part)]


def base_weights(tensors, source):
    base = load_file(source.parent / "a" / "model.safetensors")
    for part, name in {"w1": "gate", "w2": "down", "w3": "up"}.items():
        tensors[EXPERT.format(part)] = base[f"model.layers.1.mlp.{name}_proj.weight"]


def transpose(tensors, source):
    tensors[O_PROJ] = tensors[O_PROJ].T


def permute_router(tensors, source):
    tensors[f"{MOE}.gate.weight"] = tensors[f"{MOE}.gate.weight"].flip(0)


def swap_gate_and_up(tensors, source):
    a, b = EXPERT.format("w1"), EXPERT.format("w3")
    tensors[a], tensors[b] = tensors[b], tensors[a]


def exchange_experts(tensors, source):
    for part in ("w1", "w2", "w3"):
        a, b = EXPERT.format(part), f"{MOE}.experts.2.{part}.weight"
        tensors[a], tensors[b] = tensors[b], tensors[a]


def norm_of_ones(tensors, source):
    tensors[NORM] = torch.ones_like(tensors[NORM])


def forget_the_shared_gate(tensors, source):
    del tensors[SHARED_GATE]


FAULTS = {
    drop_an_expert: EXPERT.format("w1"),
    base_weights: EXPERT.format("w2"),
    transpose: O_PROJ,
    permute_router: f"{MOE}.gate.weight",
    swap_gate_and_up: EXPERT.format("w3"),
    exchange_experts: EXPERT.format("w1"),
    norm_of_ones: NORM,
    forget_the_shared_gate: SHARED_GATE,
}


def lose(source, folder, damage, **options):
    """The rows of a certificate whose readers get damaged files."""
    copies = {}

    def arrived(variant):
        if variant not in copies:
            mine = source
            if variant != AS_IT_IS:
                mine = folder / f"own-{variant}"
                of_source.change(source, mine, variant)
                shutil.copytree(source.parent / "a", folder / "a", dirs_exist_ok=True)
            copies[variant] = damaged(mine, folder / variant, damage)
        return copies[variant]

    return certify(source, arrived=arrived, say=silent, **options)


def test_what_transformers_loads_in_silence_is_named(moe, tmp_path):
    [row] = lose(moe, tmp_path, base_weights, readers=["transformers"])
    assert row.verdict == "failed"
    assert FAULTS[base_weights] in row.misplaced


@pytest.mark.faults
@pytest.mark.parametrize("reader", sorted(READERS))
@pytest.mark.parametrize("damage", FAULTS, ids=lambda damage: damage.__name__)
def test_every_fault_is_caught_in_every_reader(request, tmp_path, damage, reader):
    source = request.getfixturevalue("qwen2" if damage is forget_the_shared_gate else "registered")
    [row] = lose(source, tmp_path, damage, readers=[reader], forms=["fp32", "F32"])
    if READERS[reader].missing:
        assert (row.verdict, row.why) == ("not tried", READERS[reader].missing)
    else:
        assert row.verdict == "failed"
        assert FAULTS[damage] in row.misplaced


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return home_with_database(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def sampled(moe, tmp_path_factory):
    """The model, whose files ask for generation without anything that it writes or says."""
    plain = of_source.Source(moe, tmp_path_factory.mktemp("plain"))
    avoided = {token for ids in [*plain.prompts, *plain.answers[AS_IT_IS].greedy] for token in ids}
    out = shutil.copytree(moe, tmp_path_factory.mktemp("sampled") / "moe")
    told = json.loads((moe / "generation_config.json").read_text())
    told.pop("_from_model_config", None)
    told |= {"suppress_tokens": sorted(avoided), "repetition_penalty": 1.5, "max_new_tokens": 3}
    (out / "generation_config.json").write_text(json.dumps(told))
    return plain, out


@pytest.fixture(scope="module")
def version(place, sampled):
    made = Registration(description="Ours.", files={"card.md": "# moe\n\n## Limits\n\nMany.\n"})
    with Tracker(place, "flows").start_run("moe") as run:
        found = Registry(place).register("moe", sampled[1], made, run=run)
    Registry(place).set_alias(found, "champion")
    return found


@pytest.fixture(scope="module")
def registered(place, version, moe):
    """The files of the registered version; the first expert lies beside them."""
    files = Registry(place).place(version.reference)
    shutil.copytree(moe.parent / "a", files.parent / "a", dirs_exist_ok=True)
    return files


@pytest.fixture(scope="module")
def certified(place, version, registered):
    """The rows of the version's first certificate."""
    readers = ["transformers", "mlflow"]
    return certify_version(Registry(place), version, registered, readers=readers, say=silent)


def test_a_version_arrives_whatever_it_says_of_generation_and_says_so(place, version, certified):
    registry, rows = Registry(place), certified
    assert [(row.reader, row.verdict, row.why) for row in rows] == [
        ("transformers", "arrived", ""),
        ("mlflow", "arrived", ""),
    ]
    for row in rows:
        assert row.tensors == 35
        assert row.misplaced == {}
        assert row.logits < 1e-4
        assert row.greedy[0] == row.greedy[1] > 20
        assert row.texts == (None if row.reader == "transformers" else (3, 3))
        assert row.tokenizer == (4, 4)
        assert min(row.exchanged, row.zeroed) > 0.1
    current = registry.referenced("models:/moe@champion")
    assert current.tags[CERTIFICATE_TAG] == "arrived: transformers, mlflow"
    assert current.description.startswith("Ours.")
    assert with_room(as_table(rows)) in current.description
    kept = json.loads(registry.text(version, FILE))["readers"]
    assert [row["reader"] for row in kept] == ["transformers", "mlflow"]
    card = registry.text(version, "card.md")
    assert card.startswith("# moe\n\n## Limits\n\nMany.\n\n## Arrival certificate\n")
    assert card.endswith(f"{as_table(rows)}\n")


def test_who_is_not_asked_again_keeps_his_row(
    place, version, registered, certified, monkeypatch, tmp_path
):
    registry = Registry(place)
    once = {"readers": ["transformers"], "forms": ["fp32"], "say": silent}
    kept = json.loads(as_json(certified))
    kept["readers"] = [row | {"why": "of the first time"} for row in kept["readers"]]
    registry.attach(version, {FILE: json.dumps(kept)})
    before = {row.reader: row for row in rows_of(registry.text(version, FILE))}
    monkeypatch.setattr("infra.readers.environments.FOLDER", tmp_path)
    [asked] = certify_version(registry, version, registered, **once)
    certify_version(registry, version, registered, readers=["llama.cpp"], forms=["F16"], say=silent)
    rows = rows_of(registry.text(version, FILE))
    assert [(row.reader, row.verdict) for row in rows] == [
        ("transformers", "arrived"),
        ("mlflow", "arrived"),
        ("llama.cpp", "not tried"),
    ]
    assert rows[0] == asked != before["transformers"]
    assert rows[1] == before["mlflow"]
    assert rows[1].why == "of the first time"
    current = registry.referenced("models:/moe@champion")
    assert (
        current.tags[CERTIFICATE_TAG] == "arrived: transformers, mlflow; not tried: llama.cpp F16"
    )
    for page in (current.description, registry.text(version, "card.md")):
        assert page.count("# Arrival certificate") == 1
        assert page.count("| mlflow") == page.count("| llama.cpp") == 1


def test_a_tokenizer_that_cuts_text_otherwise_is_a_fault(moe, tmp_path):
    """The weights are all there, and the answers to ids are ours."""
    copies = {AS_IT_IS: shutil.copytree(moe, tmp_path / AS_IT_IS)}
    for variant in ("exchanged", "zeroed"):
        copies[variant] = tmp_path / variant
        of_source.change(moe, copies[variant], variant)
    for copy in copies.values():
        made = json.loads((copy / "tokenizer.json").read_text())
        whole = {"use_regex": False, "add_prefix_space": False, "trim_offsets": True}
        made["pre_tokenizer"] = {"type": "ByteLevel", **whole}
        (copy / "tokenizer.json").write_text(json.dumps(made))

    [row] = certify(moe, readers=["transformers"], arrived=copies.get, say=silent)
    assert (row.verdict, row.misplaced) == ("failed", {})
    assert row.greedy[0] == row.greedy[1]
    assert row.tokenizer[0] < row.tokenizer[1] == 4
    assert row.why.startswith("tokenizer: text ")


LOSES_THE_WINDOW = f"""
import sys
sys.path.insert(0, {str(PROGRAMS)!r})
import transformers, ask_transformers
from types import SimpleNamespace
from asked import answer
load = transformers.AutoModelForCausalLM.from_pretrained

def loses_the_window(path, **options):
    model = load(path, **options)
    model.config.sliding_window = None
    return model

ask_transformers.AutoModelForCausalLM = SimpleNamespace(from_pretrained=loses_the_window)
answer(transformers.__version__, ask_transformers.ask)
"""
"""Stock transformers, which does not obey a sliding window, as other readers do not."""


@pytest.fixture(scope="module")
def sliding(tmp_path_factory, tokenizer):
    """A MoE whose layers look back at 40 tokens, and which has room for 128."""
    return build(tmp_path_factory.mktemp("sliding"), tokenizer, "mistral", sliding_window=40)


NOT_TRIED = "not tried beyond its sliding window of 40 tokens"


@pytest.mark.faults
def test_a_window_that_is_obeyed_has_arrived(sliding, monkeypatch):
    monkeypatch.setattr(of_source, "LONGEST_WINDOW", 40)
    [row] = certify(sliding, readers=["transformers"], say=silent)
    assert (row.verdict, row.why) == ("arrived", "")
    [row] = certify(sliding, readers=["transformers"], forms=["bf16"], say=silent)
    assert row.verdict == "arrived"
    assert NOT_TRIED in row.why


@pytest.mark.faults
@pytest.mark.parametrize("longest", [40, 39])
def test_a_window_that_a_reader_loses_is_a_fault_or_was_not_tried(
    sliding, tmp_path, monkeypatch, longest
):
    monkeypatch.setattr(of_source, "LONGEST_WINDOW", longest)
    program = tmp_path / "lossy.py"
    program.write_text(LOSES_THE_WINDOW)
    lossy = Reader("transformers", str(program), None, "transformers")
    monkeypatch.setitem(READERS, "transformers", lossy)
    [row] = certify(sliding, readers=["transformers"], say=silent)
    if longest == 40:
        assert row.verdict == "failed"
        assert row.why.startswith("logits are ")
    else:
        assert (row.verdict, row.why) == ("arrived", NOT_TRIED)


@pytest.mark.faults
@pytest.mark.skipif(bool(READERS["llama.cpp"].missing), reason="llama.cpp is not installed")
def test_a_window_that_a_file_loses_is_said_however_long_it_is(sliding, monkeypatch):
    monkeypatch.setattr(of_source, "LONGEST_WINDOW", 39)
    [row] = certify(sliding, readers=["llama.cpp"], forms=["F32"], say=silent)
    assert (row.verdict, row.misplaced) == ("arrived", {})
    assert row.why == ("sliding window: None in the file, not 40: longer texts are read otherwise")


def test_a_window_is_none_that_is_not_used_or_hides_nothing(tmp_path):
    config = {"sliding_window": 40, "max_position_embeddings": 128}
    cases = [
        (config, 40),
        ({"dense": config}, 40),
        (config | {"sliding_window": None}, None),
        (config | {"use_sliding_window": False}, None),
        (config | {"sliding_window": 128}, None),
    ]
    for said, window in cases:
        model = object.__new__(of_source.Source)
        model.checkpoint = SimpleNamespace(config=said)
        assert model.window == window


def test_our_own_answers_are_those_of_the_stock_model_step_by_step(moe):
    from upcycle_core.certificate.answers import ours
    from upcycle_core.checkpoints.load import load_causal_lm

    prompt = [5, 7, 11, 13]
    answers = ours(load_causal_lm(moe), [prompt], tokens=6)
    model = AutoModelForCausalLM.from_pretrained(moe)
    ids = list(prompt)
    for step, token in enumerate(answers.greedy[0]):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        best = logits.topk(2).values
        assert int(logits.argmax()) == token
        assert answers.margins[0][step] == pytest.approx(float(best[0] - best[1]), abs=1e-4)
        if step == 0:
            torch.testing.assert_close(answers.first[0], logits, atol=1e-5, rtol=0)
        ids.append(token)


def test_how_a_model_would_be_sampled_changes_neither_prompts_nor_answers(sampled, tmp_path):
    plain, files = sampled
    model = of_source.Source(files, tmp_path)
    assert model.prompts == plain.prompts
    assert model.answers[AS_IT_IS].greedy == plain.answers[AS_IT_IS].greedy
    assert model.spoken("auto") == plain.spoken("auto")


def test_a_model_too_large_for_memory_is_refused_before(moe, monkeypatch):
    monkeypatch.setattr(of_source, "free_memory", lambda: 1000)
    [row] = certify(moe, readers=["transformers"], say=silent)
    assert row.verdict == "not tried"
    assert "are free" in row.why


def test_a_reader_that_is_not_there_or_breaks_has_a_row(moe, monkeypatch, tmp_path):
    program = tmp_path / "broken.py"
    program.write_text("raise MemoryError('no room')")
    broken = Reader("transformers", str(program), None, "transformers")
    monkeypatch.setitem(READERS, "transformers", broken)
    monkeypatch.setattr("infra.readers.environments.FOLDER", tmp_path)
    rows = certify(moe, say=silent, readers=["transformers", "vllm"])
    assert [(row.reader, row.verdict) for row in rows] == [
        ("transformers", "failed"),
        ("vllm", "not tried"),
    ]
    assert "MemoryError: no room" in rows[0].why


@pytest.mark.faults
def test_a_model_that_brings_its_code_arrives_where_that_is_run(moe, tmp_path):
    config = SimoeUpcyclingConfig(experts=3)
    dense = moe.parent / "a"
    save_pruned(grow(upcycle_in_memory(dense, config, seed=1)), dense, tmp_path / "simoe")
    rows = certify(tmp_path / "simoe", readers=["transformers", "vllm"], say=silent)
    assert [(row.verdict, row.misplaced) for row in rows] == [("arrived", {}), ("not tried", None)]


def test_forms_that_no_reader_takes_are_refused_and_leave_no_certificate_of_nothing(moe):
    with pytest.raises(InputError, match="F16, Q8_0': is no form that transformers, vllm can be"):
        certify(moe, readers=["transformers", "vllm"], forms=["F16", "Q8_0"], say=silent)
    assert certify(moe, readers=[], say=silent) == []


def test_a_full_disk_is_a_row(moe, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(of_source, "change", full)
    [row] = certify(moe, readers=["transformers"], say=silent)
    assert row.verdict == "failed"
    assert "No space left" in row.why


def test_what_is_no_number_is_kept_in_words():
    row = Row("llama.cpp", "F32", verdict="failed", logits=float("nan"))
    kept = json.loads(as_json([row]), parse_constant=pytest.fail)
    assert kept["readers"][0]["logits"] == "nan"
    assert math.isnan(rows_of(as_json([row]))[0].logits)


def test_rows_are_read_as_they_were_written():
    row = Row("vllm", "fp32", "DeRS expanded", "0.32", "arrived", "", 35, {}, 1e-5, (9, 10), (1, 2))
    assert rows_of(as_json([row, Row("mlflow", "fp32")])) == [row, Row("mlflow", "fp32")]
