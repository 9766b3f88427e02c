"""The documentation: its site is built without a warning or a network, and README leads to what is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import keys

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", folder]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme's
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_are_built_and_load_nothing_from_elsewhere(site):
    pages = {str(page.relative_to(site)): page.read_text() for page in site.rglob("*.html")}
    assert "gradient_norm" in pages["reference/strategy.html"]  # from a docstring
    assert "LlamaForCausalLM" in pages["howto/hugging-face.html"]  # from an example
    loads = r"<(?:script|link|img)[^>]*(?:src|href)=\"?https?:"
    assert [name for name, text in pages.items() if re.search(loads, text)] == []


def test_readme_is_short_and_leads_to_files():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1000
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_keys_are_those_of_the_callbacks():
    assert keys.PAGE.read_text() == keys.render()


def test_included_examples_are_run_by_tests():
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    included = set(re.findall(r'--8<-- "examples/(.+?)"', pages))
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert len(included) > 8
    assert [name for name in included if name not in tests] == []
