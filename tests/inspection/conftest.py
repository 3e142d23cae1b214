"""A real browser without a window: Debian's chromium and its driver."""

import os
import shutil

import pytest

PROGRAMS = ("chromium", "chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--window-size=1280,900",
)


@pytest.fixture(scope="session")
def browser():
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        say = f"{', '.join(missing)} not found (on Debian: apt-get install chromium chromium-driver)"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(say)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()
