"""The page of a conversation: its turns, what each keeps, and its branch."""

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from tests.inspection.pages import branching
from tests.inspection.test_browser import load

INSPECTION = branching()


@pytest.fixture
def page(browser, tmp_path):
    load(browser, tmp_path / "page.html", INSPECTION)
    yield browser
    assert browser.get_log("browser") == []


def table(browser):
    return [
        [cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")]
        for row in browser.find_elements(By.CSS_SELECTOR, "#turns tr")
    ]


def percent(share):
    return f"{100 * share:.{1 if share < 0.1 else 0}f} %"


def expected(inspection, layers=slice(None), heads=slice(None)):
    names = ["Turn", "Tokens", *(kept.policy for kept in inspection.kept[:2])]
    ends = [0, *inspection.turns, len(inspection.prompt.ids)]
    rows = []
    for name, start, end in zip(("1", "2", "rest"), ends, ends[1:], strict=False):
        shares = [kept.mask[layers, heads, start:end].mean() for kept in inspection.kept[:2]]
        rows.append([name, str(end - start), *map(percent, shares)])
    return [names, *rows]


def test_what_is_kept_of_each_turn(page):
    assert table(page) == expected(INSPECTION)
    Select(page.find_element(By.ID, "layer")).select_by_visible_text("1")
    Select(page.find_element(By.ID, "head")).select_by_visible_text("2")
    chosen = expected(INSPECTION, [1], [2])
    assert table(page) == chosen != expected(INSPECTION)


def test_the_branch_is_a_page_of_its_own(page):
    def marked():
        page.execute_script("dispatchEvent(new Event('beforeprint'))")
        shared = page.find_elements(By.CSS_SELECTOR, "#turns .shared th")
        (parts,) = page.find_elements(By.CSS_SELECTOR, ".row .cell:first-child .branch")
        return [cell.text for cell in shared], parts.get_attribute("data-token")

    def go():
        page.execute_script("delete document.body.dataset.drawn")
        page.find_element(By.CSS_SELECTOR, "#branch a").click()
        WebDriverWait(page, 10).until(lambda b: b.execute_script("return document.body?.dataset.drawn"))

    assert page.find_element(By.ID, "branch").text == "Shared with the branch: turn 1, 40 tokens"
    assert marked() == (["1"], "40")
    go()
    assert table(page) == expected(INSPECTION.branch) != expected(INSPECTION)
    assert marked() == (["1"], "40") and "150 tokens" in page.find_element(By.ID, "about").text
    assert page.find_element(By.ID, "branch").text.startswith(
        "Shared with the conversation that it branches off from"
    )
    go()
    assert table(page) == expected(INSPECTION)
