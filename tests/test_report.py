"""The report: right numbers in the right cells, nothing from outside, and no text from models taken for markup."""

import math
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvkeep.evaluate.rows import Row, SampleLog, read_samples, wilson, write_rows
from kvkeep.report import print_table, write_report
from kvkeep.report.outputs import cases_by_task, shorten
from kvkeep.report.tables import FULL, Arm, Block, Cell, Line, blocks, budget_share, mean_cell, metric_tables
from kvkeep.report.wording import mebibytes, number, percent

MIB = 2**20
SCORES = {
    ("full", "full"): (20, 15),
    ("tova", "10%"): (5, 3),
    ("knorm", "10%"): (1, 3),
    ("tova", "25%"): (18, 6),
    ("knorm", "25%"): (2, 9),
}
HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)> & \"quoted\" [red]$a_b$"


def accuracy(policy: str, budget: str, task: str, right: int, **more: Any) -> Row:
    low, high, method = wilson(right, 25)
    share = 1.0 if policy == "full" else float(budget[:-1]) / 100
    fields: dict[str, Any] = {
        "value": right / 25,
        "low": low,
        "high": high,
        "interval": method,
        "n": 25,
        "model": "smollm2",
        "policy": policy,
        "budget": budget,
        "task": task,
        "length": 2048,
        "question": "inside",
        "kept": 2048 * share,
        "cache_bytes": 45 * MIB * share,
        "full_bytes": 45 * MIB,
        "command": "kvkeep eval --samples 25",
        "commit": "0123abc",
    }
    return Row(**{**fields, **more})


def table_rows(**more: Any) -> list[Row]:
    """Two tasks under the full cache and two policies at two budgets."""
    return [
        accuracy(policy, budget, task, right, **more)
        for (policy, budget), scores in SCORES.items()
        for task, right in zip(("needle", "words"), scores, strict=True)
    ]


def only_block(rows: list[Row]) -> Block:
    (block,) = blocks(rows)
    return block


def line_of(block: Block, policy: str, budget: str) -> Line:
    return next(line for line in block.lines if line.arm == Arm(policy, budget))


class Page(HTMLParser):
    """What a browser would make of the page: tags with their attributes, text, and tables as lists of rows."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.in_cell = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = self.in_cell and tag not in ("th", "td")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.in_cell:
            self.tables[-1][-1][-1] += data

    @property
    def names(self) -> list[str]:
        return [tag for tag, _ in self.tags]


# arranging


@given(halves=st.lists(st.floats(0, 1), min_size=1, max_size=20), value=st.floats(0, 1))
def test_intervals_of_a_mean_combine_as_standard_errors_do(halves: list[float], value: float) -> None:
    mean = mean_cell([Cell(value, value - half, value + half, 5) for half in halves])
    assert mean.low is not None and mean.high is not None
    expected = math.sqrt(sum(half**2 for half in halves)) / len(halves)
    assert (mean.high - mean.value, mean.value - mean.low) == pytest.approx((expected, expected), abs=1e-9)
    assert (mean.n, mean.num_tasks) == (5 * len(halves), len(halves))


def test_the_mean_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    truth = np.array([0.02, 0.3, 0.6, 0.97])
    hits = 0
    for _ in range(2000):
        counts = generator.binomial(25, truth)
        bounds = [wilson(int(count), 25) for count in counts]
        mean = mean_cell(
            [Cell(count / 25, low, high, 25) for count, (low, high, _) in zip(counts, bounds, strict=True)]
        )
        assert mean.low is not None and mean.high is not None
        hits += mean.low <= truth.mean() <= mean.high
    assert 0.93 <= hits / 2000 <= 0.98


def test_a_mean_with_one_unknown_interval_has_none() -> None:
    mean = mean_cell([Cell(0.5, None, None, 1), Cell(1.0, 0.9, 1.0, 25)])
    assert (mean.value, mean.low, mean.high) == (0.75, None, None)


def test_each_score_stands_in_its_cell_with_its_share_of_the_full_cache() -> None:
    block = only_block(table_rows())
    assert block.tasks == ["needle", "words"]
    for (policy, budget), (needle, words) in SCORES.items():
        line = line_of(block, policy, budget)
        assert line.cells["inside", "needle"].value == needle / 25
        assert line.cells["inside", "words"].share == pytest.approx(words / 15)
        assert line.means["inside"].value == pytest.approx((needle + words) / 50)
        assert line.means["inside"].share == pytest.approx((needle + words) / 35)


def test_the_best_policy_of_each_budget_is_marked_and_never_the_full_cache() -> None:
    block = only_block(table_rows())
    best = {
        (line.arm.policy, line.arm.budget, task)
        for line in block.lines
        for (_, task), cell in line.cells.items()
        if cell.best
    }
    # on words at 10% both are equal, and none is best
    assert best == {("tova", "10%", "needle"), ("tova", "25%", "needle"), ("knorm", "25%", "words")}
    assert [line.arm for line in block.lines if line.means["inside"].best] == [Arm("tova", "10%"), Arm("tova", "25%")]


@pytest.mark.parametrize("needle", [18, 12])
def test_a_mean_over_fewer_tasks_is_not_compared(needle: int) -> None:
    # on needles alone: 18 of 25 is above all other means, 12 of 25 equals the best of them
    block = only_block([*table_rows(), accuracy("h2o", "25%", "needle", needle)])
    mean = line_of(block, "h2o", "25%").means["inside"]
    assert (mean.value, mean.num_tasks, mean.best, mean.share) == (needle / 25, 1, False, None)
    assert line_of(block, "tova", "25%").means["inside"].best


def test_the_full_cache_is_one_line_whatever_its_budget_is_called() -> None:
    rows = [row if row.policy != "full" else accuracy("full", "100%", row.task, 25) for row in table_rows()]
    assert only_block(rows).lines[0].arm == FULL


def test_a_policy_at_full_budget_competes_with_policies_only() -> None:
    rows = [accuracy(name, "100%", "needle", right) for name, right in (("full", 25), ("tova", 20), ("knorm", 10))]
    rows = [replace(row, budget="full") for row in rows]
    assert [line.arm.policy for line in only_block(rows).lines if line.means["inside"].best] == ["tova"]


def test_a_full_cache_measured_once_stands_beside_both_positions_of_the_question() -> None:
    full = [row for row in table_rows(question="") if row.policy == "full"]
    others = [row for place in ("inside", "after") for row in table_rows(question=place) if row.policy != "full"]
    block = only_block(full + others)
    assert block.questions == ["inside", "after"]
    assert block.without_full == []
    assert line_of(block, *FULL).cells["after", "needle"].value == 20 / 25


def test_the_full_cache_comes_first_and_budgets_rise() -> None:
    shuffled = sorted(table_rows(), key=lambda row: row.to_json()[::-1])
    block = only_block(shuffled)
    assert block.lines[0].arm == FULL
    assert block.budgets == ["10%", "25%"]


def test_different_models_lengths_dtypes_and_splits_never_share_a_table() -> None:
    changes: list[dict[str, Any]] = [{}, {"model": "qwen"}, {"length": 8000}, {"dtype": "float32"}, {"split": "test"}]
    found = blocks([row for change in changes for row in table_rows(**change)])
    assert len(found) == len(changes)
    assert all(len(block.lines) == len(SCORES) for block in found)


@pytest.mark.parametrize(
    ("budget", "length", "measured", "expected"),
    [
        ("25%", 2048, None, 0.25),
        ("0.25", 2048, None, 0.25),
        ("512", 2048, None, 0.25),
        ("64MiB", 2048, (16.0, 64.0), 0.25),
        ("512", None, (16.0, 64.0), 0.25),
        ("64MiB", 2048, None, None),
        ("some%", None, None, None),
    ],
)
def test_every_kind_of_budget_has_its_place_on_one_axis(
    budget: str, length: int | None, measured: tuple[float, float] | None, expected: float | None
) -> None:
    assert budget_share(budget, length, *(measured or (None, None))) == expected


def test_a_metric_table_shows_what_differs_and_tells_the_rest_once() -> None:
    rows = [Row(metric="decode_ratio", value=value, model="m", policy=name) for name, value in (("a", 1), ("b", 2))]
    (table,) = metric_tables([*table_rows(), *rows])
    assert (table.metric, table.columns, table.shared) == ("decode_ratio", ["policy"], "model m")
    assert table.rows == rows


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234.5, "1,234"),
        (999.7, "1,000"),
        (99.97, "100"),
        (12.34, "12.3"),
        (100, "100"),
        (0.25, "0.250"),
        (0.00012, "0.00012"),
        (None, "–"),
    ],
)
def test_numbers_are_written_with_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_shares_and_bytes_are_written_in_percent_and_mib() -> None:
    assert (percent(0.25), percent(0.256, 0), percent(None)) == ("25.0", "26", "–")
    assert (mebibytes(45 * MIB), mebibytes(MIB // 2), mebibytes(None)) == ("45.0", "0.500", "–")


# the page


@pytest.fixture
def no_plots(monkeypatch: Any) -> None:
    """For tests of what does not depend on plots: drawing takes most of a report's time."""
    monkeypatch.setattr("kvkeep.report._plots", lambda *_: [])


@pytest.mark.usefixtures("no_plots")
def test_the_page_holds_every_score_in_its_row_and_column(tmp_path: Path) -> None:
    page = Page(write_report(table_rows(), tmp_path).html)
    overview, by_task = page.tables
    assert by_task[0] == ["policy", "needle", "words", "mean"]
    scores = {tuple(row[0].split()): row[1:] for row in by_task if len(row) == 4}
    assert [cell.split(".")[0] for cell in scores["full", "cache"]] == ["80", "60", "70"]
    names = [row[0] for row in by_task]
    assert names == ["policy", "full cache", "budget 10%", "tova", "knorm", "budget 25%", "tova", "knorm"]
    # 18 of 25 and its interval; 25% of 45 MiB and of 2,048 tokens
    assert by_task[6][1] == "72.0" + "52–86"
    assert overview[6][2:] == ["512", "11.2", "25.0"]
    assert "kvkeep eval --samples 25" in page.text and "0123abc" in page.text


def test_the_page_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    page = Page(write_report(table_rows(), tmp_path).html)
    links = [value or "" for _, attributes in page.tags for name, value in attributes.items() if name in LINKS]
    assert len(links) > 4
    assert all(link.startswith("data:") for link in links)
    assert "url(" not in page.text and "@import" not in page.text and "script" not in page.names


LINKS = ("src", "href", "srcset", "action", "data", "poster", "xlink:href")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A page whose every text tries to be markup."""
    names = ("model", "dtype", "split", "question", "commit", "device", "cpu", "command")
    changes: dict[str, Any] = dict.fromkeys(names, HOSTILE)
    rows = table_rows(**changes, versions={HOSTILE: HOSTILE}, time=HOSTILE)
    rows += [accuracy(HOSTILE, "25%", HOSTILE, 3, **changes)]
    rows += [Row(metric=HOSTILE, value=1, task=HOSTILE, policy=name) for name in (HOSTILE, "b")]
    with SampleLog(tmp_path / "samples.jsonl") as log:
        for index, policy in enumerate(("full", HOSTILE)):
            log.append(
                {
                    "key": str(index),
                    "score": index / 2,
                    "policy": policy,
                    "budget": HOSTILE,
                    "task": HOSTILE,
                    "model": HOSTILE,
                    "question": HOSTILE,
                    "output": HOSTILE,
                    "answers": [HOSTILE],
                    "index": 0,
                    "extra": {"prompt": HOSTILE},
                }
            )
    return write_report(rows, tmp_path / "page", samples=tmp_path / "samples.jsonl").html


def test_no_text_from_rows_prompts_or_models_becomes_markup(hostile: Path) -> None:
    page = Page(hostile)
    assert "script" not in page.names
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert all((attributes["src"] or "").startswith("data:") for tag, attributes in page.tags if tag == "img")
    # prompt, answer, two outputs, and the names around them are there to read
    assert page.text.count(HOSTILE) >= 20


@pytest.mark.usefixtures("no_plots")
def test_samples_are_shown_right_wrong_and_partly(tmp_path: Path) -> None:
    with SampleLog(tmp_path / "samples.jsonl") as log:
        for policy, score in (("tova", 0.0), ("knorm", 0.5), ("full", 1.0)):
            log.append(
                {
                    "key": policy,
                    "score": score,
                    "policy": policy,
                    "budget": "10%",
                    "task": "needle",
                    "output": f"said by {policy}",
                    "answers": ["42"],
                    "extra": {"prompt": "What is it?"},
                }
            )
    html = write_report(table_rows(), tmp_path, samples=tmp_path / "samples.jsonl").html
    records = read_samples(tmp_path / "samples.jsonl")
    assert write_report(table_rows(), tmp_path / "again", samples=records).html.read_text() == html.read_text()
    page = Page(html)
    assert "details" in page.names
    told = page.text[page.text.index("What the policies answered") :]
    order = ["What is it?", "42", "right", "said by full", "wrong", "said by tova", "50% right", "said by knorm"]
    places = [told.index(text) for text in order]
    assert places == sorted(places)


def test_samples_on_which_policies_disagree_are_chosen_first() -> None:
    records = [
        {"key": f"{index}{policy}", "score": score, "policy": policy, "task": "t", "index": index}
        for index, scores in enumerate([(1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1.0, 0.5)])
        for policy, score in zip(("full", "tova"), scores, strict=True)
    ]
    assert [case.title for case in cases_by_task(records, per_task=2)["t"]] == ["sample 1", "sample 3"]


@given(text=st.text(max_size=300), limit=st.integers(3, 200))
def test_shortened_text_keeps_its_start_and_its_end_and_counts_what_is_gone(text: str, limit: int) -> None:
    short = shorten(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        start, _, rest = short.partition(f" … [{len(text) - limit:,} characters left out] … ")
        assert text.startswith(start) and text.endswith(rest) and len(start) + len(rest) == limit


@pytest.mark.usefixtures("no_plots")
def test_rows_without_a_full_cache_still_make_a_page_that_says_so(tmp_path: Path) -> None:
    rows = [row for row in table_rows() if row.policy != "full"]
    page = Page(write_report(rows, tmp_path).html)
    assert "No full-cache row for smollm2 · 2,048 tokens · question inside" in page.text
    assert not any("--share" in (attributes.get("style") or "") for _, attributes in page.tags)
    assert "No full-cache row" not in Page(write_report(table_rows(), tmp_path).html).text


@pytest.mark.usefixtures("no_plots")
def test_repeated_measurements_and_few_samples_are_told(tmp_path: Path) -> None:
    rows = [*table_rows(), accuracy("tova", "10%", "needle", 25)]
    page = Page(write_report(rows, tmp_path).html)
    assert "more than once: the last of each is shown, 1 left out" in page.text
    assert page.tables[1][3][1].startswith("100.0")
    few = Page(write_report(table_rows(n=4), tmp_path).html)
    assert "few samples (down to 4)" in few.text


def demo_rows() -> list[Row]:
    """What a demonstration leaves: a few questions, no task, and speed as a metric of its own."""
    return [
        row
        for policy, budget, right in (("full", "full", 25), ("tova", "25%", 20), ("tova", "10%", 5))
        for row in (
            accuracy(policy, budget, "", right, n=3),
            Row(metric="tokens_per_s", value=40 + right, model="smollm2", policy=policy, budget=budget, n=3),
        )
    ]


@pytest.mark.usefixtures("no_plots")
def test_rows_of_a_demonstration_show_speed_beside_accuracy(tmp_path: Path) -> None:
    page = Page(write_report(demo_rows(), tmp_path).html)
    overview, speeds = page.tables
    assert overview[0][-1] == "tokens/s"
    assert [row[-1] for row in overview if len(row) > 2][1:] == ["65.0", "45.0", "60.0"]
    assert speeds[0] == ["policy", "budget", "value", "95% interval", "samples"]


def test_rows_without_accuracy_make_a_page_of_their_metrics(tmp_path: Path) -> None:
    report = write_report([Row(metric="decode_ratio", value=2.5, policy="tova", budget="25%")], tmp_path)
    assert report.pngs == []
    assert Page(report.html).tables == [[["value", "95% interval", "samples"], ["2.50", "–", "–"]]]


# files


def test_rows_are_read_from_a_file_as_from_a_list(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", table_rows())
    from_file = write_report(tmp_path / "rows.jsonl", tmp_path / "a")
    from_list = write_report(table_rows(), tmp_path / "b.html")
    assert (from_file.html, from_list.html) == (tmp_path / "a" / "report.html", tmp_path / "b.html")
    assert from_file.html.read_bytes() == from_list.html.read_bytes()
    assert [path.name for path in from_list.pngs] == ["b-accuracy.png", "b-bytes.png"]


def test_each_setting_gets_plots_of_its_own_that_show_something(tmp_path: Path) -> None:
    names = ("qwen/2.5 coder", "qwen 2.5/coder", "long/" * 100)
    report = write_report([row for name in names for row in table_rows(model=name, question="")], tmp_path)
    assert len(set(report.pngs)) == 6
    for path in report.pngs:
        image = matplotlib.image.imread(BytesIO(path.read_bytes()))
        assert min(image.shape[:2]) > 300 and len(np.unique(image[..., 0])) > 50


@pytest.mark.parametrize(
    ("budgets", "measured"),
    [
        (("25%",), {}),
        (("512", "25%"), {"cache_bytes": 9, "full_bytes": 90}),
        (("64MiB",), {"cache_bytes": 9, "full_bytes": 90}),
        (("64MiB", "25%"), {}),
    ],
)
@pytest.mark.filterwarnings("error")
def test_plots_are_drawn_for_any_mix_of_budgets(
    tmp_path: Path, budgets: tuple[str, ...], measured: dict[str, Any]
) -> None:
    rows = [
        Row(value=index / 9, policy=f"$\\p_{index}$", budget=budget, length=2048, **measured)
        for index in range(9)
        for budget in budgets
    ]
    assert len(write_report(rows, tmp_path).pngs) == 1 + bool(measured)


def test_no_rows_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    sources: list[Path | list[Row]] = [tmp_path / "rows.jsonl", []]
    for rows in sources:
        with pytest.raises(ValueError, match=r"no rows.*kvkeep eval"):
            write_report(rows, tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file of rows.*kvkeep eval.*none\.jsonl"):
        write_report(tmp_path / "none.jsonl", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no file of samples.*none\.jsonl"):
        write_report(table_rows(), tmp_path, samples=tmp_path / "none.jsonl")


@pytest.mark.usefixtures("no_plots")
def test_damaged_rows_are_refused_by_line_and_leave_the_last_page_alone(tmp_path: Path) -> None:
    html = write_report(table_rows(), tmp_path).html
    before = html.read_bytes()
    path = tmp_path / "rows.jsonl"
    write_rows(path, table_rows())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:50] + "\n", *lines[2:]]))
    with pytest.raises(ValueError, match="line 2 is not a row"):
        write_report(path, tmp_path)
    assert html.read_bytes() == before


def test_importing_the_report_does_not_load_the_plotting_library() -> None:
    check = "import sys, kvkeep.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


# the terminal


def printed(rows: list[Row], width: int = 100) -> str:
    console = Console(width=width, record=True, file=StringIO())
    print_table(rows, console)
    return console.export_text()


def test_the_terminal_shows_accuracy_interval_kept_and_bytes_of_each_policy_and_budget() -> None:
    text = printed(table_rows())
    (line,) = [line for line in text.splitlines() if "tova" in line and "25%" in line]
    mean = line_of(only_block(table_rows()), "tova", "25%").means["inside"]
    expected = ["tova", "25%", "48.0", f"{percent(mean.low, 0)}–{percent(mean.high, 0)}", "512", "11.2"]
    assert line.replace("│", " ").split() == expected
    assert "tokens/s" not in text


def test_the_terminal_shows_speed_and_other_metrics_where_there_are_any() -> None:
    text = printed([*demo_rows(), Row(metric="decode_ratio", value=2.5, policy="tova")])
    assert "tokens/s" in text and "60.0" in text
    assert "decode_ratio" in text and "2.50" in text
    assert "tokens_per_s" not in text


def test_the_terminal_takes_names_literally_and_says_what_is_missing() -> None:
    text = printed([Row(policy="[red]", budget="[bold]", value=0.5, n=50, model="[/]")])
    assert "[red]" in text and "[bold]" in text and "[/]" in text
    assert "No full-cache row" in text
    assert printed([]).strip() == "No rows."


# a real browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --enable-logging=stderr --dump-dom
"""


def browse(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page as the browser builds it, and what it wrote to the console."""
    quiet = [*OPTIONS.split(), "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [str(BROWSER), *quiet, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no chromium to look with")
def test_a_real_browser_shows_all_tables_without_a_complaint_and_runs_nothing(hostile: Path, tmp_path: Path) -> None:
    dom, console = browse(hostile, tmp_path / "profile")
    assert console == []
    assert dom.count("<table") == 3 and "<script" not in dom and dom.count("<details") == 1
    bad = tmp_path / "bad.html"
    bad.write_text("<p>x<script>console.error('seen')</script>")
    # without this, silence would prove nothing
    assert any("seen" in line for line in browse(bad, tmp_path / "profile")[1])


# agreement by position


def by_position(*values: float) -> list[dict]:
    edges = [0, *(64 * 2**place for place in range(len(values)))]
    return [
        {"first": edges[place], "until": edges[place + 1], "value": value, "low": value, "high": value, "n": 3}
        for place, value in enumerate(values)
    ]


def agreement_row(policy: str, budget: str, metric: str = "top1_agreement", task: str = "all") -> Row:
    return Row(
        metric=metric,
        value=0.9,
        n=3,
        model="m",
        policy=policy,
        budget=budget,
        task=task,
        extra={"by_position": by_position(0.9, 0.8, 0.7)},
    )


def test_agreement_by_position_is_drawn_for_each_kind_of_text(tmp_path):
    rows = [
        agreement_row(*arm, metric, task)
        for task in ("all", "text/<novel>")
        for metric in ("top1_agreement", "kl_to_full")
        for arm in (("full", "full"), ("tova", "64"), ("tova", "128"), ("kvp", "64"))
    ]
    written = write_report(rows, tmp_path)
    assert [png.name for png in written.pngs] == ["report-positions-1-m-all.png", "report-positions-2-m-text-novel.png"]
    page = written.html.read_text()
    assert "Agreement with the full cache" in page and page.count('alt="Agreement by position') == 2
    assert "text/&lt;novel&gt;" in page and "text/<novel>" not in page


def test_a_report_without_positions_draws_none(tmp_path):
    page = write_report([agreement_row("full", "full")], tmp_path).html.read_text()
    assert "Agreement with the full cache" not in page
