import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.pico import save_pico_tokenizer
from tests.upcycle_core.simoe.grown import FAMILIES, batch_of, grown, save_dense, some_ids
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError
from upcycle_core.simoe import prune as pruning
from upcycle_core.simoe.model import gated_modules
from upcycle_core.simoe.prune import prune, save_pruned

NEVER = -5.0


def sparse(dense: Path, **settings):
    """Half of the inputs unused by all experts; all of them in two layers, none in another."""
    model = grown(dense, **settings)
    for number, module in enumerate(gated_modules(model).values()):
        unused = torch.rand(module.inputs) < 0.5
        if number in (1, 8):
            unused[:] = True
        if number == 2:
            unused[:] = False
            module.log_phi.data[:] = 0.1
        module.log_phi.data[..., unused] = 0.0 if module.is_real else NEVER
    return model


def logits_of(model, **kwargs):
    with torch.no_grad():
        return model(**batch_of(some_ids(9, 6), "left"), **kwargs).logits


def file_size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


@pytest.mark.parametrize("masks", ["neurons", "parameters", "real"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pruned_model_computes_the_same(tmp_path, family, masks):
    save_dense(tmp_path, family)
    model = sparse(tmp_path, masks=masks, experts=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits_of(model)
    pruned = prune(model)
    torch.testing.assert_close(logits_of(pruned), expected, rtol=1e-5, atol=1e-6)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    modules, small = gated_modules(model), gated_modules(pruned)
    assert list(modules) == list(small)
    for number, (name, module) in enumerate(modules.items()):
        used = (module.masks() != 0).reshape(-1, module.inputs).any(0)
        count = int(used.sum())
        assert pruned.config.kept[name] == count
        assert count == {1: 0, 8: 0, 2: module.inputs}.get(number, count)
        rows = () if module.outputs is None else (module.outputs,)
        assert tuple(small[name].delta.shape) == (*rows, count)
        assert small[name].index.tolist() == used.nonzero()[:, 0].tolist()
        assert small[name].masks().shape[-1] == count
        assert small[name].weights_per_gate == module.weights_per_gate
    assert not any(name.endswith("log_phi") for name in pruned.state_dict())
    with torch.no_grad():
        for module in small.values():
            module.base.weight.add_(1)
    assert torch.equal(logits_of(model), expected)  # nothing shared


def test_a_pruned_model_of_tokens_computes_the_same(tmp_path):
    model = sparse(save_dense(tmp_path, "qwen3"), routing="token")
    torch.testing.assert_close(logits_of(prune(model)), logits_of(model), rtol=1e-5, atol=1e-6)


def test_pruned_weights_can_be_trained_on(tmp_path):
    pruned = prune(sparse(save_dense(tmp_path)))
    batch = batch_of(some_ids(9), "right")
    pruned.train()(**batch, labels=batch["input_ids"]).loss.backward()
    for name, parameter in pruned.named_parameters():
        trained = name.endswith("delta") or name.startswith("router")
        assert parameter.requires_grad is trained
        if trained and parameter.numel():
            assert parameter.grad.any(), name


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_saved_loads_strictly_and_is_smaller(tmp_path, tied):
    dense, out = tmp_path / "dense", tmp_path / "out"
    save_pico_tokenizer(save_dense(dense, tie_word_embeddings=tied))
    model = sparse(dense, lm_head=True)
    model.save_pretrained(tmp_path / "whole")
    save_pruned(model, dense, out)
    again = load_causal_lm(out)
    assert torch.equal(logits_of(again), logits_of(prune(model)))
    assert {p.name for p in tmp_path.iterdir()} == {"dense", "out", "whole"}
    weights = load_file(out / "model.safetensors")
    saved = sum(t.numel() for t in weights.values())
    kept = json.loads((out / "config.json").read_text())["kept"]
    added = sum(
        (module.outputs or 1) * kept[name] + 9 * kept[name]  # delta, index and 8 masks
        for name, module in gated_modules(model).items()
    )
    pretrained = sum(p.numel() for p in load_causal_lm(dense).parameters())
    assert saved == pretrained + added + sum(p.numel() for p in model.router.parameters())
    assert file_size(out) < 0.8 * file_size(tmp_path / "whole")
    assert (out / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()
    assert load_causal_lm(out).generation_config.pad_token_id == 1
    save_pruned(again, dense, tmp_path / "twice")
    assert torch.equal(logits_of(load_causal_lm(tmp_path / "twice")), logits_of(again))
    content = bytearray((out / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (out / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: was altered"):
        load_causal_lm(out)


def test_files_are_as_large_as_asked_and_all_are_checked(tmp_path):
    dense, out = tmp_path / "dense", tmp_path / "out"
    save_pico_tokenizer(save_dense(dense))
    model = sparse(dense)
    save_pruned(model, dense, out, max_shard_bytes=40_000)
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        sizes = [tensor.nbytes for tensor in load_file(shard).values()]
        assert sum(sizes) <= 40_000 or len(sizes) == 1
    assert torch.equal(logits_of(load_causal_lm(out)), logits_of(prune(model)))
    content = bytearray(shards[-1].read_bytes())
    content[-1] ^= 1
    shards[-1].write_bytes(content)
    with pytest.raises(ValueError, match=f"{shards[-1].name}: was altered"):
        load_causal_lm(out)


def test_nothing_is_left_half_written(tmp_path, monkeypatch):
    dense, out = tmp_path / "dense", tmp_path / "out"
    save_pico_tokenizer(save_dense(dense))
    model = sparse(dense)
    with monkeypatch.context() as patched:
        patched.setattr(pruning, "sync_file", lambda file: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_pruned(model, dense, out)
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        save_pruned(model, dense, out)
    with pytest.raises(InputError, match="which is only read"):
        save_pruned(model, dense, dense / "inside")
    (out / "notes.txt").unlink()
    save_pruned(model, dense, out)
    assert (out / "checksums.json").is_file()


REMOTE = """
import sys
sys.path = [p for p in sys.path if p]
sys.modules["upcycle_core"] = None  # cannot be imported
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], trust_remote_code=True, local_files_only=True, output_loading_info=True,
)
assert not any(info.values()), info
AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
batch = torch.load(sys.argv[2])
with torch.no_grad():
    torch.save(model(**batch, use_cache=False).logits, sys.argv[3])
model.generate(**batch, max_new_tokens=3, num_beams=2)
model.save_pretrained(sys.argv[4])
"""


def test_it_loads_elsewhere_with_the_code_beside_its_weights(tmp_path):
    save_pico_tokenizer(save_dense(tmp_path / "dense"))
    model = sparse(tmp_path / "dense")
    save_pruned(model, tmp_path / "dense", tmp_path / "model")
    torch.save(batch_of(some_ids(9, 6), "left"), tmp_path / "batch.pt")
    files = [tmp_path / name for name in ("model", "batch.pt", "logits.pt", "saved")]
    warm.elsewhere(REMOTE, *files, folder=tmp_path)
    # The other process computes with as many threads as it likes.
    elsewhere = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(elsewhere, logits_of(model), rtol=1e-5, atol=1e-5)
    source = Path(pruning.__file__).parent / "model"
    for file in source.glob("*_simoe.py"):
        if file.name != "seq2seq_simoe.py":
            assert (tmp_path / "saved" / file.name).read_text() == file.read_text()
    assert torch.equal(logits_of(load_causal_lm(tmp_path / "saved")), logits_of(prune(model)))
