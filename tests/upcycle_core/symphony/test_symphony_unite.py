"""Dense models lifted to one vocabulary: what they keep, and who takes them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.pico import save_pico
from tests.upcycle_core.symphony.disparate import RULING, save_disparate, united, weights_of
from tests.vocabularies import CODE, core_of, tokens_of
from upcycle_core.architectures.compare import compare_experts
from upcycle_core.backbone.average import write_average
from upcycle_core.backbone.stitch import load_stitched
from upcycle_core.baselines.mixture import write_mixture
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import token_ids, vocabulary_fingerprint
from upcycle_core.errors import InputError
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.inspect import force_expert
from upcycle_core.symphony.config import MergeConfig
from upcycle_core.symphony.merge import write_merged_backbone
from upcycle_core.symphony.unite import shared_tokens, write_united

VOCABULARY_ROWS = ("model.embed_tokens.weight", "lm_head.weight")
FAMILIES = [
    ("llama", True),
    ("llama", False),
    ("mistral", False),
    ("qwen2", True),
    ("qwen3", False),
]


class Lifted:
    """Three models, their backbone and each model over the union's vocabulary."""

    def __init__(self, folder: Path, family: str, *, tied: bool, embeddings: str) -> None:
        self.folder = folder
        overrides = {"tie_word_embeddings": tied, "intermediate_size": 64}
        self.models = save_disparate(folder, family, **overrides)
        self.backbone = folder / "backbone"
        self.lifted = {name: folder / f"lifted-{name}" for name in self.models}
        write_merged_backbone(
            self.models,
            united(self.models),
            self.backbone,
            config=MergeConfig(embeddings=embeddings),
            anchor="alpha",
            max_shard_bytes=20_000,
        )
        for name, model in self.models.items():
            write_united(model, self.backbone, self.lifted[name], max_shard_bytes=20_000)


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def case(request, tmp_path_factory) -> Lifted:
    family, tied = request.param
    return Lifted(tmp_path_factory.mktemp(family), family, tied=tied, embeddings="mean")


def test_a_lifted_model_is_its_own_but_for_the_merged_rows(case):
    merged = weights_of(case.backbone)
    for name, model in case.models.items():
        own, lifted = weights_of(model), weights_of(case.lifted[name])
        assert own.keys() == lifted.keys()
        for tensor in own:
            expected = merged if tensor in VOCABULARY_ROWS else own
            assert torch.equal(lifted[tensor], expected[tensor]), tensor
        assert vocabulary_fingerprint(case.lifted[name]) == vocabulary_fingerprint(case.backbone)


def test_lifted_models_fit_together_and_their_mean_has_the_merged_rows(case):
    readers = {name: CheckpointReader(path) for name, path in case.lifted.items()}
    tokens = {name: token_ids(path) for name, path in case.lifted.items()}
    assert compare_experts(readers, tokens) == []
    write_average(list(readers.values()), case.folder / "three", max_shard_bytes=10**9)
    write_average(list(readers.values())[:2], case.folder / "two", max_shard_bytes=10**9)
    three, two, merged = (
        weights_of(path) for path in (case.folder / "three", case.folder / "two", case.backbone)
    )
    for name in merged.keys() & set(VOCABULARY_ROWS):
        assert torch.equal(two[name], merged[name])
        torch.testing.assert_close(three[name], merged[name], rtol=2e-7, atol=0)


@torch.no_grad()
def test_a_moe_of_lifted_models_computes_what_each_computes_on_the_backbone(case):
    routers = {layer: torch.randn(32, 3, dtype=torch.float64) for layer in range(2)}
    out = case.folder / "moe"
    assemble(case.lifted, case.backbone, routers, out, top_k=1, max_shard_bytes=10**9)
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    moe = load_causal_lm(out)
    size = len(tokens_of(case.backbone))
    assert moe.config.vocab_size == size
    ids = torch.arange(48).view(4, 12) * 13 % size
    for index, path in enumerate(case.lifted.values()):
        expected = load_stitched(case.backbone, path)(input_ids=ids).logits
        with force_expert(moe, index):
            torch.testing.assert_close(moe(input_ids=ids).logits, expected, rtol=0, atol=1e-5)


def test_a_rival_takes_them_as_experts_of_one_seed(case):
    out = case.folder / "btx"
    write_mixture(case.lifted, out, top_k=2, router_seed=0, max_shard_bytes=10**9)
    size = len(tokens_of(case.backbone))
    assert load_causal_lm(out)(input_ids=torch.tensor([[size - 1, 0]])).logits.shape[-1] == size


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_the_anchor_with_its_own_rows_says_of_its_tokens_what_it_said(tmp_path, tied):
    case = Lifted(tmp_path, "qwen3", tied=tied, embeddings="anchor")
    own, union = (tokens_of(path) for path in (case.models["alpha"], case.backbone))
    texts = sorted(own)
    ids = core_of(case.models["alpha"]).encode(CODE).ids
    bytes_of = {id: text for text, id in own.items()}
    there = [union[bytes_of[id]] for id in ids]
    assert ids != there
    before = load_causal_lm(case.models["alpha"])(input_ids=torch.tensor([ids])).logits
    after = load_causal_lm(case.lifted["alpha"])(input_ids=torch.tensor([there])).logits
    before, after = (
        logits[..., [table[text] for text in texts]]
        for logits, table in ((before, own), (after, union))
    )
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


def test_shared_tokens_are_pairs_of_ids_of_the_same_bytes(tmp_path):
    models = save_disparate(tmp_path)
    union = united(models)
    tables = [tokens_of(directory) for directory in models.values()]
    for first, second in [(0, 1), (2, 0), (1, 1)]:
        ours, theirs = shared_tokens(union, first, second)
        assert ours.dtype == theirs.dtype == torch.int64
        both = tables[first].keys() & tables[second].keys()
        expected = {(tables[first][text], tables[second][text]) for text in both}
        assert set(zip(ours.tolist(), theirs.tolist(), strict=True)) == expected
        assert len(ours) == len(expected)


def test_models_that_do_not_fit_the_backbone_are_refused(tmp_path):
    case = Lifted(tmp_path, "llama", tied=True, embeddings="mean")
    untied = save_pico(tmp_path / "untied", num_hidden_layers=1)
    with pytest.raises(InputError) as error:
        write_united(untied, case.backbone, tmp_path / "out", max_shard_bytes=10**9)
    assert [fault.field for fault in error.value.faults] == [
        f"model.config.{name}"
        for name in ("tie_word_embeddings", "intermediate_size", "num_hidden_layers")
    ]
    with pytest.raises(InputError, match=r"backbone = .*mlp\.gate_proj\.weight"):
        write_united(case.models[RULING], case.models[RULING], tmp_path / "o", max_shard_bytes=9)
    assert not (tmp_path / "out").exists()
