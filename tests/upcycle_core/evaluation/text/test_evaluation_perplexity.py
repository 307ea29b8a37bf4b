import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from tests.pico import VOCABULARY, pico_config
from upcycle_core.corpora.chat_template import Encoded
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.shards import write_split
from upcycle_core.errors import InputError
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.perplexity import (
    check_plain_head,
    score_model,
    score_of,
    scored_paragraphs,
    scored_text,
)
from upcycle_core.evaluation.text.scores import perplexity_per_reference_token

LENGTHS = (40, 3, 12, 70, 8, 33, 16)
CONFIG = EvaluationConfig(sequence_length=16, batch_size=3)


def make_corpus(directory: Path, lengths=LENGTHS, seed: int = 0) -> TokenCorpus:
    """Random documents of these many tokens; each token of document i stands for i + 2 bytes."""
    draw = np.random.default_rng(seed)
    documents = [
        (draw.integers(2, VOCABULARY, size), size * (i + 2)) for i, size in enumerate(lengths)
    ]
    write_split(directory, documents, eos_id=0, vocabulary_size=VOCABULARY)
    return TokenCorpus(directory)


def make_model(family: str = "llama", dtype=torch.float64) -> PreTrainedModel:
    """The same random weights whatever the type; mixtral has 4 experts, of which 2 are used."""
    if family == "mixtral":
        shape = pico_config("mistral").to_dict()
        shape = {name: shape[name] for name in shape if name not in ("model_type", "architectures")}
        config = MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2)
        config._experts_implementation = "eager"  # the other one has no fp64
    else:
        config = pico_config(family)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.dim() == 1))
    return model.to(dtype)


@pytest.fixture
def corpus(tmp_path) -> TokenCorpus:
    return make_corpus(tmp_path / "heldout")


def paragraph_texts(corpus: TokenCorpus, length: int) -> list[tuple[int, np.ndarray]]:
    """(document, tokens) of each paragraph; rests of fewer than 8 tokens are left out."""
    return [
        (i, corpus.document(i)[start : start + length])
        for i in range(len(corpus))
        for start in range(0, len(corpus.document(i)), length)
        if len(corpus.document(i)) - start >= 8
    ]


def slow_loss(model: PreTrainedModel, text: np.ndarray) -> float:
    """Loss of one paragraph, alone, token by token from the definition of a softmax."""
    ids = torch.from_numpy(text.astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0].double()
    total = 0.0
    for t in range(1, len(ids)):
        probabilities = torch.exp(logits[t - 1]) / torch.exp(logits[t - 1]).sum()
        total -= math.log(probabilities[ids[t]])
    return total


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "mixtral"])
def test_the_loss_equals_one_paragraph_at_a_time(family, corpus):
    model = make_model(family)
    texts = paragraph_texts(corpus, 16)
    score = score_model(model, corpus, config=CONFIG, pad_id=1)
    # fp64 model: what differs is the order of sums.
    assert score.nll == pytest.approx(sum(slow_loss(model, text) for _, text in texts), rel=1e-10)
    assert score.tokens == sum(len(text) - 1 for _, text in texts)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 64])
def test_the_loss_does_not_depend_on_the_batch_size(batch_size, corpus):
    model = make_model()
    expected = score_model(model, corpus, config=CONFIG, pad_id=1)
    config = EvaluationConfig(sequence_length=16, batch_size=batch_size)
    found = score_model(model, corpus, config=config, pad_id=1)
    assert found.nll == pytest.approx(expected.nll, rel=1e-10)
    assert (found.tokens, found.bytes) == (expected.tokens, expected.bytes)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_padding_does_not_reach_the_loss(family, corpus):
    model = make_model(family)
    config = EvaluationConfig(sequence_length=16, batch_size=64)
    one, other = (score_model(model, corpus, config=config, pad_id=i) for i in (1, 77))
    assert one.nll == pytest.approx(other.nll, rel=1e-12)


@pytest.mark.parametrize("batch_size", [2, 7])
def test_loss_on_responses_is_the_loss_of_their_tokens_alone(tmp_path, batch_size):
    draw = np.random.default_rng(3)
    documents = [
        (draw.integers(2, VOCABULARY, n), 3 * n, (draw.random(n) < 0.3).tolist()) for n in LENGTHS
    ]
    write_split(tmp_path / "chats", documents, eos_id=0, vocabulary_size=VOCABULARY)
    corpus, model = TokenCorpus(tmp_path / "chats"), make_model()
    config = EvaluationConfig(sequence_length=16, batch_size=batch_size, loss="responses")
    found = score_model(model, corpus, config=config, pad_id=1)
    nll, scored = 0.0, 0
    for ids, _, marks in documents:
        for start in range(0, len(ids), 16):
            text, wanted = ids[start : start + 16], marks[start : start + 16]
            if len(text) < 8:
                continue
            with torch.no_grad():
                logits = model(input_ids=torch.from_numpy(text)[None]).logits[0]
            for t in range(1, len(text)):
                if wanted[t]:
                    nll -= torch.log_softmax(logits[t - 1], 0)[text[t]].item()
                    scored += 1
    assert found.nll == pytest.approx(nll, rel=1e-10)
    assert found.tokens == scored > 20
    assert found.bytes == pytest.approx(3 * scored)


def test_responses_of_a_text_that_has_none_are_refused(tmp_path, corpus):
    config = EvaluationConfig(sequence_length=16, loss="responses")
    with pytest.raises(InputError, match="7 of its 7 documents do not say"):
        score_model(make_model(), corpus, config=config)
    silent = [(np.arange(2, 30), 28, [True] + [False] * 27)]
    write_split(tmp_path / "silent", silent, eos_id=0, vocabulary_size=VOCABULARY)
    with pytest.raises(InputError, match="no token to score"):  # nothing predicts the first one
        score_model(make_model(), TokenCorpus(tmp_path / "silent"), config=config)


def test_many_tokens_are_scored_in_parts(tmp_path, monkeypatch):
    corpus, model = make_corpus(tmp_path, lengths=(16,) * 10), make_model()
    expected = score_model(model, corpus, config=CONFIG, pad_id=1)
    monkeypatch.setattr("upcycle_core.evaluation.text.perplexity.TOKENS_AT_ONCE", 7)
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda _m, _i, out: seen.append(len(out)))
    found = score_model(model, corpus, config=CONFIG, pad_id=1)
    assert found.nll == pytest.approx(expected.nll, rel=1e-12)
    assert max(seen) == 7
    assert sum(seen) == 150


def test_bytes_are_those_of_the_scored_tokens(corpus):
    score = score_model(make_model(), corpus, config=CONFIG, pad_id=1)
    texts = paragraph_texts(corpus, 16)
    assert score.bytes == pytest.approx(sum((len(text) - 1) * (i + 2) for i, text in texts))


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_what_stands_before_a_text_has_no_bytes(tmp_path, prefix):
    draw = np.random.default_rng(1)
    documents = [
        Encoded([0] * prefix + draw.integers(2, VOCABULARY, n).tolist(), 5 * n, prefix=prefix)
        for n in (40, 12, 23)
    ]
    write_split(tmp_path / "text", documents, eos_id=0, vocabulary_size=VOCABULARY)
    corpus = TokenCorpus(tmp_path / "text")
    score = score_model(make_model(), corpus, config=CONFIG, pad_id=1)
    size = 0
    for document in documents:
        for place in range(len(document.ids)):
            start = place - place % 16
            read = min(16, len(document.ids) - start) >= 8
            size += 5 * (read and place > start and place >= prefix)
    assert score.bytes == pytest.approx(size)


def test_tokenizers_with_and_without_a_beginning_token_are_compared_fairly(tmp_path):
    scores = []
    for prefix in (0, 1):
        # One character of four bytes a token; every token costs the same.
        documents = [Encoded([1] * prefix + [5] * 12, 48, prefix=prefix)] * 3
        path = tmp_path / str(prefix)
        write_split(path, documents, eos_id=0, vocabulary_size=VOCABULARY)
        corpus = TokenCorpus(path)
        pieces = scored_paragraphs(corpus, CONFIG)
        scores.append(score_of(3 * (11 + prefix) * math.log(10), corpus, pieces, CONFIG))
    plain, begun = scores
    assert begun.bits_per_byte == pytest.approx(plain.bits_per_byte) == math.log2(10) / 4
    assert perplexity_per_reference_token(begun, plain) == pytest.approx(10)


def test_evaluation_stops_with_the_paragraph_that_reaches_the_limit(corpus):
    config = EvaluationConfig(sequence_length=16, batch_size=3, tokens=45)
    model = make_model()
    score = score_model(model, corpus, config=config, pad_id=1)
    first = paragraph_texts(corpus, 16)[:4]  # 16 + 16 + 8 + 12 tokens
    assert score.tokens == sum(len(text) - 1 for _, text in first)
    assert score.nll == pytest.approx(sum(slow_loss(model, text) for _, text in first), rel=1e-10)
    assert score.bytes == pytest.approx(15 * 2 + 15 * 2 + 7 * 2 + 11 * 4)


@pytest.mark.parametrize("prefix", [0, 1])
def test_what_is_scored_is_told_document_by_document_in_bytes(tmp_path, prefix):
    lengths = (3, 20, 5, 40, 33)
    documents = [Encoded([9] * (prefix + n), 4 * n, prefix=prefix) for n in lengths]
    write_split(tmp_path / "text", documents, eos_id=0, vocabulary_size=VOCABULARY)
    corpus = TokenCorpus(tmp_path / "text")
    assert scored_text(corpus, CONFIG) == {1: 80, 3: 160, 4: 132}
    # The second paragraph of the document of 40 tokens reaches the limit.
    config = EvaluationConfig(sequence_length=16, tokens=40)
    assert scored_text(corpus, config) == {1: 80, 3: 4 * (32 - prefix)}


def test_fp32_and_bf16_come_close(corpus):
    exact = score_model(make_model(), corpus, config=CONFIG, pad_id=1).nll
    fp32 = score_model(make_model(dtype=torch.float32), corpus, config=CONFIG, pad_id=1).nll
    bf16 = score_model(make_model(dtype=torch.bfloat16), corpus, config=CONFIG, pad_id=1).nll
    assert fp32 == pytest.approx(exact, rel=1e-5)  # 1e-7 a token
    assert bf16 == pytest.approx(exact, rel=2e-2)  # 4e-3 a logit


def test_losses_of_an_fp32_model_are_summed_in_fp64(corpus, monkeypatch):
    losses = []
    cross_entropy = torch.nn.functional.cross_entropy

    def recording(*args, **options):
        losses.append(cross_entropy(*args, **options))
        return losses[-1]

    monkeypatch.setattr(
        "upcycle_core.evaluation.text.perplexity.functional.cross_entropy", recording
    )
    found = score_model(make_model(dtype=torch.float32), corpus, config=CONFIG, pad_id=1)
    assert found.nll == pytest.approx(math.fsum(torch.cat(losses).tolist()), rel=1e-14)


def test_progress_counts_every_scored_token(corpus):
    class Counting:
        total = 0
        done = 0

        def start(self, what, total, unit="steps"):
            self.total = total

        def advance(self, amount=1, **shown):
            self.done += amount
            self.loss = shown["loss"]

        def metrics(self, values, step): ...

    progress = Counting()
    score = score_model(make_model(), corpus, config=CONFIG, pad_id=1, progress=progress)
    assert progress.done == progress.total == score.tokens
    assert progress.loss == pytest.approx(score.nll / score.tokens)


def test_text_without_a_token_to_score_is_an_error(tmp_path):
    corpus = make_corpus(tmp_path, lengths=(3, 7))
    with pytest.raises(InputError, match="no token to score"):
        score_model(make_model(), corpus, config=CONFIG, pad_id=1)


def test_a_model_that_yields_nan_is_an_error(corpus):
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    with pytest.raises(InputError, match="not finite"):
        score_model(model, corpus, config=CONFIG, pad_id=1)


def test_models_that_scale_their_logits_are_refused():
    from transformers import CohereConfig, CohereForCausalLM

    shape = pico_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = CohereConfig(
        **{name: shape[name] for name in names},
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.0625,
    )
    torch.manual_seed(0)
    with pytest.raises(InputError, match="plain linear head"):
        check_plain_head(CohereForCausalLM(config).eval())
    check_plain_head(make_model())


def test_losses_of_documents_add_up_and_are_each_document_s_own(corpus, tmp_path):
    model = make_model()
    found = score_model(model, corpus, config=CONFIG)
    assert sum(found.document_nll) == pytest.approx(found.nll, rel=1e-12)
    assert sum(found.document_tokens) == found.tokens
    scored = [i for i, _ in paragraph_texts(corpus, CONFIG.sequence_length)]
    assert list(found.document_indices) == sorted(set(scored))
    alone = make_corpus(tmp_path / "alone", LENGTHS[:1])  # the same draw: the first document
    own = score_model(model, alone, config=CONFIG)
    assert found.document_nll[0] == pytest.approx(own.nll, rel=1e-9)
    assert found.document_tokens[0] == own.tokens
