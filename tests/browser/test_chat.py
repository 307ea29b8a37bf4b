"""The page to talk to a model, as people see and touch it."""

import re

import pytest
from playwright.sync_api import expect
from talking import CONTEXT, DOMAINS, LAYERS, register, save_talkative, talk

pytestmark = pytest.mark.faults  # needs Chromium

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>&amp;'


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    model = save_talkative(tmp_path_factory.mktemp("model"))
    register(home, "upcycle-pico", model, domains=DOMAINS)
    with talk(home, "upcycle-pico") as served:
        yield served


@pytest.fixture
def chat(page, served):
    """The page, opened; nothing may go wrong in it."""
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(served.url)
    expect(page.locator("#name")).to_have_text("upcycle-pico, version 1")
    yield page
    assert not [text for text in said if "422" not in text]  # which the page shows as a fault


def ask(chat, prompt, *, tokens=12):
    chat.locator("#open").click()
    chat.locator("#tokens").fill(str(tokens))
    chat.locator("#open").click()
    chat.locator("#prompt").fill(prompt)
    chat.get_by_role("button", name="Ask", exact=True).click()


def settled(chat, columns=1):
    """All columns of the last turn, when nothing is written any more."""
    expect(chat.locator(".column")).to_have_count(columns)
    expect(chat.locator(".live")).to_have_count(0)
    return chat.locator(".column")


def colour(token):
    return token.evaluate("node => getComputedStyle(node).backgroundColor")


def test_an_example_is_answered_in_the_colours_of_the_experts(chat):
    chat.get_by_role("button", name="def read_lines(path):").click()
    column = settled(chat).first
    expect(column.locator(".state")).to_have_text(re.compile("^120 tokens in .* reached the limit"))
    expect(chat.locator(".asked .t").first).to_be_visible()
    tokens = column.locator(".t")
    colours = {colour(tokens.nth(i)) for i in range(min(tokens.count(), 30))}
    assert len(colours) > 5
    assert all(value.startswith("oklch(0.7 0.1") for value in colours), colours
    legend = chat.locator(".legend button").all_inner_texts()
    assert [entry.split()[0] for entry in legend] == [*DOMAINS]
    assert sum(int(entry.split()[1]) for entry in legend) == pytest.approx(100, abs=1)

    chat.locator(".legend button").first.click()
    leads = {token.get_attribute("data-lead") for token in column.locator(".t.kept").all()}
    assert leads == {"0"}
    assert column.locator(".t.kept").count() < tokens.count()


def test_a_token_tells_who_made_it_to_mouse_keyboard_and_finger(chat):
    ask(chat, "one two", tokens=60)
    column, card = settled(chat).first, chat.locator("#card")
    tokens = column.locator(".t")
    expect(card).to_be_hidden()
    tokens.nth(1).hover()
    expect(card).to_be_visible()
    shares = [int(text.split()[0]) for text in card.locator(".row b").all_inner_texts()]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert shares == sorted(shares, reverse=True)
    expect(card.locator(".strip > i")).to_have_count(LAYERS)
    expect(card).to_contain_text(f"layer {LAYERS}")
    chat.mouse.move(0, 0)
    expect(card).to_be_hidden()

    tokens.first.focus()
    where = card.locator(".what span").inner_text()
    chat.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    assert card.locator(".what span").inner_text() != where
    chat.keyboard.press("Escape")
    expect(card).to_be_hidden()
    tokens.nth(2).click()
    expect(card).to_be_visible()
    chat.locator(".asked .t").first.hover()
    expect(card).to_contain_text("prompt token 1, read by")


def test_single_experts_and_their_average_stand_beside_it(chat):
    ask(chat, "one two")
    settled(chat)
    chat.get_by_role("button", name="law alone").click()
    columns = settled(chat, 2)
    assert columns.locator("h3").all_inner_texts() == ["Mixture of all experts", "law alone"]
    leads = columns.last.locator(".t").all()
    assert {token.get_attribute("data-lead") for token in leads} == {"1"}
    left, right = (columns.nth(i).bounding_box() for i in (0, 1))
    assert left["y"] == right["y"]
    assert left["x"] < right["x"]
    chat.get_by_role("button", name="all of them").click()
    titles = settled(chat, 5).locator("h3").all_inner_texts()
    assert titles[2:] == ["python alone", "numbers alone", "The experts’ average"]

    chat.set_viewport_size({"width": 390, "height": 844})
    boxes = [columns.nth(i).bounding_box() for i in range(5)]
    assert len({box["x"] for box in boxes}) == 1
    assert chat.evaluate("document.documentElement.scrollWidth") <= 390


def test_stop_stops_and_faults_are_said(chat, served):
    ask(chat, "one", tokens=CONTEXT)
    chat.locator(".column .t").first.wait_for()
    chat.get_by_role("button", name="Stop", exact=True).click()
    state = settled(chat).first.locator(".state")
    expect(state).to_have_text(re.compile("^Stopped"))
    assert served.all_of(prompt="a", tokens=1)[0]["is"] == "token"  # nobody is before it
    ask(chat, "a " * CONTEXT)
    expect(settled(chat, 2).last.locator(".fault")).to_contain_text("the model's context 512")
    ask(chat, "  ")
    expect(settled(chat, 3).last.locator(".fault")).to_contain_text("is empty")


def test_what_people_write_is_text(chat):
    ask(chat, HOSTILE)
    settled(chat)
    expect(chat.locator(".asked .text")).to_have_text(HOSTILE)
    assert chat.locator("main img, main script").count() == 0
    assert chat.title() == "Talk to upcycle-pico, version 1"


def test_it_follows_the_scheme_and_can_be_switched(chat):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = chat.evaluate(ground)
    chat.get_by_role("button", name="Light or dark").click()
    dark = chat.evaluate(ground)
    assert (light, dark) == ("rgb(250, 249, 246)", "rgb(19, 20, 23)")
    chat.emulate_media(color_scheme="dark")
    chat.reload()
    assert chat.evaluate(ground) == dark
