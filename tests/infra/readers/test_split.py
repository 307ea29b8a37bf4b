"""How a GGUF file's text is cut into tokens, beside what llama.cpp makes of the same file."""

import argparse
import inspect
import json
import subprocess
from pathlib import Path

import pytest
from forms import save_bpe_model, save_gguf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from infra.readers.environments import HERE, LLAMA_CPP
from upcycle_core.given.gguf_file import open_gguf, write_gguf

ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import xllamacpp
from ask_llama_cpp import _ids, build_opener, ProxyHandler, Request
said = {}
def whole(server, text):
    asked = json.dumps({"content": text, "add_special": True, "parse_special": False}).encode()
    kind = {"Content-Type": "application/json"}
    request = Request(server.listening_address + "/tokenize", asked, kind)
    return json.load(build_opener(ProxyHandler({})).open(request))["tokens"]
for name, path in json.load(open(sys.argv[2])).items():
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup = path, 64, False
    params.cpuparams.n_threads = 1
    server, text = xllamacpp.Server(params), open(sys.argv[3]).read()
    said[name] = [_ids(server, text), whole(server, text)]
print(json.dumps(said))
"""
MIXED = "HelloWorld ABCdef a/b// c/\n 12345 2024-11-25 it's IT'S  \n\n\t x\n  y iPhone XMLHttp 7 "
WORDS = 4000
WAYS = ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose merges know no words, so that nothing but the cuts keeps them apart."""
    text = inspect.getsource(argparse) + 50 * MIXED
    directory = tmp_path_factory.mktemp("split") / "model"
    save_bpe_model(directory, [text], vocab_size=WORDS)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(text.splitlines(keepends=True), trainer)
    assert core.get_vocab_size() == WORDS
    PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    ).save_pretrained(directory)
    return directory


@pytest.mark.faults
def test_llama_cpp_cuts_text_into_the_same_tokens(model, tmp_path):
    text = MIXED + inspect.getsource(argparse)[:5000]
    files, ours = {}, {}
    for way in WAYS:
        files[way] = str(save_gguf(tmp_path / f"{way}.gguf", model, split=way))
        out = tmp_path / way
        out.mkdir()
        write_gguf(open_gguf(Path(files[way])), out)
        tokenizer = AutoTokenizer.from_pretrained(out)
        ours[way] = [tokenizer.encode(text, add_special_tokens=begins) for begins in (False, True)]
    (tmp_path / "files.json").write_text(json.dumps(files))
    (tmp_path / "text").write_text(text)
    command = [LLAMA_CPP.python, "-c", ASK, HERE / "ask", tmp_path / "files.json"]
    said = subprocess.run(
        [*command, tmp_path / "text"], check=True, capture_output=True, text=True, timeout=300
    )
    assert json.loads(said.stdout) == ours
    assert len({tuple(ids) for ids, _ in ours.values()}) == len(WAYS)
    begun = {way for way, (ids, whole) in ours.items() if whole != ids}
    assert begun == {"llama-bpe", "tekken"}
