"""The page's server as a browser meets it: over HTTP, in a process of its own."""

import asyncio
import contextlib
import json
import re
import signal
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import torch
from talking import CONTEXT, DOMAINS, LAYERS, register, save_talkative, talk
from transformers import AutoTokenizer

from flows.chat import listening, main
from flows.running.registered import Registered, load
from flows.talking.app import make_app
from flows.talking.prompts import example_prompts
from flows.talking.speaker import Question, Speaker, expert_names
from infra.recipe.schema import ADAPTER
from infra.services.stopping import LINE
from infra.tracking.records import Version
from tasks.release.versions import COMPRESSED_TAG
from tasks.scoring.architectures import register_architectures
from tests.pico import save_pico
from tests.upcycle_core.ders import grown as ders
from tests.upcycle_core.simoe.grown import grow
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.corpora.config import CorpusConfig, Domain, Source
from upcycle_core.corpora.documents import write_documents
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig
from upcycle_core.errors import InputError
from upcycle_core.moe.trace import Routing
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.prune import save_pruned
from upcycle_core.simoe.upcycle import upcycle_in_memory

GREEDY = {"temperature": 0, "tokens": 20}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def model(home, tmp_path_factory):
    path = save_talkative(tmp_path_factory.mktemp("model"))
    register(home, "upcycle-pico", path, domains=DOMAINS)
    return path


@pytest.fixture(scope="module")
def page(home, model):
    with talk(home, "upcycle-pico") as served:
        yield served


def about(served):
    connection, answer = served.request("GET", "/about")
    with contextlib.closing(connection):
        return json.load(answer)


def text_of(events, *, given=False):
    return "".join(e["text"] for e in events if e["is"] == "token" and e["given"] == given)


def fault(page, **question):
    """What the answer ends with; who asks while another is answered is told so first."""
    *before, event = page.all_of(**question)
    assert (event["is"], {each["is"] for each in before} - {"waiting"}) == ("fault", set())
    return event["text"]


def test_the_page_knows_the_model(page):
    said = about(page)
    assert (said["name"], said["experts"]) == ("upcycle-pico, version 1", [*DOMAINS])
    assert (said["routing"], said["layers"], said["chosen"]) == ("layer", LAYERS, 2)
    assert (said["chat"], said["context"], said["averages"]) == (True, CONTEXT, True)
    prompts = {entry["domain"]: entry["prompt"] for entry in said["prompts"]}
    assert prompts == {"python": "def read_lines(path):", "law": "The court held that"}


def test_an_answer_comes_token_by_token_with_every_layers_experts(page, model):
    *tokens, ended = page.all_of(prompt="né <|im_end|> 東", **GREEDY)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("né <|im_end|> 東", split_special_tokens=True)["input_ids"]
    whole = load_causal_lm(model).generate(
        torch.tensor([ids]), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    # A special token's name stays text: there are as many tokens as its letters make.
    assert [token["given"] for token in tokens] == [True] * len(ids) + [False] * 20
    assert text_of(tokens, given=True) == "né <|im_end|> 東"
    assert text_of(tokens) == tokenizer.decode(whole[0, len(ids) :], skip_special_tokens=True)
    for token in tokens:
        assert len(token["layers"]) == LAYERS
        for layer in token["layers"]:
            assert len(layer) <= 2
            assert sum(share for _, share in layer) == pytest.approx(1, abs=2e-3)  # three digits
    assert (ended["is"], ended["why"], ended["tokens"]) == ("ended", "length", 20)


def test_single_experts_their_average_and_the_chat_template_answer_otherwise(page):
    answers = {
        through: page.all_of(prompt="one two", through=through, **GREEDY)
        for through in ("routers", 0, 1, 2, "average")
    }
    assert len({text_of(events) for events in answers.values()}) == 5
    assert {str(t["layers"]) for t in answers[2] if t["is"] == "token"} == {
        str([[[2, 1.0]]] * LAYERS)
    }
    chat = page.all_of(prompt="one two", chat=True, **GREEDY)
    asked = "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(chat, given=True) == asked
    again = page.all_of(prompt="one two", **GREEDY)
    assert again[:-1] == answers["routers"][:-1]


def test_a_seed_decides_what_is_drawn(page):
    said = [text_of(page.all_of(prompt="a", seed=seed, temperature=2)) for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def computed(page):
    """Seconds of processors that the server has used: more work on the machine adds none."""
    return sum(psutil.Process(page.process.pid).cpu_times()[:2])


def test_it_stops_when_its_reader_leaves_and_the_next_is_answered(page):
    """Computing all of it takes seconds of a processor; nobody waits for that."""
    start = computed(page)
    page.all_of(prompt="a", tokens=CONTEXT, temperature=0)
    whole = computed(page) - start

    connection, events = page.ask(prompt="a", tokens=CONTEXT, temperature=0)
    assert next(events)["is"] == "token"
    connection.close()
    start = computed(page)
    events = page.all_of(prompt="a", tokens=1)
    assert events[-1]["is"] == "ended"
    assert computed(page) - start < whole / 2

    before = computed(page)
    time.sleep(0.5)
    assert computed(page) - before < 0.25


def test_one_answers_at_a_time_and_the_others_are_told(page):
    first, events = page.ask(prompt="a", tokens=CONTEXT, temperature=0)
    assert next(events)["is"] == "token"
    others = [page.ask(prompt="a", tokens=2) for _ in range(2)]
    said = [next(events) for _, events in others]
    assert [event.get("ahead") for event in said] == [1, 2]
    first.close()
    for connection, rest in others:
        assert [*rest][-1]["is"] == "ended"
        connection.close()


def test_a_waiting_reader_that_leaves_makes_room(page):
    first, events = page.ask(prompt="a", tokens=CONTEXT, temperature=0)
    next(events)
    waiting, events = page.ask(prompt="b", tokens=CONTEXT)
    assert next(events) == {"is": "waiting", "ahead": 1}
    waiting.close()
    deadline = time.monotonic() + 30
    while True:
        last, events = page.ask(prompt="c", tokens=1)
        if (said := next(events)) == {"is": "waiting", "ahead": 1}:
            break
        last.close()
        assert time.monotonic() < deadline, said
        time.sleep(0.2)
    first.close()
    with contextlib.closing(last):
        assert [*events][-1]["is"] == "ended"


def test_faults_are_named(page):
    assert "prompt = '  ': is empty" in fault(page, prompt="  ")
    assert "is empty" in fault(page)
    long = fault(page, prompt="a " * CONTEXT)
    assert re.search(rf"prompt = 'a a .*tokens long, the model's context {CONTEXT}", long)
    assert "expert = 3: choose 0 to 2" in fault(page, prompt="a", through=3)
    both = fault(page, prompt="a", tokens=0, temperature="hot", seed=-1, other=1)
    for words in ("tokens = 0", "temperature = 'hot'", "seed = -1", "other = 1: no such field"):
        assert words in both
    for wrong in ({"tokens": True}, {"through": "nobody"}, {"through": True}, {"chat": 1}):
        [field] = wrong
        assert f"{field} = " in fault(page, prompt="a", **wrong)
    # The context ends an answer that the limit would not.
    *_, ended = page.all_of(prompt="a " * (CONTEXT // 2 - 20), tokens=CONTEXT, temperature=0)
    assert ended["why"] == "context"


def status(page, method, path, body=None, **headers):
    connection, answer = page.request(method, path, body, **headers)
    with contextlib.closing(connection):
        answer.read()
        return answer.status


def test_only_who_came_to_this_address_is_let_in(page):
    body, json_of = b'{"prompt": "a", "tokens": 1}', {"content_type": "application/json"}
    local = f"localhost:{page.port}"
    assert status(page, "GET", "/", Host=local) == 200
    for host in ("evil.example", f"evil.example:{page.port}", "127.0.0.1", f"127.0.0.1:{1}"):
        assert status(page, "GET", "/", Host=host) == 403
        assert status(page, "POST", "/answers", body, Host=host, **json_of) == 403
    assert status(page, "POST", "/answers", body, Origin=f"http://{local}", **json_of) == 200
    for origin in ("http://evil.example", "null", f"https://{local}"):
        assert status(page, "POST", "/answers", body, Origin=origin, **json_of) == 403
    assert status(page, "POST", "/answers", body, content_type="text/plain") == 415
    assert status(page, "POST", "/answers", body) == 415
    assert status(page, "GET", "/answers") == 405
    for broken in (b"{", b"[" * 100_000):
        assert status(page, "POST", "/answers", broken, **json_of) == 400
    assert status(page, "POST", "/answers", b" " * (5 << 20), **json_of) == 413
    listens = {c.laddr.ip for c in psutil.Process(page.process.pid).net_connections("tcp")}
    assert listens == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("port", "host", "code"),
    [
        (80, "localhost", 200),
        (80, "127.0.0.1:80", 200),
        (80, "localhost:8808", 403),
        (80, "evil.example", 403),
        (8808, "localhost:8808", 200),
        (8808, "localhost", 403),
    ],
)
def test_a_browser_leaves_out_the_port_that_is_http_s(port, host, code):
    app = make_app(SimpleNamespace(about=dict), port)
    url, named = f"http://localhost:{port}/about", {"Host": host, "Origin": f"http://{host}"}

    async def get():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return (await client.get(url, headers=named)).status_code

    assert asyncio.run(get()) == code


def test_the_page_fetches_and_runs_nothing_but_itself(page):
    connection, answer = page.request("GET", "/")
    with contextlib.closing(connection):
        text, policy = answer.read().decode(), answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.findall(r"""(?:src|href|action)=["'](?!data:)""", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
    addresses = set(re.findall(r"https?://[^'\"\s]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place


def test_a_port_that_is_taken_is_named(page, capsys):
    assert main(["upcycle-pico@champion", "--port", str(page.port)]) == 2
    said = capsys.readouterr().err
    assert said == f"port = {page.port}: is in use; choose another: --port\n"
    with pytest.raises(InputError, match="from 1 to 65535"), listening(0):
        pass


@pytest.mark.faults
def test_ctrl_c_ends_it_with_one_line_while_it_answers(home, model):
    with talk(home, "upcycle-pico") as served:
        before = served.log.read_text()
        connection, events = served.ask(prompt="a", tokens=CONTEXT, temperature=0)
        next(events)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(timeout=30) == 130
        connection.close()
        assert served.log.read_text().removeprefix(before) == f"{LINE}\n"


def spoken(directory):
    """A model as the command loads it, without a server."""
    register_architectures()
    model = load_causal_lm(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    names = expert_names(Routing.of(model), DOMAINS)
    return Speaker(model, tokenizer, name="", bos="auto", names=names, prompts=[])


def answered(speaker, **question):
    events = []
    speaker.answer(Question.read(question), events.append, lambda: False)
    return events


def test_a_dense_model_has_nothing_to_colour(tmp_path):
    speaker = spoken(save_pico(tmp_path))
    said = speaker.about()
    assert (said["routing"], said["experts"], said["averages"]) == ("none", [], False)
    *tokens, ended = answered(speaker, prompt="ab", **GREEDY)
    assert ended["is"] == "ended"
    assert {str(token["layers"]) for token in tokens} == {"[]"}
    for wrong, words in (({"through": 0}, "no routers"), ({"chat": True}, "chat_template")):
        with pytest.raises(InputError, match=words):
            answered(speaker, prompt="ab", **wrong)


def test_simoe_has_the_same_shares_for_a_whole_prompt(tmp_path):
    dense = save_pico(tmp_path / "dense")
    network = grow(upcycle_in_memory(dense, SimoeUpcyclingConfig(experts=3), seed=1))
    save_pruned(network, dense, tmp_path / "simoe")
    speaker = spoken(tmp_path / "simoe")
    said = speaker.about()
    assert (said["routing"], said["layers"], said["averages"]) == ("prompt", 1, True)
    assert said["experts"] == ["expert 1", "expert 2", "expert 3"]  # no domains' own
    assert said["context"] == 128
    *tokens, _ = answered(speaker, prompt="ab", **GREEDY)
    assert len({str(token["layers"]) for token in tokens}) == 1
    assert len(tokens[0]["layers"][0]) == 3
    for through in (1, "average"):
        assert answered(speaker, prompt="ab", through=through, **GREEDY)[-1]["is"] == "ended"


def test_ders_shows_its_experts_and_says_that_it_has_no_average(tmp_path):
    grown = ders.grow(tmp_path)
    exact = CodecConfig(codec="sparse", drop_rate=0.0)
    compress(grown.model, tmp_path / "ders", config=exact, base=grown.seed, max_shard_bytes=10**9)
    speaker = spoken(tmp_path / "ders")
    said = speaker.about()
    assert (said["routing"], said["experts"], said["context"]) == ("layer", [*DOMAINS], 128)
    assert (said["chosen"], said["averages"]) == (2, False)
    assert len(answered(speaker, prompt="ab", **GREEDY)[0]["layers"]) == 2


def test_an_encoder_and_a_decoder_are_refused(tmp_path):
    path = save_pico(tmp_path / "model")
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"is_encoder_decoder": True}))
    with pytest.raises(InputError, match="model = 'm@1': is an encoder and a decoder"):
        load(path, Namespace(model="m@1", device="cpu", precision="fp32"))


def test_a_domain_nobody_knows_begins_as_its_own_text_does(tmp_path):
    sources = {}
    for split in ("train", "heldout"):
        file = tmp_path / f"{split}.txt"
        file.write_text("\n<|doc|>\n".join(f"{split} {'and more ' * 30}{i}" for i in range(9)))
        sources[split] = Source(files=(str(file),))
    out = tmp_path / "documents" / "own"
    write_documents(Domain(**sources), out, config=CorpusConfig(), seed=0)
    assert example_prompts(["law", "own", "gone"], out.parent) == [
        ("law", "The court held that"),
        ("own", "heldout and more and more and more and"),
    ]


@pytest.mark.parametrize(
    ("tags", "more", "experts"),
    [
        ({}, {}, ["law", "tax"]),
        ({}, {"symphony": {"models": ["tax"]}}, ["tax"]),
        ({COMPRESSED_TAG: "4-bit"}, {"compression": {"models": ["dume"]}}, ["law", "tax"]),
        ({COMPRESSED_TAG: "4-bit"}, {"compression": {"models": ["btx"]}}, ["law", "tax"]),
        ({COMPRESSED_TAG: "4-bit"}, {"compression": {"models": ["drop"]}}, ["law", "tax"]),
        ({COMPRESSED_TAG: "4-bit"}, {"compression": {"models": ["copies"]}}, []),
    ],
)
def test_experts_are_called_by_domains_where_they_are_theirs(tags, more, experts):
    """Copies of one FFN, trained together, are as many as domains, and of none."""
    text = {"train": {"files": ["text.txt"]}}
    rows = {
        "btx": {"method": "btx"},
        "drop": {"method": "drop-upcycling", "start": "experts"},
        "copies": {"method": "sparse-upcycling"},
    }
    recipe = {"name": "a", "domains": {"law": text, "tax": text}}
    if "compression" in more:
        codecs = {"4-bit": {"codec": "quantised", "bits": 4}}
        recipe |= {"baselines": rows, "compression": more["compression"] | {"codecs": codecs}}
    else:
        recipe |= more
    made = ADAPTER.dump_python(ADAPTER.validate_python(recipe), mode="json")
    version = Version("a", 1, "", "", "", (), tags, {}, {})
    assert Registered(version, Path("a"), made).experts == experts
