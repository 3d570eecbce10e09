"""The page of a diagnosis: what is on it, that texts on it are texts, and how it behaves in a browser."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from letters import letter_tokenizer

from kvkeep.evaluate.diagnose import Events, diagnose
from kvkeep.evaluate.rows import read_rows, read_samples
from kvkeep.recorder import Branch, Item
from kvkeep.report import write_diagnosis
from kvkeep.report.diagnosis import render

TEXT = "<b>It was</b> the best & worst of times. </script><script>document.title = 'taken'</script><!-- " * 2


@pytest.fixture(scope="module")
def page(tiny, tmp_path_factory) -> Path:
    """The page of a small diagnosis of a text that would break a careless one."""
    out, tokenizer = tmp_path_factory.mktemp("page"), letter_tokenizer()
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    one = Item(
        source="text/</script><!--<i>", split="test", name="1", token_ids=ids[:, :80], branches=[Branch(ids[:, 80:152])]
    )
    settings = {"policies": ["tova"], "budgets": ["40%", 32], "events": Events(horizon=16), "views": 1}
    diagnose(tiny("llama"), tokenizer, [one], model_name="tiny <i>", out=out, **settings)
    return write_diagnosis(out)


def test_the_page_stands_alone_and_escapes_what_it_shows(page):
    html = page.read_text()
    assert html.count("<script") == 2 and html.count("</script>") == 2 and "<!--" not in html
    assert "tiny &lt;i&gt;" in html and "<i>" not in html
    assert "http://www.w3.org/2000/svg" in html and html.count("http") == 1


def test_the_page_shows_the_arms_that_have_rows(page):
    """A folder keeps the samples of a run that named other policies."""
    folder = page.parent
    rows, samples = read_rows(folder / "rows.jsonl"), read_samples(folder / "samples.jsonl")
    views = [json.loads(file.read_text()) for file in (folder / "views").glob("*.json")]
    without = render([row for row in rows if row.policy != "tova"], samples, views)
    assert '"tova"' in page.read_text() and "tova" not in without


def test_an_empty_folder_has_no_page(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing was diagnosed here"):
        write_diagnosis(tmp_path)


@pytest.fixture(scope="module")
def browser(page):
    """A headless Chromium that shows the page."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as shown:
        shown.get(page.as_uri())
        yield shown


@pytest.fixture(autouse=True)
def _no_errors(request):
    """Nothing that a test does in the browser leaves an error on its console."""
    yield
    if "browser" in request.fixturenames:
        assert request.getfixturevalue("browser").get_log("browser") == []


def find(browser, name: str):
    return browser.find_element("id", name)


def slide(browser, step: int) -> None:
    browser.execute_script(
        "const s = document.getElementById('step'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))", step
    )


def choose(browser, name: str, text: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(find(browser, name)).select_by_visible_text(text)


def colours(browser) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll('#tokens span')].map((span) => getComputedStyle(span).backgroundColor)"
    )


def classes(browser) -> list[str]:
    return browser.execute_script("return [...document.querySelectorAll('#tokens span')].map((s) => s.className)")


def test_the_page_shows_the_text_as_it_is(browser):
    assert browser.title == "kvkeep diagnosis"
    assert find(browser, "tokens").get_attribute("textContent") == TEXT[:152]


def test_moving_the_slider_changes_what_became_of_tokens(browser):
    slide(browser, 0)
    early, told = colours(browser), find(browser, "moment").text
    slide(browser, 6)
    assert find(browser, "moment").text != told
    late = colours(browser)
    assert early != late and len(set(late)) > 1
    kinds = [name.split()[0] for name in classes(browser)]
    # 79 + 7 * 8 tokens are read by then, and 2 of 5 kept
    assert kinds.count("unread") == 152 - 135 and kinds.count("kept") == 54 and kinds.count("gone") == 81


def test_another_head_has_kept_other_tokens(browser):
    slide(browser, 6)
    choose(browser, "head", "0")
    first = classes(browser)
    choose(browser, "head", "1")
    assert classes(browser) != first
    assert browser.execute_script("return document.querySelector('#map [aria-selected=true]').dataset.head") == "1"


def test_a_choice_in_the_map_is_the_head_that_is_shown(browser):
    browser.find_element("css selector", "#map [data-layer='2'][data-head='0']").click()
    assert (find(browser, "layer").get_property("value"), find(browser, "head").get_property("value")) == ("2", "0")
    assert find(browser, "cell").text.startswith("layer 2, head 0: ")


def test_hindsight_takes_tokens_back(browser):
    choose(browser, "view", "oracle · 40%")
    slide(browser, 6)
    assert any(name.startswith("revived") for name in classes(browser))
    choose(browser, "view", "tova · 40%")
    assert not any(name.startswith("revived") for name in classes(browser))


def test_the_keyboard_reaches_every_token_and_tells_its_fate(browser):
    from selenium.webdriver.common.keys import Keys

    slide(browser, 6)
    tokens = find(browser, "tokens")
    tokens.send_keys(Keys.HOME)
    assert "Token 0" in find(browser, "told").text and "first tokens" in find(browser, "told").text
    told = set()
    for _ in range(60):
        tokens.send_keys(Keys.ARROW_RIGHT)
        told.add(find(browser, "told").text.split("\n")[1].split(":")[0].split(" at ")[0].split(" when ")[0])
    assert "Token 60" in find(browser, "told").text
    assert {"Kept", "Dropped"} <= told


def test_pointing_at_a_token_tells_its_worth(browser):
    from selenium.webdriver import ActionChains

    slide(browser, 6)
    spans = browser.find_elements("css selector", "#tokens .gone")
    ActionChains(browser).move_to_element(spans[0]).perform()
    text = find(browser, "told").text
    assert "Dropped" in text and "Worth when last judged: 0." in text and "others kept are worth more" in text


def test_curves_follow_what_is_chosen(browser):
    def drawn() -> list[str]:
        return browser.execute_script(
            "return [...document.querySelectorAll('#chart path:not(.band)')].map((path) => path.getAttribute('d'))"
        )

    missed = drawn()
    assert len(missed) == 3
    choose(browser, "curve", "churn")
    churned = drawn()
    assert churned != missed
    choose(browser, "budget", "32")
    assert drawn() not in (missed, churned)


@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_its_window(browser, width):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_dark_pages_are_dark(browser):
    def paper(scheme: str) -> str:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        return browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    assert paper("light") == "rgb(255, 255, 255)" and paper("dark") == "rgb(23, 26, 31)"
