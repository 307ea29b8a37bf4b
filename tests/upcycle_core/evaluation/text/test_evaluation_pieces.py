import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, CohereConfig, CohereForCausalLM

from tests.pico import VOCABULARY, save_pico
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.chat_template import Encoded
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.shards import write_split
from upcycle_core.errors import InputError
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.perplexity import score_model
from upcycle_core.evaluation.text.pieces import (
    Variant,
    evaluate_checkpoint,
    evaluate_moe,
    evaluate_stitched,
    evaluate_text,
)
from upcycle_core.evaluation.text.scores import Score, perplexity_per_reference_token
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.inspect import force_expert
from upcycle_core.moe.random import random_routers

CONFIG = EvaluationConfig(sequence_length=16, batch_size=3)
DOMAINS = ("law", "code", "history")


class Bench:
    """Three experts, their backbone, a MoE with random routers, held-out text of two domains."""

    def __init__(self, folder: Path) -> None:
        self.experts = {d: save_pico(folder / d, seed=i) for i, d in enumerate(DOMAINS)}
        self.backbone = folder / "backbone"
        readers = [CheckpointReader(path) for path in self.experts.values()]
        write_backbone(readers, self.backbone, max_shard_bytes=10**9)
        self.moe = folder / "moe"
        self.routers = random_routers(2, 32, 3, seed=5)
        assemble(
            self.experts, self.backbone, self.routers, self.moe, top_k=1, max_shard_bytes=10**9
        )
        draw = np.random.default_rng(0)
        self.corpora = {}
        for domain in DOMAINS[:2]:
            self.corpora[domain] = folder / f"text-{domain}"
            documents = [(draw.integers(2, VOCABULARY, n), 3 * n) for n in (40, 21, 12, 9)]
            write_split(self.corpora[domain], documents, eos_id=0, vocabulary_size=VOCABULARY)


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def losses(scores: dict) -> list[float]:
    return [score["nll"] for score in scores.values()]


def test_a_checkpoint_is_scored_on_every_domain(bench):
    found = evaluate_checkpoint(bench.experts["code"], bench.corpora, config=CONFIG)
    model = AutoModelForCausalLM.from_pretrained(bench.experts["code"]).eval()
    assert list(found) == ["law", "code"]
    for domain, score in json.loads(json.dumps(found)).items():
        corpus = TokenCorpus(bench.corpora[domain])
        expected = score_model(model, corpus, config=CONFIG, pad_id=1)
        assert score["nll"] == pytest.approx(expected.nll, rel=1e-7)
        assert Score.from_dict(score).tokens == expected.tokens


def test_a_checkpoint_that_scales_its_logits_is_refused(bench, tmp_path):
    config = CohereConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.0625,
    )
    CohereForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="plain linear head"):
        evaluate_checkpoint(tmp_path, bench.corpora, config=CONFIG)


def test_the_oracle_is_the_moe_with_one_expert_forced(bench):
    model = load_causal_lm(bench.moe)
    for index, domain in enumerate(DOMAINS):
        found = evaluate_stitched(
            bench.backbone, bench.experts[domain], bench.corpora, config=CONFIG
        )
        with force_expert(model, index):
            for name, corpus in bench.corpora.items():
                forced = score_model(model, TokenCorpus(corpus), config=CONFIG, pad_id=1)
                # Measured 0.0 at equal shapes; the order of products may differ.
                assert found[name]["nll"] == pytest.approx(forced.nll, rel=1e-6)


def test_variants_change_routers_and_k_and_leave_no_trace(bench):
    other = random_routers(2, 32, 3, seed=6)
    variants = {
        "first": Variant(),
        "other": Variant(routers=other),
        "one layer": Variant(routers={1: other[1]}),
        "k3": Variant(top_k=3),
        "again": Variant(),
    }
    found = evaluate_moe(bench.moe, variants, bench.corpora, config=CONFIG)
    assert found == json.loads(json.dumps(found))
    assert found["again"] == found["first"]
    for name in ("other", "one layer", "k3"):
        assert losses(found[name]["scores"]) != losses(found["first"]["scores"])
    assert losses(found["one layer"]["scores"]) != losses(found["other"]["scores"])


def test_variants_equal_moes_assembled_so(bench, tmp_path):
    other = random_routers(2, 32, 3, seed=6)
    assemble(bench.experts, bench.backbone, other, tmp_path / "moe", top_k=2, max_shard_bytes=10**9)
    expected = evaluate_checkpoint(tmp_path / "moe", bench.corpora, config=CONFIG)
    found = evaluate_moe(
        bench.moe, {"v": Variant(routers=other, top_k=2)}, bench.corpora, config=CONFIG
    )
    assert found["v"]["scores"] == expected


@pytest.mark.parametrize("k", [1, 2])
def test_routing_counts_every_token_k_times_and_no_padding(bench, k):
    found = evaluate_moe(bench.moe, {"v": Variant(top_k=k)}, bench.corpora, config=CONFIG)
    model = AutoModelForCausalLM.from_pretrained(bench.moe, num_experts_per_tok=k).eval()
    for domain, directory in bench.corpora.items():
        corpus = TokenCorpus(directory)
        expected = torch.zeros(2, 3, dtype=torch.int64)
        for i in range(len(corpus)):
            for start in range(0, len(corpus.document(i)), 16):
                text = corpus.document(i)[start : start + 16].astype(np.int64)
                if len(text) < 8:
                    continue
                with torch.no_grad():
                    logits = model(
                        input_ids=torch.from_numpy(text)[None], output_router_logits=True
                    ).router_logits
                for layer, logits_TD in enumerate(logits):
                    for row in logits_TD:
                        expected[layer, row.topk(k).indices] += 1
        assert found["v"]["routing"][domain] == expected.tolist()


def test_top_k_beyond_the_experts_is_an_error(bench):
    with pytest.raises(InputError, match="top_k"):
        evaluate_moe(bench.moe, {"v": Variant(top_k=4)}, bench.corpora, config=CONFIG)


def write_texts(path: Path, texts: list[str]) -> Path:
    parquet.write_table(pa.table({"text": texts}), path)
    return path


TEXTS = ["the first document of some length", "a second one, shorter", "and the third of them all"]


def test_text_is_scored_with_the_model_s_own_tokenizer(bench, tmp_path):
    path = write_texts(tmp_path / "heldout.parquet", TEXTS)
    found = evaluate_text(bench.experts["law"], {"law": path}, config=CONFIG)["law"]
    # The pico tokenizer's tokens are single characters: ids follow the code points.
    documents = [([2 + ord(c) - 32 for c in text], len(text)) for text in TEXTS]
    write_split(tmp_path / "split", documents, eos_id=0, vocabulary_size=VOCABULARY)
    expected = evaluate_checkpoint(
        bench.experts["law"], {"law": tmp_path / "split"}, config=CONFIG
    )["law"]
    assert found == expected


def test_what_the_tokenizer_puts_before_a_text_is_read_unless_it_is_refused(bench, tmp_path):
    adding = shutil.copytree(bench.experts["law"], tmp_path / "adding")
    tokenizer = AutoTokenizer.from_pretrained(adding)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save_pretrained(adding)
    assert AutoTokenizer.from_pretrained(adding)("a")["input_ids"] == [0, 67]
    path = write_texts(tmp_path / "heldout.parquet", TEXTS)
    never = evaluate_text(adding, {"law": path}, config=CONFIG, bos="never")
    assert never == evaluate_text(bench.experts["law"], {"law": path}, config=CONFIG)
    found = evaluate_text(adding, {"law": path}, config=CONFIG)["law"]
    documents = [
        Encoded([0, *(2 + ord(c) - 32 for c in text)], len(text), prefix=1) for text in TEXTS
    ]
    write_split(tmp_path / "split", documents, eos_id=0, vocabulary_size=VOCABULARY)
    assert found == evaluate_checkpoint(adding, {"law": tmp_path / "split"}, config=CONFIG)["law"]


def test_chats_are_written_by_the_model_s_own_template_or_read_as_text(bench, tmp_path):
    messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
    table = {"text": ["one two\n\nthree"] * 2, "messages": [json.dumps(messages)] * 2}
    parquet.write_table(pa.table(table), tmp_path / "chats.parquet")
    given = {"law": tmp_path / "chats.parquet"}
    plain = write_texts(tmp_path / "plain.parquet", table["text"])
    without = evaluate_text(bench.experts["law"], given, config=CONFIG)
    assert without == evaluate_text(bench.experts["law"], {"law": plain}, config=CONFIG)
    chatting = shutil.copytree(bench.experts["law"], tmp_path / "chatting")
    tokenizer = AutoTokenizer.from_pretrained(chatting)
    tokenizer.chat_template = "{% for m in messages %}({{ m['content'] }}){% endfor %}" + (
        "{% if add_generation_prompt %}({% endif %}"
    )
    tokenizer.save_pretrained(chatting)
    written = "(one two)(three)"
    documents = [([2 + ord(c) - 32 for c in written], 14) for _ in range(2)]
    write_split(tmp_path / "split", documents, eos_id=0, vocabulary_size=VOCABULARY)
    own = {"law": tmp_path / "split"}
    found = evaluate_text(chatting, given, config=CONFIG)
    assert found == evaluate_checkpoint(chatting, own, config=CONFIG)
    whole = evaluate_text(chatting, given, config=CONFIG, parts={"law": {1: 3}})["law"]
    assert whole["document_indices"] == [1]
    assert whole["tokens"] == found["law"]["tokens"] / 2
    config = EvaluationConfig(sequence_length=16, batch_size=3, loss="responses")
    responses = evaluate_text(chatting, given, config=config)["law"]
    assert responses["tokens"] == 2 * len("three)")
    with pytest.raises(InputError, match="do not say which of their tokens are responses"):
        evaluate_text(bench.experts["law"], given, config=config)


def test_chosen_documents_are_read_up_to_their_bytes_whatever_the_token_limit(bench, tmp_path):
    path = write_texts(tmp_path / "heldout.parquet", TEXTS)
    cut = write_texts(tmp_path / "cut.parquet", [TEXTS[0], TEXTS[2][:12]])
    config = EvaluationConfig(sequence_length=16, batch_size=3, tokens=8)
    found = evaluate_text(
        bench.experts["law"],
        {"law": path},
        config=config,
        parts={"law": {0: len(TEXTS[0]), 2: 12}},
    )
    expected = evaluate_text(bench.experts["law"], {"law": cut}, config=CONFIG)["law"]
    assert found == {"law": {**expected, "document_indices": [0, 2]}}


def test_a_tokenizer_of_its_own_scores_like_the_corpus_s(bench, tmp_path):
    """The same text and tokenizer by both ways: the same perplexity a token."""
    path = write_texts(tmp_path / "heldout.parquet", TEXTS)
    score = evaluate_text(bench.experts["law"], {"law": path}, config=CONFIG)["law"]
    own = Score.from_dict(score)
    reference = Score(nll=0.0, tokens=own.tokens, bytes=own.bytes)
    assert perplexity_per_reference_token(own, reference) == pytest.approx(own.perplexity)
