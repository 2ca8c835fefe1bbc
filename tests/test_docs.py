"""The documents name only what exists: files, commands, configs."""

import re
from pathlib import Path

import pytest
import typer

from hacrl_jax.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page):
    text = page.read_text("utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for path in re.findall(r"(?<![\w/])(?:configs|scripts|docs|tests)/[\w/]+\.\w+", text):
        assert (ROOT / path).exists() or (page.parent / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    known = set(typer.main.get_command(app).commands)
    named = set(re.findall(r"(?:^|`)hacrl ([a-z]+)", page.read_text("utf-8"), flags=re.MULTILINE))
    assert named <= known


def test_the_tree_in_the_readme_is_the_package():
    tree = (ROOT / "README.md").read_text("utf-8").partition("```\nhacrl_jax/\n")[2].partition("```")[0]
    named = set(re.findall(r"^  ([\w.]+)/? ", tree, flags=re.MULTILINE))
    rooms = {path.name for path in (ROOT / "hacrl_jax").iterdir() if not path.name.startswith("__")}
    assert named == rooms
