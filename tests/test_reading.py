"""What README, ARCHITECTURE and the pages name is there: files, folders, links, commands, options, and the newcomer's
way to the choice of a prefill worker.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from pathlib import Path, PurePosixPath

import pytest

from halfmoon.cli.commands import COMMANDS, module_of
from tests.test_tidy import FILES

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    str(path)
    for path in FILES
    if path.suffix == ".md"
    and (
        path.parts[0] in ("ARCHITECTURE.md", "README.md", "SECURITY.md", "docs")
        or path.parent.name == "papers"
    )
)
NAMED = re.compile(r"`([\w./-]+\.(?:py|md|toml|lock|sh|yaml|zst)|[\w/]+/)`")
LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")
#: Files that a cluster writes or a user has.
NOT_OURS = {"policy.toml", "halfmoon.toml"}
FOLDERS = {parent for path in FILES for parent in path.parents}


def is_there(name: str) -> bool:
    """Whether a file or folder of ours has this name or path, or one that ends with it."""
    parts = PurePosixPath(name).parts
    return (ROOT / name).exists() or any(
        path.parts[-len(parts) :] == parts for path in (FOLDERS if name.endswith("/") else FILES)
    )


def missing(page: str) -> list[str]:
    """Names in a page's prose of files and folders that are not there. What is fenced is a user's."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    return [name for name in NAMED.findall(prose) if name not in NOT_OURS and not is_there(name)]


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_and_links_to_are_there(page: str) -> None:
    text = (ROOT / page).read_text()
    assert missing(text) == []
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    links = [link for link in LINK.findall(prose) if not (ROOT / page).parent.joinpath(link).exists()]
    assert links == []


def test_a_file_that_is_gone_is_found() -> None:
    assert missing("See `core/gone.py`, `gone/` and `core/machine.py`.") == ["core/gone.py", "gone/"]


# --- commands as the pages write them ------------------------------------------------------------------------

COMMAND_LINE = re.compile(r"(?:^\$ |^    |`|\| )halfmoon ([a-z]+(?:-[a-z]+)*)\b([^`\n#]*)", re.M)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
NAMES = [command.name for command in COMMANDS]


@functools.cache
def options_of(command: str) -> set[str]:
    parser = argparse.ArgumentParser()
    module_of(command).add(parser)
    parsers, found = [parser], set[str]()
    while parsers:
        for action in parsers.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return found


def unknown(page: str) -> list[str]:
    """Commands and options of ours that a page writes and the program does not have."""
    found = []
    for command, words in COMMAND_LINE.findall(page.replace("\\\n", " ")):
        known = options_of(command) if command in NAMES else set()
        found += [f"{command} {option}" for option in OPTION.findall(words) if option not in known]
        found += [] if command in NAMES else [command]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_and_options_that_a_page_writes_exist(page: str) -> None:
    assert unknown((ROOT / page).read_text()) == []


def test_an_option_that_is_gone_is_found() -> None:
    page = "\n$ halfmoon up --gone 3 --prefill 2\n\nand `halfmoon fly`\n"
    assert unknown(page) == ["up --gone", "fly"]


# --- the newcomer's way: from README to the line that chooses ------------------------------------------------


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def defines(path: str, name: str) -> bool:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return any(isinstance(node, kinds) and node.name == name for node in ast.walk(tree(path)))


def imports(path: str) -> set[str]:
    """Paths of the modules of ours that a file imports."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("halfmoon."):
            module = str(node.module).removeprefix("halfmoon.").replace(".", "/")
            found |= {f"{module}.py", *(f"{module}/{alias.name}.py" for alias in node.names)}
    return found


def reading_order() -> list[str]:
    """The numbered steps of ARCHITECTURE."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    section = page.split("### Reading the code, in this order")[1].split("\n[docs/adding.md]")[0]
    return [" ".join(step.split()) for step in re.split(r"^\d+\. ", section, flags=re.M)[1:]]


def test_readme_names_the_function_where_the_choice_begins() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    begins = re.search(r"begins at `(\w+)` in `([\w/]+\.py)`", text)
    assert begins is not None
    assert defines(begins[2], begins[1])


def test_one_reads_from_the_order_of_a_request_to_the_rule_that_chooses_by_names_alone() -> None:
    """Each file of the step imports the next one, or one that was read before it does."""
    (step,) = [step for step in reading_order() if step.startswith("How one request finds its workers")]
    folder = re.search(r"in `([\w/]+)/`", step)
    assert folder is not None
    for name, function in re.findall(r"`([\w/]+\.py)` \(`(\w+)`\)", step):
        assert defines(f"{folder[1]}/{name}", function), (name, function)
    way = step.split("The formulas")[0]
    read: list[str] = []
    for name in re.findall(r"`([\w/]+\.py)`", way):
        path = f"{folder[1]}/{name}"
        assert not read or any(path in imports(before) for before in read), name
        read.append(path)
    last = ("orders.py", "admission.py", "placement/policies.py", "placement/fetch_plan.py")
    assert {f"{folder[1]}/{name}" for name in last} <= set(read)
    assert defines(f"{folder[1]}/placement/policies.py", "choose_prefill")
