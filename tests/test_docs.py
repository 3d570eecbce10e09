"""What the documents say is so: their code runs, their commands and links exist, their tables are the code's."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import typer.main

import kvkeep
from kvkeep import POLICIES
from kvkeep.cli import app

ROOT = Path(__file__).parents[1]
PAGES = {
    str(page.relative_to(ROOT)): page.read_text() for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
}
# short enough to run; of the others the imports are
_RUN = ("quickstart", "cache", "policies", "qevict", "traces", "diagnose", "serving")
RUN = ("README.md", *(f"docs/{page}.md" for page in _RUN))
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def shell_lines(text: str) -> Iterator[str]:
    """Every call of kvkeep in a page of documentation."""
    for block in blocks(text, "sh"):
        yield from re.findall(r"\bkvkeep (?:[a-z-]+ [^\n|#]*|[a-z-]+$)", block, flags=re.MULTILINE)


def help_lines() -> Iterator[str]:
    """Every call of kvkeep in the help of its commands."""
    for command in COMMANDS.values():
        for quoted in re.findall(r"`([^`]+)`", command.help or ""):
            yield from re.findall(r"(?:^| )(kvkeep [a-z-]+.*)", quoted)


def rows_of_policies(page: str) -> dict[str, list[str]]:
    """The cells of each line of a table whose first cell is a name in backquotes."""
    lines = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGES[page], flags=re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split(" | ")] for name, cells in lines if name in POLICIES}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(PAGES[page], "python")])
def test_what_the_python_of_a_page_imports_is_there(page):
    for block in blocks(PAGES[page], "python"):
        tree = ast.parse(block)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), page, "exec"), {})


@pytest.mark.parametrize("page", RUN)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # the same code, in a fraction of the time on processors without 16-bit numbers
    monkeypatch.setattr(kvkeep, "load", partial(kvkeep.load, dtype="fast"))
    names: dict[str, object] = {}
    for block in blocks(PAGES[page], "python"):
        exec(compile(block, page, "exec"), names)
    assert names


CALLS = sorted({line for text in PAGES.values() for line in shell_lines(text)} | set(help_lines()))


@pytest.mark.parametrize("line", CALLS)
def test_a_call_that_is_shown_has_options_that_exist(line):
    _, name, *arguments = shlex.split(line)
    if name == "lm-eval":
        pytest.skip("its arguments are lm-evaluation-harness's own")
    command = COMMANDS[name]
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    offered = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
    used = {argument for argument in arguments if re.fullmatch(r"--?[a-z][a-z-]*", argument)}
    # what these do not know they hand on
    assert used <= offered or command.context_settings.get("ignore_unknown_options")


def test_the_documents_show_every_command():
    shown = {shlex.split(line)[1] for line in CALLS}
    assert shown >= COMMANDS.keys()


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_leads_to_one(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", PAGES[page])
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_index_names_every_page():
    linked = set(re.findall(r"\]\(([^)#]+)", PAGES["docs/index.md"]))
    assert {Path(page).name for page in PAGES if page.startswith("docs/")} - linked == {"index.md"}


@pytest.mark.parametrize("page", ["README.md", "docs/policies.md"])
def test_a_table_of_policies_has_all_of_them_in_order(page):
    assert list(rows_of_policies(page)) == list(POLICIES)


def test_the_table_of_policies_says_what_their_classes_say():
    for name, (_, attach, chunks, size, source) in rows_of_policies("docs/policies.md").items():
        policy = POLICIES[name]
        assert (attach == "yes") == ("queries" in policy.needs), name
        assert (chunks == "any") == policy.chunk_free, name
        # fp32 arrays
        assert int(size) == 4 * len(policy.side), name
        paper = re.search(r"arxiv.org/abs/([\d.]+)", source)
        assert paper is None or f"arXiv {paper[1]}" in (policy.__doc__ or ""), name


def test_the_readme_says_which_policies_read_queries():
    for name, (_, reads, source) in rows_of_policies("README.md").items():
        policy = POLICIES[name]
        assert ("queries" in reads or "future" in reads) == ("queries" in policy.needs), name
        paper = re.search(r"arxiv.org/abs/([\d.]+)", source)
        assert paper is None or f"arXiv {paper[1]}" in (policy.__doc__ or ""), name


def test_the_documents_name_no_place_of_one_machine():
    for page, text in PAGES.items():
        assert re.findall(r"(?<![\w.])/(?:work|root|home|tmp)/\S*", text) == [], page


def test_the_readme_opens_with_two_commands_of_the_makefile():
    targets = re.findall(r"^make (\w+)", blocks(PAGES["README.md"], "sh")[0], flags=re.MULTILINE)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)
