import copy
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, T5Config

from tests import warm
from tests.pico import VOCABULARY, save_pico_tokenizer
from tests.upcycle_core.simoe.grown import all_masks, batch_of, grown, merged, some_ids, upcycled
from upcycle_core.errors import InputError
from upcycle_core.simoe.model import SimoeForConditionalGeneration, gated_modules
from upcycle_core.simoe.prune import prune, save_pruned

KINDS = ("relu", "gated-gelu")
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def save_t5(directory: Path, kind: str) -> Path:
    torch.manual_seed(5)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj=kind,
        tie_word_embeddings=kind == "relu",
        pad_token_id=1,
        eos_token_id=0,
        decoder_start_token_id=1,
    )
    model = AutoModelForSeq2SeqLM.from_config(config)
    for parameter in model.parameters():
        is_norm = parameter.dim() == 1
        parameter.data.normal_(mean=float(is_norm), std=0.1 if is_norm else 0.3)
    model.save_pretrained(directory)
    return save_pico_tokenizer(directory)


def load(path):
    return AutoModelForSeq2SeqLM.from_pretrained(path).eval()


def t5_batch(side="right"):
    labels = torch.randint(2, VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(9))
    return {**batch_of(some_ids(7, 4), side), "labels": labels}


def encoder_alpha(model, dense, prompt):
    with torch.no_grad():
        state = dense.get_encoder()(prompt[None]).last_hidden_state[0, -1]
        inner = model.router.hidden.weight @ state + model.router.hidden.bias
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        return (model.router.output.weight @ inner + model.router.output.bias).softmax(0)


@pytest.mark.parametrize("kind", KINDS)
def test_before_training_it_is_the_dense_model_to_the_bit(tmp_path, kind):
    dense, model = load(save_t5(tmp_path, kind)), upcycled(tmp_path)
    assert isinstance(model, SimoeForConditionalGeneration)
    with torch.no_grad():  # where its bias has a gradient, attention is another kernel
        found, expected = model(**t5_batch()), dense(**t5_batch())
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    weights = {
        f"model.{name.removesuffix('.weight')}"
        for name, _ in dense.named_parameters()
        if "relative_attention_bias" not in name and "shared" not in name and "lm_head" not in name
    }
    assert set(gated_modules(model)) == weights
    ffn = set(gated_modules(upcycled(tmp_path, layers="ffn")))
    assert ffn == {name for name in weights if "DenseReluDense" in name}
    with pytest.raises(InputError, match="routed by instance or by task"):
        upcycled(tmp_path, routing="token")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_prompt_runs_and_answers_through_weights_of_its_own(tmp_path, kind, side):
    dense, model = load(save_t5(tmp_path, kind)), grown(tmp_path)
    batch, rows, masks = t5_batch(side), some_ids(7, 4), all_masks(model)
    labels = batch.pop("labels")
    ways = [GREEDY, GREEDY | {"num_beams": 3}, GREEDY | {"use_cache": False}]
    together = model(**batch, labels=labels)
    answers = [model.generate(**batch, **way) for way in ways]
    for index, row in enumerate(rows):
        alpha = encoder_alpha(model, dense, row)
        torch.testing.assert_close(together.coefficients[index], alpha, rtol=1e-4, atol=1e-6)
        alone = merged(model, copy.deepcopy(dense), alpha, masks)
        with torch.no_grad():
            expected = alone(input_ids=row[None], labels=labels[index : index + 1]).logits[0]
        away = (together.logits[index] - expected).abs().max()
        assert away < 1e-4 * expected.abs().max()
        for way, answer in zip(ways, answers, strict=True):
            assert torch.equal(answer[index], alone.generate(row[None], **way)[0])


def test_coefficients_are_found_once_and_carried(tmp_path, monkeypatch):
    model = grown(save_t5(tmp_path, "relu"))
    calls, own = [], type(model).coefficients
    monkeypatch.setattr(
        type(model), "coefficients", lambda *args, **kw: calls.append(0) or own(*args, **kw)
    )
    batch = t5_batch("left")
    labels = batch.pop("labels")
    model.generate(**batch, num_beams=3, **GREEDY)
    assert len(calls) == 1
    with torch.no_grad():
        first = model(**batch, labels=labels)
        states = (first.encoder_last_hidden_state,)
        with pytest.raises(ValueError, match="coefficients = None: encoder_outputs"):
            model(encoder_outputs=states, attention_mask=batch["attention_mask"], labels=labels)
        again = model(
            encoder_outputs=states,
            attention_mask=batch["attention_mask"],
            labels=labels,
            coefficients=first.coefficients,
        )
        with pytest.raises(ValueError, match="coefficients = None: the cache"):
            model(**batch, decoder_input_ids=labels, past_key_values=first.past_key_values)
    assert torch.equal(again.logits, first.logits)


def gradients(model):
    model.zero_grad()
    torch.manual_seed(2)  # dropout
    model(**t5_batch(), use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_it_trains_with_dropout_and_with_checkpoints(tmp_path):
    model = grown(save_t5(tmp_path, "gated-gelu")).train()
    plain = gradients(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    again = gradients(model)
    for name, gradient in plain.items():
        trained = name.endswith(("delta", "log_phi")) or name.startswith("router")
        assert (gradient is not None and bool(gradient.any())) is trained, name
        assert not trained or torch.equal(gradient, again[name])


REMOTE = """
import sys
sys.path = [p for p in sys.path if p]
sys.modules["upcycle_core"] = None  # cannot be imported
import torch
from transformers import AutoModelForSeq2SeqLM
model, info = AutoModelForSeq2SeqLM.from_pretrained(
    sys.argv[1], trust_remote_code=True, local_files_only=True, output_loading_info=True,
)
assert not any(info.values()), info
with torch.no_grad():
    torch.save(model(**torch.load(sys.argv[2])).logits, sys.argv[3])
"""


def test_pruned_saved_and_loaded_elsewhere_it_computes_the_same(tmp_path):
    model = grown(save_t5(tmp_path / "dense", "gated-gelu"))
    for module in gated_modules(model).values():
        module.log_phi.data[:, torch.rand(module.inputs) < 0.5] = -5
    with torch.no_grad():
        expected = model(**t5_batch()).logits
        torch.testing.assert_close(
            prune(model)(**t5_batch()).logits, expected, rtol=1e-5, atol=1e-5
        )
        save_pruned(model, tmp_path / "dense", tmp_path / "model")
        again = load(tmp_path / "model")
        torch.testing.assert_close(again(**t5_batch()).logits, expected, rtol=1e-5, atol=1e-5)
    dense = AutoConfig.from_pretrained(tmp_path / "dense")
    assert again.config.dense.scale_decoder_outputs == dense.scale_decoder_outputs
    assert again.generate(**batch_of(some_ids(7, 4), "left"), num_beams=2, **GREEDY).shape == (2, 7)
    torch.save(t5_batch(), tmp_path / "batch.pt")
    files = [tmp_path / name for name in ("model", "batch.pt", "logits.pt")]
    warm.elsewhere(REMOTE, *files, folder=tmp_path)
    torch.testing.assert_close(torch.load(files[-1]), expected, rtol=1e-5, atol=1e-5)
