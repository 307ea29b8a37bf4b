"""Certificates in every form: what there is no room for, what is expanded, and who says nothing."""

import json
import shutil
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.readers.ask.arrived import wanted
from infra.readers.environments import LLAMA_CPP
from infra.readers.reader import READERS, Reader, Said
from tasks.release import certify as module
from tasks.release import source as of_source
from tasks.release.certificate import with_certificate
from tasks.release.certify import EXPANDED, SECONDS, ask_one, certify, expanded, forms_of
from tasks.release.source import AS_IT_IS, Source
from tasks.release.verdict import TOLERANCES, Row, as_table, compared, judged, tolerance_of
from tests.tasks.release.test_certify import build, one_thread, silent, tokenizer  # noqa: F401  (fixtures)
from upcycle_core.ders import expand as expansion
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig


@pytest.fixture(scope="module")
def moe(tmp_path_factory, tokenizer):  # noqa: F811  (the fixture)
    return build(tmp_path_factory.mktemp("moe"), tokenizer)


@pytest.fixture(scope="module")
def ders(tmp_path_factory, moe):
    out = tmp_path_factory.mktemp("ders") / "ders"
    config = CodecConfig(codec="quantised", bits=4)
    compress(moe, out, base=None, config=config, minimum_cosine=-1)  # random experts are strangers
    return out


@pytest.fixture
def everyone_at_hand(tmp_path, monkeypatch):
    """Readers that are not installed here count as installed: none of them is run."""
    for name in ("vllm", "llama_cpp", "converter"):
        (tmp_path / "readers" / name).mkdir(parents=True)
        (tmp_path / "readers" / name / ".ready").touch()
    monkeypatch.setattr("infra.readers.environments.FOLDER", tmp_path / "readers")


def stored(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_a_disk_without_room_for_the_copies_is_refused_before(moe, monkeypatch, everyone_at_hand):
    monkeypatch.setattr(of_source, "free_disk", lambda folder: 2 * stored(moe) - 1)
    monkeypatch.setattr(of_source, "change", lambda *_: pytest.fail("heavy work began"))
    monkeypatch.setattr(Source, "prompts", property(lambda _: pytest.fail("heavy work began")))
    rows = certify(moe, say=silent)
    assert [row.reader for row in rows] == ["transformers", "mlflow", "vllm", *3 * ["llama.cpp"]]
    for row in rows:
        assert row.verdict == "not tried"
        assert "MB of disk for copies" in row.why
        assert "are free; free some, or name a folder on a larger disk in TMPDIR" in row.why


def test_a_gguf_file_needs_room_of_its_own_by_its_type(moe, monkeypatch, tmp_path):
    model = Source(moe, tmp_path)
    weights = model.weights
    # Two copies of fp32 fit, and a file of fewer than 32 bits a weight.
    monkeypatch.setattr(of_source, "free_disk", lambda _: (2 * 4 + 3) * weights * of_source.SPARE)
    assert model.reason_for_disk("fp32") is None
    assert model.reason_for_disk("F16") is None
    needed = (2 * 4 + 4) * weights * of_source.SPARE / 1e6
    assert f"needs {needed:.2g} MB of disk" in model.reason_for_disk("F32")
    for name in ("exchanged", "zeroed"):
        model.path(name)
    assert model.reason_for_disk("F32") is None  # the copies are there


@pytest.mark.faults
def test_each_gguf_file_is_gone_when_its_variant_was_asked(moe, monkeypatch):
    assert LLAMA_CPP.ready, "make readers"
    seen = []
    ask = module.ask

    def look(reader, models, request, *, folder, seconds):
        seen.append([path.name for path in sorted(folder.parent.rglob("*.gguf"))])
        return ask(reader, models, request, folder=folder, seconds=seconds)

    monkeypatch.setattr(module, "ask", look)
    rows = certify(moe, readers=["llama.cpp"], forms=["F16", "Q8_0"], say=silent)
    assert [row.verdict for row in rows] == ["arrived", "arrived"]
    assert seen == 2 * [["as-it-is.gguf"], ["exchanged.gguf"], ["zeroed.gguf"]]


@pytest.mark.faults
@pytest.mark.parametrize("name", ["transformers", "vllm"])
def test_what_is_too_large_for_fp32_is_asked_in_bf16(moe, monkeypatch, tmp_path, name):
    room = Source(moe, tmp_path).memory("bf16")
    monkeypatch.setattr(of_source, "free_memory", lambda: room)
    [row] = certify(moe, readers=[name], say=silent)
    assert (row.form, row.verdict, row.misplaced) == ("bf16", "arrived", {})
    assert row.tensors == 35
    assert 0 < row.logits < 0.2  # it was not computed in fp32; and is no other model's
    assert min(row.exchanged, row.zeroed) > 1
    assert "our own forward pass is in bf16 as well" in row.why


def said(model, answers, **more):
    """What a reader says that answers as ``answers``."""
    more = {"ids": model.read, **more}
    return {v: Said(own.first, own.greedy, more) for v, own in answers.items()}


def test_our_own_forward_pass_is_in_bf16_where_fp32_has_no_room(moe, monkeypatch, tmp_path):
    for folder in ("fp32", "bf16"):
        (tmp_path / folder).mkdir()
    exact = Source(moe, tmp_path / "fp32")
    assert (exact.precision, forms_of(READERS["vllm"], TOLERANCES, exact)) == ("fp32", ["fp32"])
    exact_answers = exact.answers
    monkeypatch.setattr(of_source, "free_memory", lambda: exact.memory("bf16"))
    model = Source(moe, tmp_path / "bf16")
    assert (model.precision, forms_of(READERS["vllm"], TOLERANCES, model)) == ("bf16", ["bf16"])
    assert forms_of(READERS["vllm"], ["fp32"], model) == ["fp32"]  # which memory is too small for
    model.prompts = exact.prompts
    first = model.answers[AS_IT_IS].first
    assert 1e-3 < (first - exact_answers[AS_IT_IS].first).abs().max() < 0.2
    sought = json.loads(model.wanted("bf16").read_text())
    file = load_file(moe / "model.safetensors")
    assert {n: about["all"] for n, about in sought.items()} == {
        name: wanted(tensor.bfloat16())["all"] for name, tensor in file.items()
    }
    row = judged(Row("vllm", "bf16"), model, said(model, exact_answers), pinned="")
    assert row.verdict == "arrived"
    assert row.why.endswith("too large for fp32 here: our own forward pass is in bf16 as well")
    exact_answers[AS_IT_IS] = exact_answers["zeroed"]
    row = judged(Row("vllm", "bf16"), model, said(model, exact_answers), pinned="")
    assert row.verdict == "failed"
    assert "logits are" in row.why


def test_another_version_than_was_tried_is_said(moe, tmp_path):
    model = Source(moe, tmp_path)
    row = Row("vllm", "fp32", version="0.33.1+cpu")
    row = judged(row, model, said(model, model.answers), pinned="0.32.0")
    assert (row.verdict, row.why) == ("arrived", "version 0.33.1+cpu, 0.32.0 was tried")
    assert "| vllm 0.33.1 | fp32 | arrived | " in as_table([row])
    assert as_table([row]).endswith("\n\n- vllm: version 0.33.1+cpu, 0.32.0 was tried")
    row = Row("vllm", "fp32", version="0.32.0+cpu")
    assert judged(row, model, said(model, model.answers), pinned="0.32.0").why == ""


def test_what_is_too_large_for_bf16_is_refused_with_numbers(moe, monkeypatch, tmp_path):
    room = Source(moe, tmp_path).memory("bf16")
    monkeypatch.setattr(of_source, "free_memory", lambda: room - 1)
    [row] = certify(moe, readers=["transformers"], say=silent)
    assert (row.form, row.verdict) == ("bf16", "not tried")
    assert f"needs {room / 1e6:.2g} MB of memory in bf16" in row.why


def test_rounding_grows_with_the_layers_and_adds_up(moe, tmp_path):
    model = Source(moe, tmp_path)
    assert (model.precision, tolerance_of("F16", model)) == ("fp32", 0.15)
    model.checkpoint.config["num_hidden_layers"] = 36
    assert tolerance_of("bf16", model) == pytest.approx(0.6)
    model.precision = "bf16"
    assert tolerance_of("bf16", model) == pytest.approx(0.6)
    assert tolerance_of("F16", model) == pytest.approx(0.75)
    assert tolerance_of("Q8_0", model) == pytest.approx(0.9 + 0.6)
    model.precision = "fp32"
    assert tolerance_of("Q8_0", model) == pytest.approx(0.9)
    model.checkpoint.config["num_hidden_layers"] = 4
    assert tolerance_of("Q8_0", model) == 0.7
    # DeRS: its configuration holds the dense one.
    model.checkpoint.config["dense"] = {"num_hidden_layers": 36}
    del model.checkpoint.config["num_hidden_layers"]
    assert tolerance_of("bf16", model) == pytest.approx(0.6)


def test_texts_are_held_against_ours(moe, tmp_path):
    model = Source(moe, tmp_path)
    texts = []
    for ids, _ in model.spoken("auto"):
        end = next((i for i, token in enumerate(ids) if token in model.specials), len(ids))
        texts.append(model.tokenizer.decode(ids[:end]))
    assert compared(model, texts, "auto") == ((3, 3), [])
    texts[1] = texts[0]
    equal, [(text, margin)] = compared(model, texts, "auto")
    assert equal == (2, 3)
    ids, margins = model.spoken("auto")[1]
    first = next(
        i
        for i in range(len(ids))
        if not texts[0].startswith(model.tokenizer.decode(ids[: i + 1]).rstrip("\ufffd"))
    )
    assert margin == margins[first]
    assert text == (
        f"text differs from token {first} of prompt 1, where ours leads by {margin:.2g}"
    )


def test_a_reader_that_hangs_has_a_row(moe, monkeypatch, tmp_path):
    program = tmp_path / "hanging.py"
    program.write_text("import time\ntime.sleep(600)")
    monkeypatch.setitem(READERS, "vllm", Reader("vllm", str(program), None, "torch"))
    began = time.monotonic()
    [row] = certify(moe, readers=["vllm"], seconds=1, say=silent)
    assert time.monotonic() - began < 30
    assert (row.reader, row.verdict) == ("vllm", "failed")
    assert row.why == "at the model as-it-is: did not answer within 1 s"
    assert not row.is_lost  # which says nothing of the model


def test_what_ders_expands_to_is_held_against_it(ders, tmp_path, monkeypatch):
    (tmp_path / "good").mkdir()
    stock = expanded(Source(ders, tmp_path / "good"))
    assert (stock.made_of, stock.fault, stock.own_code) == (EXPANDED, "", False)

    def without_a_delta(compressed, out):
        expand(compressed, out)
        file = out / "model.safetensors"
        tensors = load_file(file)
        place = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
        tensors[place.format(1)] = tensors[place.format(0)].clone()
        save_file(tensors, file, metadata={"format": "pt"})

    expand = expansion.expand
    monkeypatch.setattr(expansion, "expand", without_a_delta)
    (tmp_path / "bad").mkdir()
    fault = expanded(Source(ders, tmp_path / "bad")).fault
    assert fault.startswith("expanded: logits are ")
    assert fault.endswith("off those of the DeRS model, 0.002 may be")


def test_what_cannot_be_expanded_has_rows_that_say_why(ders, tmp_path, monkeypatch):
    copy = shutil.copytree(ders, tmp_path / "ders")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "combine": "sum"}))
    (copy / "checksums.json").unlink()
    monkeypatch.setattr(module, "_reason_of_code", lambda *_: "not here")  # the model itself
    monkeypatch.setattr("infra.readers.environments.FOLDER", tmp_path)
    rows = certify(copy, forms=["fp32", "F32"], say=silent)
    of = [(row.reader, row.what) for row in rows if row.of]
    assert of == [
        ("transformers", "DeRS expanded, fp32"),
        ("vllm", "DeRS expanded, fp32"),
        ("llama.cpp", "DeRS expanded, F32"),
    ]
    for row in rows:
        assert row.verdict == "not tried"
        assert not row.of or "always divides weights by their sum" in row.why


def test_low_rank_deltas_are_not_given_to_vllm(ders, tmp_path, everyone_at_hand):
    model = Source(ders, tmp_path)
    assert module.reason_not_to_try(READERS["vllm"], "fp32", model) is None
    model.checkpoint.config["delta"]["codec"] = "low_rank"
    why = module.reason_not_to_try(READERS["vllm"], "fp32", model)
    assert why.startswith("takes low-rank deltas for stacked experts")
    assert module.reason_not_to_try(READERS["transformers"], "fp32", model) is None


@pytest.mark.faults
def test_ders_arrives_as_it_is_and_expanded(ders):
    readers = ["transformers", "vllm", "llama.cpp"]
    rows = certify(ders, readers=readers, forms=["fp32", "F32"], say=silent)
    found = {(row.reader, row.what): row for row in rows}
    for (reader, what), row in found.items():
        if reader == "llama.cpp" and not row.of:
            assert row.verdict == "not tried"
            continue
        assert row.verdict == "arrived", f"{reader} {what}: {row.why}"
        assert (row.tensors, row.misplaced) == (35, {})
        assert row.exchanged is None or row.exchanged > 1
    assert found["vllm", "fp32"].greedy[0] == found["vllm", "fp32"].greedy[1] > 20
    assert "| vllm 0." in as_table(rows)


@pytest.mark.faults
def test_a_damaged_delta_is_caught_in_vllm(ders, tmp_path):
    def arrived(variant):
        assert variant == AS_IT_IS
        copy = shutil.copytree(ders, tmp_path / "damaged", dirs_exist_ok=True)
        tensors = load_file(copy / "model.safetensors")
        codes = tensors["model.decoder.layers.1.mlp.experts.up_proj.codes"]
        codes[1] = codes[0]
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        (copy / "checksums.json").unlink(missing_ok=True)
        return copy

    row = ask_one(READERS["vllm"], "fp32", Source(ders, tmp_path, arrived), SECONDS)
    assert row.verdict == "failed"
    assert list(row.misplaced) == ["model.decoder.layers.1.mlp.experts.up_proj.codes"]
    assert replace(row, why="").is_lost
    assert torch.isfinite(torch.tensor(row.logits))


@pytest.mark.parametrize("top", ["---\nlicense: mit\n---\n\n", "---\n# for hubs\na: b\n---\n", ""])
def test_a_certificate_stands_below_the_title(top):
    rows = [Row("llama.cpp", "F16", verdict="not tried", why="no reason")]
    card = f"{top}# moe\n\n## Limits\n\nMany.\n"
    once = with_certificate(card, "## Arrival certificate", rows)
    assert once.startswith(f"{card}\n## Arrival certificate\n")
    assert with_certificate(once, "## Arrival certificate", rows) == once


@pytest.mark.parametrize("title", ["## Arrival certificate", "### Arrival certificate"])
def test_a_certificate_takes_no_other_part_of_a_page(title):
    first, second = (
        [Row("llama.cpp", form, verdict="not tried", why="no reason")] for form in ("F16", "Q8_0")
    )
    page = "# MoE, version 1\n\n## Scores\n\n91.2\n"
    once = with_certificate(page, title, first)
    assert once.startswith(f"{page}\n{title}\n")
    assert with_certificate(once, title, first) == once
    scored = f"{once}\n# Task evaluation\n\n### Accuracy\n\n0.4\n"
    again = with_certificate(scored, title, second)
    assert "F16" not in again
    assert "Q8_0" in again
    assert again.startswith(f"{page}\n{title}\n")
    assert again.endswith("\n\n# Task evaluation\n\n### Accuracy\n\n0.4\n")
    late = with_certificate(f"{page}\n# Task evaluation\n\n### Accuracy\n\n0.4\n", title, second)
    assert late == again  # before what is written anew with each evaluation
