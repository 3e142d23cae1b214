"""The page in a real browser: what it shows is what its data says, by mouse and by keyboard, and soon enough; that of a
conversation has its turns, and its branch."""

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from tests.inspection.pages import branching, random_inspection
from vllm_kvevict.inspect.page import render

TOKENS, LAYERS, HEADS = 130, 3, 4
INSPECTION = random_inspection(TOKENS, LAYERS, HEADS)
STEPS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75)


def load(browser, path, inspection=INSPECTION):
    """Open an inspection's page; milliseconds until its first shades were drawn."""
    path.write_text(render(inspection), "utf-8")
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


HOSTILE = ["</script><b>", "\r\n", "\0", " & \\", " \U0001f600", "\n", "\n", " \u202ereversed", "\n"]


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


# A conversation.

CONVERSATION = branching()


@pytest.fixture
def turns(browser, tmp_path):
    load(browser, tmp_path / "page.html", CONVERSATION)
    yield browser
    assert browser.get_log("browser") == []


def table(browser):
    return [
        [cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")]
        for row in browser.find_elements(By.CSS_SELECTOR, "#turns tr")
    ]


def percent(share):
    return f"{100 * share:.{1 if share < 0.1 else 0}f} %"


def expected_rows(inspection, layers=slice(None), heads=slice(None)):
    names = ["Turn", "Tokens", *(kept.policy for kept in inspection.kept[:2])]
    ends = [0, *inspection.turns, len(inspection.prompt.ids)]
    rows = []
    for name, start, end in zip(("1", "2", "rest"), ends, ends[1:], strict=False):
        shares = [kept.mask[layers, heads, start:end].mean() for kept in inspection.kept[:2]]
        rows.append([name, str(end - start), *map(percent, shares)])
    return [names, *rows]


def test_what_is_kept_of_each_turn(turns):
    assert table(turns) == expected_rows(CONVERSATION)
    Select(turns.find_element(By.ID, "layer")).select_by_visible_text("1")
    Select(turns.find_element(By.ID, "head")).select_by_visible_text("2")
    chosen = expected_rows(CONVERSATION, [1], [2])
    assert table(turns) == chosen != expected_rows(CONVERSATION)


def test_the_branch_is_a_page_of_its_own(turns):
    def marked():
        turns.execute_script("dispatchEvent(new Event('beforeprint'))")
        shared = turns.find_elements(By.CSS_SELECTOR, "#turns .shared th")
        (parts,) = turns.find_elements(By.CSS_SELECTOR, ".row .cell:first-child .branch")
        return [cell.text for cell in shared], parts.get_attribute("data-token")

    def go():
        turns.execute_script("delete document.body.dataset.drawn")
        turns.find_element(By.CSS_SELECTOR, "#branch a").click()
        WebDriverWait(turns, 10).until(lambda b: b.execute_script("return document.body?.dataset.drawn"))

    assert turns.find_element(By.ID, "branch").text == "Shared with the branch: turn 1, 40 tokens"
    assert marked() == (["1"], "40")
    go()
    assert table(turns) == expected_rows(CONVERSATION.branch) != expected_rows(CONVERSATION)
    assert marked() == (["1"], "40") and "150 tokens" in turns.find_element(By.ID, "about").text
    assert turns.find_element(By.ID, "branch").text.startswith(
        "Shared with the conversation that it branches off from"
    )
    go()
    assert table(turns) == expected_rows(CONVERSATION)
