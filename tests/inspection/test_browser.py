"""The page in a real browser: what it shows is what its data says, by mouse and by keyboard, and soon enough."""

import base64

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from tests.inspection.pages import random_inspection
from vllm_kvevict.inspect.data import Kept, Prompt
from vllm_kvevict.inspect.page import render

TOKENS, LAYERS, HEADS = 130, 3, 4
INSPECTION = random_inspection(TOKENS, LAYERS, HEADS)
STEPS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75)


def load(browser, path, inspection=INSPECTION, change=lambda html: html):
    """Open an inspection's page; milliseconds until its first shades were drawn."""
    path.write_text(change(render(inspection)), "utf-8")
    browser.get(path.as_uri())
    WebDriverWait(browser, 30).until(lambda b: b.execute_script("return document.body.dataset.drawn"))
    return float(browser.execute_script("return document.body.dataset.drawn"))


@pytest.fixture
def page(browser, tmp_path):
    load(browser, tmp_path / "page.html")
    yield browser
    assert browser.get_log("browser") == []


def levels(browser, side=0):
    """Shades of all tokens that have a text, by token."""
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")  # paints the rows that are out of sight
    spans = browser.execute_script(
        "return [...document.querySelectorAll(`.row .cell:nth-child(${arguments[0] + 1}) [data-token]`)]"
        ".map((span) => [Number(span.dataset.token), Number(span.className.match(/shade-(\\d)/)[1])])",
        side,
    )
    return dict(spans)


def expected(mask):
    """Shades of what some heads keep, bool [heads, tokens]."""
    shares = mask.mean(0)
    shades = [
        0 if x <= 0 else len(STEPS) + 2 if x >= 1 else 1 + sum(x > step for step in STEPS) for x in shares
    ]
    return dict(enumerate(shades))


def heat(policy, layers=slice(None), heads=slice(None)):
    return expected(INSPECTION.kept[policy].mask[layers, heads].reshape(-1, TOKENS))


def head_button(browser, policy, layer, head):
    name = f"{INSPECTION.kept[policy].policy}, layer {layer}, head {head}:"
    return browser.find_element(By.CSS_SELECTOR, f"#heads [aria-label^='{name}']")


def test_shows_how_many_heads_keep_each_token(page):
    assert levels(page, 0) == heat(0)
    assert levels(page, 1) == heat(1)
    assert heat(0) != heat(1)
    assert len(set(levels(page).values())) > 3


def test_the_text_is_the_prompt(page):
    shown = page.execute_script(
        "return [...document.querySelectorAll('.row .cell:first-child')].map((cell) => cell.textContent).join('')"
    )
    assert shown == INSPECTION.prompt.text and "\n" in shown


def test_choosing_a_head_shows_what_it_keeps(page):
    for layer, head in ((1, 2), (2, 0)):
        head_button(page, 0, layer, head).click()
        assert levels(page, 0) == heat(0, [layer], [head])
        assert levels(page, 1) == heat(1, [layer], [head])
    assert heat(0, [1], [2]) != heat(0, [2], [0])
    chosen = page.find_element(By.ID, "chosen").text
    assert chosen.startswith("Layer 2, head 0")
    assert f"ada-snapkv: {INSPECTION.kept[0].mask[2, 0].sum()} of {TOKENS} entries" in chosen
    head_button(page, 0, 2, 0).click()  # the same again
    assert levels(page, 0) == heat(0)


def test_pointing_at_a_head_shows_it_for_the_time(page):
    ActionChains(page).move_to_element(head_button(page, 1, 0, 3)).perform()
    assert levels(page, 1) == heat(1, [0], [3])
    ActionChains(page).move_to_element(page.find_element(By.TAG_NAME, "h1")).perform()
    assert levels(page, 1) == heat(1)


def test_choosing_by_lists(page):
    Select(page.find_element(By.ID, "layer")).select_by_visible_text("1")
    assert levels(page) == heat(0, [1])
    Select(page.find_element(By.ID, "head")).select_by_visible_text("2")
    assert levels(page) == heat(0, [1], [2])
    Select(page.find_element(By.ID, "layer")).select_by_visible_text("all")
    assert levels(page) == heat(0, slice(None), [2])
    page.find_element(By.CSS_SELECTOR, "#choice button").click()
    assert levels(page) == heat(0)


def test_choosing_by_keys(page):
    page.find_element(By.CSS_SELECTOR, "#heads .layer").send_keys(Keys.ARROW_DOWN)
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    page.switch_to.active_element.send_keys(Keys.ENTER)
    assert levels(page) == heat(0, [1], [1])
    assert head_button(page, 0, 1, 1).get_attribute("aria-pressed") == "true"
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert levels(page) == heat(0)


def test_a_token_shows_the_heads_that_keep_it(page):
    token = int(np.argmax(INSPECTION.kept[0].mask.sum((0, 1))))
    page.execute_script(f"document.querySelector('[data-token=\"{token}\"]').click()")
    text = page.find_element(By.ID, "token").text
    for kept in INSPECTION.kept[:2]:
        assert f"{kept.policy}: kept by {kept.mask[:, :, token].sum()} of {LAYERS * HEADS} heads" in text
    marked = page.find_elements(By.CSS_SELECTOR, "#heads .has")
    assert len(marked) == sum(kept.mask[:, :, token].sum() for kept in INSPECTION.kept[:2])
    head_button(page, 0, 1, 1).click()
    outlined = page.find_elements(By.CSS_SELECTOR, "#text .at")
    assert [span.get_attribute("data-token") for span in outlined] == [str(token)] * 2
    page.find_element(By.ID, "text").send_keys(Keys.ARROW_RIGHT)
    assert page.find_element(By.ID, "token").text.startswith(f"Token {token + 1} ")


def test_another_policy_is_put_beside(page):
    Select(page.find_elements(By.CSS_SELECTOR, "#policies select")[1]).select_by_visible_text("snapkv")
    WebDriverWait(page, 5).until(lambda browser: levels(browser, 1) == heat(2))
    assert levels(page, 0) == heat(0)
    Select(page.find_elements(By.CSS_SELECTOR, "#policies select")[1]).select_by_visible_text("none")
    WebDriverWait(page, 5).until(lambda browser: not levels(browser, 1))
    page.find_element(By.CSS_SELECTOR, "#policies h2 button").click()
    WebDriverWait(page, 5).until(lambda browser: levels(browser, 1) == heat(0))


def test_totals_and_bars(page):
    cards = page.find_elements(By.CSS_SELECTOR, "#policies article")
    totals = INSPECTION.summary()["policies"]
    for card, policy in zip(cards, totals, strict=False):
        assert f"{policy['entries']['kept']:,} of {policy['entries']['of']:,} entries" in card.text
        before, after = (policy["bytes"][name] / 1024 for name in ("before", "after"))
        assert f"memory {before:.0f} → {after:.0f} KiB" in card.text
    most = max(kept.entries.max() for kept in INSPECTION.kept[:2])
    for layer in range(LAYERS):
        for head in range(HEADS):
            bar = head_button(page, 1, layer, head)
            kept = INSPECTION.kept[1].entries[layer, head]
            part = page.execute_script("return arguments[0].style.getPropertyValue('--part')", bar)
            assert float(part) == pytest.approx(kept / most)
            assert f": {kept} tokens" in bar.get_attribute("aria-label")


def test_one_policy_alone(browser, tmp_path):
    alone = random_inspection(TOKENS, LAYERS, HEADS, evicted_tokens=100, kept=INSPECTION.kept[:1])
    load(browser, tmp_path / "page.html", alone)
    assert levels(browser, 0) == heat(0) and not levels(browser, 1)
    assert "after 100 tokens" in browser.find_element(By.ID, "about").text
    assert browser.find_element(By.CSS_SELECTOR, ".edge").get_attribute("data-token") == "100"
    assert browser.get_log("browser") == []


def test_parts_of_a_character_are_shown_as_one(browser, tmp_path):
    words = ["<s>", "a", "😀", "", "", "", "b", "\n"]
    mask = np.zeros((1, 2, 8), bool)
    mask[0, 0, 2:4] = True  # a quarter of the character's tokens, of both heads
    prompt = Prompt(list(range(8)), words, [0])
    kept = [Kept("snapkv", 0.2, mask)]
    inspection = random_inspection(8, 1, 2, words=words, prompt=prompt, kept=kept)
    load(browser, tmp_path / "page.html", inspection)
    assert levels(browser) == {0: 0, 1: 0, 2: 4, 6: 0, 7: 0}
    assert browser.find_element(By.CSS_SELECTOR, ".special").text == "<s>"


HEBREW = ["\u05e9\u05dc\u05d5\u05dd", " \u05e2\u05d5\u05dc\u05dd"]
HOSTILE = ["</script><b>", "\r\n", "\0", " & \\", " \U0001f600", "\n", *HEBREW, "\n", " \u202ereversed", "\n"]


@pytest.fixture
def hostile(browser, tmp_path):
    """A page whose prompt would break it, or turn its own words around, if it could."""
    load(browser, tmp_path / "page.html", random_inspection(len(HOSTILE), 1, 1, words=HOSTILE))
    levels(browser)
    yield browser
    assert browser.get_log("browser") == []


def test_a_prompt_that_is_hard_to_show_is_shown(hostile):
    shown = hostile.execute_script("return document.querySelector('.row .cell:first-child').textContent")
    assert shown == "".join(HOSTILE)
    assert not hostile.find_elements(By.CSS_SELECTOR, "#text b")


def test_lines_run_in_the_direction_of_their_text(hostile):
    left, middle, first, second = hostile.execute_script(
        "const cell = document.querySelector('.row .cell:first-child');"
        "const box = (token) => cell.querySelector(`[data-token='${token}']`).getBoundingClientRect();"
        "const { left, width } = cell.getBoundingClientRect();"
        "return [box(0).left - left, left + width / 2, box(6).left, box(7).left];"
    )
    assert left < 5 and first > second > middle


def test_a_token_does_not_turn_what_is_said_of_it(hostile):
    hostile.execute_script("document.querySelector(\"[data-token='9']\").click()")
    code, number = hostile.execute_script(
        "const code = document.querySelector('#token code'), range = document.createRange();"
        "range.selectNode(code.nextSibling);"
        "return [code.getBoundingClientRect().right, range.getBoundingClientRect().left];"
    )
    assert "reversed" in hostile.find_element(By.CSS_SELECTOR, "#token code").text and number >= code - 1


def luminance(colour):
    parts = [x / 3294.6 if x <= 10 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in colour]
    return np.dot((0.2126, 0.7152, 0.0722), parts)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_shade_can_be_read(page, scheme):
    """WCAG asks for 4.5; shades of more heads stand out more from the page."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        pairs = page.execute_script(
            "return [...document.querySelectorAll('#legend span')].map((span) => {"
            "const [style, page] = [getComputedStyle(span), getComputedStyle(document.body)];"
            "const back = style.backgroundColor === 'rgba(0, 0, 0, 0)' ? page : style;"
            "return [style.color, back.backgroundColor].map((text) => text.match(/\\d+/g).map(Number)); })"
        )
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert len(pairs) == 9
    backgrounds = [luminance(back[:3]) for _, back in pairs]
    for (ink, _), back in zip(pairs, backgrounds, strict=True):
        low, high = sorted([luminance(ink[:3]), back])
        assert (high + 0.05) / (low + 0.05) >= 4.5
    assert backgrounds == sorted(backgrounds, reverse=scheme == "light")


def test_print_shows_all_of_the_prompt(browser, tmp_path):
    load(browser, tmp_path / "page.html", random_inspection(4000, 2, 2))
    painted = "return document.querySelectorAll('.row .cell:first-child [data-token]').length"
    assert browser.execute_script(painted) < 4000
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert printed.startswith(b"%PDF")
    assert browser.execute_script(painted) == 4000


LARGE = random_inspection(32768, 32, 8, ("ada-snapkv", "lava"))


def test_a_prompt_of_32k_tokens(browser, tmp_path):
    path = tmp_path / "page.html"
    drawn = min(load(browser, path, LARGE) for _ in range(3))
    assert path.stat().st_size < 15e6
    assert drawn < 2000
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    # It answers, and the end of the prompt is painted once it is seen.
    answered = "const start = performance.now(); document.querySelectorAll('#heads .head')[100].click();"
    answered += "document.body.offsetHeight; return performance.now() - start"
    assert browser.execute_script(answered) < 2000
    browser.execute_script("scrollTo(0, document.body.scrollHeight)")
    last = "return document.querySelector('[data-token=\"32767\"]')?.className"
    assert WebDriverWait(browser, 10).until(lambda b: b.execute_script(last)).startswith("shade-")
    assert browser.get_log("browser") == []


def test_a_page_that_stalls_is_noticed(browser, tmp_path):
    """A control: time that the script spends before it draws counts."""
    stall = "while (performance.now() < 2100);\nshowFrame();\n"
    drawn = load(browser, tmp_path / "page.html", change=lambda html: html.replace("showFrame();\n", stall))
    assert drawn > 2000


def test_errors_are_noticed(browser, tmp_path):
    """A control of what ends every test of a page."""
    error = "showFrame();\nconsole.error('x');\n"
    load(browser, tmp_path / "page.html", change=lambda html: html.replace("showFrame();\n", error))
    assert len(browser.get_log("browser")) == 1
