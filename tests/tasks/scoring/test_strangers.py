"""Another model's scores on this run's text, where its tokenizer is another one."""

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from chat import save_chat_tokenizer
from pico import save_pico, save_pico_tokenizer
from transformers import AutoModelForCausalLM

from tasks.scoring.evaluation import HELDOUT, stranger_piece
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.shards import write_corpus
from upcycle_core.errors import InputError
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.perplexity import score_model
from upcycle_core.progress import Silent


def test_responses_are_not_compared_across_tokenizers(tmp_path):
    model = save_pico(tmp_path / "model")
    with pytest.raises(InputError, match=r"evaluation\.loss = 'responses': .*another tokenizer"):
        stranger_piece(
            out=tmp_path / "out",
            progress=Silent(),
            model=model,
            tokenizer=save_chat_tokenizer(tmp_path / "tokenizer", "chatml"),
            documents={},
            corpora={},
            reference={},
            bos="auto",
            config=EvaluationConfig(loss="responses"),
            device="cpu",
        )


SHORT, LONG = "brief", "a document of {n} and some more words than are read"
TEXTS = [SHORT, LONG.format(n=1), SHORT, SHORT, LONG.format(n=2), SHORT, LONG.format(n=3)]


def write_heldout(folder):
    """Documents of which the short ones have no paragraph."""
    folder.mkdir()
    parquet.write_table(pa.table({"text": TEXTS}), folder / "heldout.parquet")
    facts = {"splits": {"heldout": {"documents": len(TEXTS)}}}
    (folder / "manifest.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("tokens", [None, 80])
def test_another_tokenizer_is_given_the_documents_that_the_reference_reads(tmp_path, tokens):
    model = save_pico(tmp_path / "model", vocab_size=97)
    tokenizer = save_pico_tokenizer(tmp_path / "tokenizer")  # a character a token, too
    documents = write_heldout(tmp_path / "documents")
    write_corpus(documents, tokenizer, tmp_path / "corpus")
    config = EvaluationConfig(sequence_length=16, batch_size=3, tokens=tokens)
    own = AutoModelForCausalLM.from_pretrained(model).eval()
    corpora = {"law": tmp_path / "corpus" / "heldout"}
    reference = score_model(own, TokenCorpus(corpora["law"]), config=config, pad_id=1)
    found = stranger_piece(
        out=tmp_path / "out",
        progress=Silent(),
        model=model,
        tokenizer=tokenizer,
        documents={"law": documents / HELDOUT},
        corpora=corpora,
        reference={"law": reference.to_dict()},
        bos="auto",
        config=config,
        device="cpu",
    )["law"]
    losses, left = {}, tokens or 10**9
    for place, text in enumerate(TEXTS):
        ids = torch.tensor([2 + ord(c) - 32 for c in text])
        for start in range(0, len(ids), 16):
            part = ids[start : start + 16]
            if len(part) < 8 or left <= 0:
                continue
            left -= len(part)
            with torch.no_grad():
                logits = own(input_ids=part[None]).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
            losses[place] = losses.get(place, 0.0) + loss
    assert found["document_indices"] == list(losses) == ([1, 4, 6] if tokens is None else [1, 4])
    # fp32: the order of products in a batch.
    assert found["document_nll"] == pytest.approx(list(losses.values()), rel=1e-5)
    assert found["nll"] == pytest.approx(sum(losses.values()), rel=1e-5)
    assert found["tokens"] == reference.tokens
