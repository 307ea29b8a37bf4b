"""`python -m flows.serve`: clients ask while champions change, engines die and input is bad."""

import json
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from threading import Event

import httpx
import psutil
import pytest
from serving import PLAIN, PROMPTS, SECONDS, TOKENS, environment, greedy, served
from transformers import AutoTokenizer

from flows.serve import main
from infra import settings
from infra.serving.keeper import GRACE_SECONDS
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from tasks.serving.engines import has_template
from tests.pico import save_pico
from tests.upcycle_core.simoe.grown import grow
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.prune import save_pruned
from upcycle_core.simoe.upcycle import upcycle_in_memory

VERSIONS, CLIENTS, EACH = 3, 4, 20
CONTEXT = 1 << 16
"""Tokens that the models have room for: to fill it takes longer than any test waits."""
TOO_LONG = "a" * (CONTEXT + 1)
NO_ROOM = f"{CONTEXT + 1} tokens, and the model room for {CONTEXT}"


class Place:
    """A registry of pico models.

    Args:
        home: Where it lies.
    """

    def __init__(self, home):
        self.home = home
        place = settings.read(environment(home))
        self.tracker, self.registry = Tracker(place, "flows"), Registry(place)
        self.versions, self.texts = {}, {}

    def register(self, directory, name="pico"):
        with self.tracker.start_run(name) as run:
            version = self.registry.register(name, directory, Registration(), run=run)
        self.versions[name, version.number] = version
        return version

    def promote(self, number, name="pico"):
        self.registry.set_alias(self.versions[name, number], "champion")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Four versions with different weights, and what each says."""
    place, folder = Place(tmp_path_factory.mktemp("home")), tmp_path_factory.mktemp("models")
    for seed in range(VERSIONS):
        directory = save_pico(folder / str(seed), seed=seed, max_position_embeddings=CONTEXT)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        tokenizer.save_pretrained(directory)
        number = place.register(directory).number
        place.texts[number] = greedy(directory)
    place.folder = folder
    return place


@pytest.fixture(scope="module")
def server(place):
    place.promote(1)
    with served(place.home, "pico@champion") as server:
        yield server


@pytest.fixture
def at_home(place, monkeypatch):
    """The command in this process; it returns its exit code."""
    for name, value in environment(place.home).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    return lambda *arguments: main([*arguments])


def asking(server, stop, number):
    """Ask until told to stop and once more, `EACH` times at least: when, prompt and answer."""
    answers = []
    for turn in count(1):
        is_last = stop.is_set() and turn >= EACH
        prompt = PROMPTS[(turn + number) % len(PROMPTS)]
        begun = time.monotonic()
        answers.append((begun, prompt, server.ask(prompt, stream=turn % 3 == 0)))
        if is_last:
            return answers
        time.sleep(0.1)


def test_champions_change_and_no_request_is_lost_or_cut(place, server):
    stop, switched = Event(), {}
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(asking, server, stop, number) for number in range(CLIENTS)]
        try:
            for version in (2, 3):
                place.promote(version)
                server.wait(version=version)
                switched[version] = time.monotonic()
                time.sleep(0.5)
        finally:
            stop.set()
        answers = [answer for client in clients for answer in client.result()]
    assert len(answers) >= CLIENTS * EACH
    for begun, prompt, reply in answers:
        assert reply.whole
        assert reply.text == place.texts[reply.version][prompt]
        assert reply.version >= max([v for v, when in switched.items() if when < begun], default=1)
    assert {reply.version for *_, reply in answers} == {1, 2, 3}
    status = server.wait(engines=1, in_flight=0)
    assert [(old["version"], old["drained"]) for old in status["left"]] == [
        (version, True) for version in (1, 2)
    ]
    assert status["cut"] == 0
    assert status["requests"] == len(answers)


@pytest.mark.faults
def test_version_that_does_not_come_up_leaves_the_old_one_in_front(place, server, tmp_path):
    directory = save_pico(tmp_path / "broken", seed=9)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"hidden_size": 36}))
    broken = place.register(directory).number
    before = server.status()["version"]
    place.promote(broken)
    server.wait(wanted=broken)
    deadline = time.monotonic() + SECONDS
    while not (failure := server.status()["last_failure"]) or failure["of"] != broken:
        assert server.ask("ab").version == before
        assert time.monotonic() < deadline
    assert "ended while it started" in failure["message"]
    place.promote(2)
    server.wait(version=2, engines=1)
    assert server.ask("ab").text == place.texts[2]["ab"]
    assert server.log.read_text().count(f"version {broken}: ended while it started") == 1


def test_version_that_cannot_be_launched_leaves_no_switch_at_work(place, server, tmp_path):
    directory = save_pico(tmp_path / "no weights", seed=9)
    for file in directory.glob("*.safetensors"):
        file.unlink()
    broken, before = place.register(directory).number, server.status()["version"]
    place.promote(broken)
    server.wait(wanted=broken)
    server.wait(state="serving")
    assert server.status()["last_failure"]["of"] == broken
    place.promote(before)
    server.wait(wanted=before)
    assert server.ask("ab").whole


@pytest.mark.faults
def test_engine_that_is_killed_is_started_again_while_requests_wait(place, server):
    number = server.status()["version"]
    [engine] = server.engines()
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(server.ask, prompt, tokens=60) for prompt in PROMPTS]
        time.sleep(0.05)
        engine.kill()
        clients += [pool.submit(server.ask, prompt) for prompt in PROMPTS]
        replies = [client.result() for client in clients]
    for prompt, reply in zip(PROMPTS, replies[len(PROMPTS) :], strict=True):
        assert reply.text == place.texts[number][prompt]
    assert all(reply.version == number and reply.whole for reply in replies)
    status = server.status()
    assert "the engine has ended" in status["last_failure"]["message"]
    assert server.engines() != [engine]


@contextmanager
def endless(server):
    """The lines of an answer that fills the model's context: of one that takes minutes."""
    long = json.dumps({"max_new_tokens": CONTEXT, "min_new_tokens": CONTEXT})
    body = {"prompt": "ab", "generation_config": long, "stream": True}
    with (
        httpx.Client(**PLAIN) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as reply,
    ):
        yield reply.iter_lines()


@pytest.mark.faults
def test_stream_goes_on_while_another_version_answers(place, server):
    before = server.status()["version"]
    after = 3 if before != 3 else 1
    with endless(server) as lines:
        place.promote(after)
        server.wait(version=after)
        assert server.ask("ab").version == after
        end = time.monotonic() + 3 * GRACE_SECONDS  # what is told to end has ended by then
        while time.monotonic() < end:
            line = next(lines)
            assert not line or "text" in line
        assert server.status()["engines"] == 2
    server.wait(engines=1)


def test_client_that_leaves_frees_the_engine(server):
    with endless(server) as lines:
        assert next(lines).startswith("data: ")
        assert server.status()["in_flight"] == 1
    server.wait(in_flight=0, seconds=20)  # to its end, the answer would take minutes
    begun = time.monotonic()
    assert server.ask("ab").whole  # the engine answers one after the other
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"[1]", 400, "not an object"),
        (b'{"prompt": "ab", "temperature": NaN}', 400, "not JSON"),
        (b'{"prompt": "ab", "temperature": 1e999}', 400, "not JSON"),
        (b'{"prompt": "\\ud800"}', 400, "not JSON"),
        (b'{"prompt": ""}', 400, "the engine cannot work with this request"),
        (b'{"prompt": "ab", "max_tokens": "x"}', 400, "cannot work with this request"),
        (b'{"prompt": ["ab"]}', 400, "prompt must be a string"),
        (b'{"prompt": ["' + b"a" * 100 + b'", "' + b"a" * 100 + b'"]}', 400, "must be a string"),
        pytest.param(json.dumps({"prompt": ["ab", TOO_LONG]}).encode(), 400, NO_ROOM, id="list"),
        (b'{"prompt": "ab", "nonsense": 1}', 422, "nonsense"),
        pytest.param(json.dumps({"prompt": TOO_LONG}).encode(), 400, NO_ROOM, id="long"),
    ],
)
def test_bad_request_is_answered_with_what_is_wrong(server, body, code, said):
    headers = {"Content-Type": "application/json"}
    url = f"{server.url}/v1/completions"
    reply = httpx.post(url, content=body, headers=headers, **PLAIN)
    assert reply.status_code == code, reply.text
    assert said in reply.text
    assert server.ask("ab").whole


@pytest.mark.parametrize(
    "body",
    [
        {"input": TOO_LONG},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": TOO_LONG}]}]},
        {"instructions": TOO_LONG[:100], "input": TOO_LONG[100:]},
    ],
)
def test_a_chat_that_is_too_long_is_refused_where_responses_are_asked_for(server, body):
    url = f"{server.url}/v1/responses"
    reply = httpx.post(url, json=body, **PLAIN)
    assert reply.status_code == 400, reply.text
    assert NO_ROOM in reply.text


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, 400),
        ({"Host": "127.0.0.1.evil.example"}, 400),
        ({"Origin": "http://evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Host": "localhost", "Origin": "http://127.0.0.1:5000"}, 200),
    ],
)
def test_pages_of_other_sites_are_not_heard(server, headers, code):
    headers = {"Content-Type": "application/json"} | headers
    content = b'{"prompt": "ab", "max_tokens": 1}'
    url = f"{server.url}/v1/completions"
    reply = httpx.post(url, content=content, headers=headers, **PLAIN)
    assert reply.status_code == code, reply.text


def test_chat_is_answered_by_the_model_s_template(place, server):
    messages = [{"role": "user", "content": "12+3"}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    url = f"{server.url}/v1/chat/completions"
    reply = httpx.post(url, json=body, **PLAIN)
    number = int(reply.headers["x-upcycle-version"])
    said = reply.json()["choices"][0]["message"]["content"]
    assert said == place.texts[number]["12+3"]


@pytest.mark.faults
def test_chat_without_a_template_is_refused_in_words(place, tmp_path):
    place.promote(place.register(save_pico(tmp_path / "model"), "plain").number, "plain")
    with served(place.home, "plain@champion") as server:
        body = {"messages": [{"role": "user", "content": "12+3"}], "max_tokens": 8}
        url = f"{server.url}/v1/chat/completions"
        reply = httpx.post(url, json=body, **PLAIN)
        assert reply.status_code == 400
        assert "no chat template; send a prompt to /v1/completions" in reply.text
        assert server.ask("ab").whole
        assert server.status()["in_flight"] == 0


def test_a_chat_template_is_a_file_or_stands_in_the_tokenizer_s_settings(place, tmp_path):
    plain = save_pico(tmp_path / "plain")
    assert not has_template(plain)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.chat_template = "{{ messages }}"
    for folder, own in (("file", True), ("settings", False)):
        shutil.copytree(plain, tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder, save_jinja_files=own)
        assert (tmp_path / folder / "chat_template.jinja").exists() is own
        assert has_template(tmp_path / folder)


def test_temperature_of_a_request_is_heeded(server):
    body = {"prompt": "ab", "max_tokens": 16, "temperature": 5}
    url = f"{server.url}/v1/completions"
    with httpx.Client(**PLAIN) as client:
        replies = [client.post(url, json=body | {"seed": seed}).json() for seed in range(4)]
    assert len({reply["choices"][0]["text"] for reply in replies}) > 1


def test_other_paths_of_the_engine_are_closed(server):
    for path in ("/load_model", "/reset"):
        assert httpx.post(f"{server.url}{path}", json={}, **PLAIN).status_code == 404
    models = httpx.get(f"{server.url}/v1/models", **PLAIN).json()["data"]
    assert [model["id"] for model in models] == ["pico"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("pico@nobody", "not in the registry"),
        ("nobody@champion", "not in the registry"),
        ("pico", "names no version"),
        ("foreign@champion", "brings code of its own"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(place, at_home, capsys, tmp_path, model, said):
    if model.startswith("foreign"):
        directory = save_pico(tmp_path / "foreign")
        config = json.loads((directory / "config.json").read_text())
        config |= {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}
        (directory / "config.json").write_text(json.dumps(config))
        place.promote(place.register(directory, "foreign").number, "foreign")
    assert at_home(model, "--port", "0", "--device", "cpu") == 2
    assert said in capsys.readouterr().err


def test_port_in_use_is_said_before_anything_is_loaded(at_home, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert at_home("pico@champion", "--port", port) == 2
    said = capsys.readouterr()
    assert f"--port = {port}" in said.err
    assert "Starting" not in said.out


@pytest.mark.faults
def test_two_servers_follow_one_alias_and_a_killed_one_leaves_nothing(place, server):
    place.promote(3)
    with served(place.home, "pico@champion") as second:
        place.promote(1)
        for one in (server, second):
            one.wait(version=1)
            assert one.ask("The").text == place.texts[1]["The"]
        family = psutil.Process(second.process.pid).children(recursive=True)
        assert len(family) >= 2
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
        assert not psutil.wait_procs(family, timeout=20)[1]
    assert server.ask("The").version == 1


@pytest.mark.faults
def test_without_room_for_two_requests_wait_while_engines_change(place):
    place.promote(1)
    with served(place.home, "pico@champion", "--swap", "instead") as server:
        stop = Event()
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(asking, server, stop, number) for number in range(CLIENTS)]
            try:
                place.promote(2)
                server.wait(wanted=2)
                deadline = time.monotonic() + SECONDS
                while server.status()["version"] != 2:
                    assert len(server.engines()) <= 1
                    assert time.monotonic() < deadline
            finally:
                stop.set()
            answers = [answer for client in clients for answer in client.result()]
        assert {reply.version for *_, reply in answers} == {1, 2}
        for _, prompt, reply in answers:
            assert reply.whole
            assert reply.text == place.texts[reply.version][prompt]
        [left] = server.status()["left"]
        assert (left["how"], left["drained"]) == ("instead", True)


@pytest.mark.faults
def test_mlflow_s_engine_opens_what_lies_in_a_home_without_a_server(place):
    place.promote(1)
    with served(place.home, "pico@champion", "--engine", "mlflow") as front:
        asked = {"inputs": ["ab", "The"], "params": {"max_new_tokens": TOKENS}}
        url = f"{front.url}/invocations"
        reply = httpx.post(url, json=asked, **PLAIN)
        assert reply.status_code == 200, reply.text
        assert reply.json()["predictions"] == [place.texts[1][text] for text in ("ab", "The")]
        [log] = (place.home / "services").glob(f"serve-{httpx.URL(url).port}/pico-1.log")
        said = log.read_text()
        assert httpx.post(url, json=asked, **PLAIN).status_code == 200
        assert log.read_text() == said  # no line for each request


@pytest.mark.faults
def test_own_architecture_is_served_without_trust_in_its_files(place, tmp_path):
    dense = place.folder / "0"
    network = upcycle_in_memory(dense, SimoeUpcyclingConfig(experts=3), seed=1)
    save_pruned(grow(network), dense, tmp_path / "simoe")
    for file in (tmp_path / "simoe").glob("*.py"):
        file.write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    place.promote(place.register(tmp_path / "simoe", "simoe").number, "simoe")
    with served(place.home, "simoe@champion") as server:
        assert server.ask("ab").whole
    assert not (tmp_path / "ran").exists()


@pytest.mark.faults
def test_engine_that_can_come_up_no_more_is_said_to_who_asks(place, tmp_path):
    place.promote(place.register(save_pico(tmp_path / "model"), "gone").number, "gone")
    with served(place.home, "gone@champion", "--hold", "1") as server:
        shutil.rmtree(place.registry.place("models:/gone@champion"))
        [engine] = server.engines()
        engine.kill()
        url, body = f"{server.url}/v1/completions", {"prompt": "ab", "max_tokens": 1}
        reply = httpx.post(url, json=body, **PLAIN)
        assert reply.status_code == 503
        assert reply.headers["Retry-After"]
        assert httpx.get(f"{server.url}/health", **PLAIN).status_code == 503
