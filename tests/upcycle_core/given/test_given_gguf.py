"""GGUF files as checkpoints, against the gguf package's own dequantisation and transformers."""

import json

import gguf
import numpy as np
import pytest
import torch
from forms import TEMPLATE, save_bpe_model, save_gguf
from pico import pico_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from upcycle_core.architectures.compare import compare_experts
from upcycle_core.checkpoints.given_as import given_as
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.encoding import prefix_ids
from upcycle_core.errors import InputError
from upcycle_core.given import gguf_file
from upcycle_core.given.gguf_file import open_gguf, write_gguf

TEXTS = ["alpha beta gamma delta", "one two three, four five", "def f(x): return x"] * 5
TEXT = "alpha two  three\n<|endoftext|>ünd 汉"


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request, tmp_path_factory):
    return save_bpe_model(tmp_path_factory.mktemp(request.param) / "model", TEXTS, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_bpe_model(tmp_path_factory.mktemp("llama") / "model", TEXTS)


def written(path, out):
    out.mkdir()
    write_gguf(open_gguf(path), out)
    return load_file(out / "model.safetensors")


def test_f32_is_the_model_to_the_last_bit(tmp_path, model):
    ours = written(save_gguf(tmp_path / "model.gguf", model), tmp_path / "out")
    theirs = load_file(model / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert given_as(tmp_path / "out") == "GGUF file (F32), dequantised to float32"


def test_its_configuration_is_the_models(tmp_path, model):
    written(save_gguf(tmp_path / "model.gguf", model), tmp_path / "out")
    readers = {"was": CheckpointReader(model), "is": CheckpointReader(tmp_path / "out")}
    (fault,) = compare_experts(readers, {})
    assert "is the same model as was" in fault.remedy
    config = readers["is"].config
    for name in ("rms_norm_eps", "head_dim", "vocab_size", "tie_word_embeddings", "eos_token_id"):
        assert config[name] == readers["was"].config[name]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_blocks_are_rounded_once(tmp_path, llama, kind):
    path = save_gguf(tmp_path / "model.gguf", llama, matrices=kind)
    ours = written(path, tmp_path / "out")
    dtype = torch.float16 if kind == "F16" else torch.bfloat16
    theirs = load_file(llama / "model.safetensors")
    stored = gguf.GGMLQuantizationType[kind]
    for name, tensor in theirs.items():
        if tensor.dim() > 1 and "q_proj" not in name and "k_proj" not in name:
            rounded = gguf.dequantize(gguf.quantize(tensor.numpy(), stored), stored)
            assert torch.equal(ours[name], torch.from_numpy(np.array(rounded)).to(dtype)), name
    # transformers' own reader, whose arithmetic is fp32 here: what it has, rounded to our type.
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(ours[name], tensor.to(dtype)), name
    assert given_as(tmp_path / "out").startswith(f"GGUF file ({kind}), dequantised to")


@pytest.mark.parametrize("is_copy", [True, False])
def test_dequantised_values_are_held_once(tmp_path, llama, monkeypatch, is_copy):
    """They are taken as they are, unless they are the file's own, which nobody may write to."""
    file = open_gguf(save_gguf(tmp_path / "model.gguf", llama))
    values, produced = np.arange(6, dtype=np.float32), []
    values.flags.writeable = is_copy
    monkeypatch.setattr(gguf_file, "dequantised", lambda *_: values)
    monkeypatch.setattr(
        gguf_file,
        "write_sharded",
        lambda _out, _specs, produce, **_: produced.append(produce("model.norm.weight")),
    )
    (tmp_path / "out").mkdir()
    write_gguf(file, tmp_path / "out")
    assert np.shares_memory(produced[0].numpy(), values) is is_copy
    assert produced[0].tolist() == values.tolist()


def test_tokenizer_and_template_come_along(tmp_path, llama):
    written(save_gguf(tmp_path / "model.gguf", llama), tmp_path / "out")
    ours, theirs = (AutoTokenizer.from_pretrained(d) for d in (tmp_path / "out", llama))
    assert ours.chat_template == theirs.chat_template == TEMPLATE
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours.eos_token_id == theirs.eos_token_id == 0


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        (None, ["ab", ":", "Ġ", "Ġ1984", "ĊĊĠ", "ĠxY"]),
        ("smollm", ["ab", ":", "ĠĠ", "1", "9", "8", "4", "ĊĊĠ", "ĠxY"]),
        ("default", ["ab", ":", "Ġ", "Ġ1984", "ĊĊĠ", "ĠxY"]),
        ("gpt-2", ["ab", ":", "Ġ", "Ġ1984", "ĊĊĠ", "ĠxY"]),
        ("llama-bpe", ["ab", ":", "Ġ", "Ġ", "198", "4", "ĊĊ", "Ġ", "ĠxY"]),
        ("qwen2", ["ab", ":", "Ġ", "Ġ", "1", "9", "8", "4", "ĊĊ", "Ġ", "ĠxY"]),
        ("tekken", ["ab", ":", "Ġ", "Ġ", "1", "9", "8", "4", "ĊĊ", "Ġ", "Ġx", "Y"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path, llama, split, pieces):
    """Digits one by one, or three together, and with spaces that GPT-2 gives to what follows."""
    written(save_gguf(tmp_path / "model.gguf", llama, split=split), tmp_path / "out")
    core = AutoTokenizer.from_pretrained(tmp_path / "out").backend_tokenizer
    found = [piece for piece, _ in core.pre_tokenizer.pre_tokenize_str("ab:  1984\n\n  xY")]
    assert found == pieces


def test_a_tied_head_stays_tied(tmp_path):
    model = save_bpe_model(tmp_path / "model", TEXTS, tie_word_embeddings=True)
    ours = written(save_gguf(tmp_path / "model.gguf", model), tmp_path / "out")
    assert "lm_head.weight" not in ours
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize(("theta", "factor"), [(500000.0, 8.0), (500000.0, 32.0)])
def test_the_rope_of_llama_3_is_found_again(tmp_path, theta, factor):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    long = {"head_dim": 64, "max_position_embeddings": 131072}
    plain = {"rope_type": "default", "rope_theta": theta}
    model = save_bpe_model(tmp_path / "m", TEXTS, rope_parameters=plain, **long)
    scaled = pico_config(**long, rope_parameters=scaling)
    slow, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, "cpu")
    fast = 1 / theta ** (torch.arange(0, 64, 2) / 64)
    scales = {"rope_freqs.weight": (fast / slow).numpy()}
    settings = {"attention.key_length": 64, "attention.value_length": 64}
    path = save_gguf(tmp_path / "m.gguf", model, settings=settings, more=scales)
    written(path, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == scaling


def refused(path, match):
    with pytest.raises(InputError, match=match):
        open_gguf(path)


REFUSED = {
    "a scaled rope": ({"settings": {"rope.scaling.type": "yarn"}}, r"rope.scaling.type = 'yarn'"),
    "experts": ({"settings": {"expert_count": 8}}, "llama.expert_count = 8: is not understood"),
    "a window": ({"settings": {"attention.sliding_window": 16}}, "sliding_window = 16"),
    "a part of the rope": ({"settings": {"rope.dimension_count": 4}}, "rope.dimension_count = 4"),
    "scales of the rope": (
        {"more": {"rope_freqs.weight": np.arange(1, 5, dtype=np.float32)}},
        "rope_freqs.weight': scales the rope in another way",
    ),
    "a bias": (
        {"more": {"blk.0.attn_q.bias": np.ones(32, np.float32)}},
        "has no place for model.layers.0.self_attn.q_proj.bias",
    ),
    "another tensor": ({"more": {"cls.weight": np.ones(4, np.float32)}}, "no place for cls.weight"),
    "a missing tensor": (
        {"left_out": ("blk.1.ffn_up.weight",)},
        "lacks .*layers.1.mlp.up_proj",
    ),
    "another shape": ({"settings": {"feed_forward_length": 96}}, "another shape of .*gate_proj"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused(tmp_path, llama, case):
    changes, match = REFUSED[case]
    refused(save_gguf(tmp_path / "model.gguf", llama, **changes), match)


def test_what_is_neutral_is_accepted(tmp_path, llama):
    neutral = {"expert_count": 0, "rope.scaling.type": "none", "rope.dimension_count": 8}
    open_gguf(save_gguf(tmp_path / "model.gguf", llama, settings=neutral))


@pytest.mark.parametrize(
    ("split", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)]
)
@pytest.mark.parametrize("says", [None, True, False])
def test_a_text_begins_as_the_file_or_its_way_says(tmp_path, llama, split, begins, says):
    """llama.cpp takes it from the name of the way where the file has no word of its own."""
    path = save_gguf(tmp_path / "model.gguf", llama, split=split, adds_bos=says)
    written(path, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    first = tokenizer("alpha").input_ids[0] == tokenizer.bos_token_id
    assert first == (begins if says is None else says)
    assert prefix_ids(tokenizer, "auto") == ([tokenizer.bos_token_id] if first else [])


def test_a_way_to_split_text_that_is_not_known_is_refused(tmp_path, llama):
    path = save_gguf(tmp_path / "model.gguf", llama, split="deepseek-coder")
    refused(path, "tokenizer.ggml.pre = 'deepseek-coder': how it cuts text is not known")


def test_another_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma2")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "model.gguf", "general.architecture = 'gemma2': only llama")


def test_a_file_that_is_cut_off_or_a_part_is_refused(tmp_path, llama):
    path = save_gguf(tmp_path / "model.gguf", llama)
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:-1000])
    refused(tmp_path / "cut.gguf", "is truncated or no GGUF file")
    (tmp_path / "text.gguf").write_text("no")
    refused(tmp_path / "text.gguf", "is truncated or no GGUF file")
    path.rename(tmp_path / "model-00001-of-00003.gguf")
    refused(tmp_path / "model-00001-of-00003.gguf", "is a part of a file")
