"""The site is built without warnings, and loads nothing from other hosts."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT

pytestmark = pytest.mark.slow
RESOURCE = re.compile(r'<(?:script|img|iframe|source)[^>]*\ssrc="([^"]+)"|<link[^>]*\shref="([^"]+)"[^>]*>')


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_loads_anything_from_another_host(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        for match in RESOURCE.finditer(page.read_text(encoding="utf-8")):
            assert "://" not in (match[1] or match[2]), f"{page.name} loads {match[0]}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?https?:", style.read_text(encoding="utf-8")), style


def test_search_works_in_pages_that_are_opened_as_files(site):
    """The index is a script, since pages may not read files, and workers are the frames of iframe-worker."""
    assert "whitening" in (site / "search" / "search_index.js").read_text(encoding="utf-8")
    for page, script in (("index.html", "iframe-worker.js"), ("studies/smollm2/index.html", "../../iframe-worker.js")):
        assert f'<script src="{script}">' in (site / page).read_text(encoding="utf-8")
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    boosted = {entry["location"].partition("#")[0] for entry in index["docs"] if entry.get("boost", 1) < 1}
    assert boosted == {"api.html", "options.html", "CONTRIBUTING.html"}
    assert "IFrameWorker" in (site / "iframe-worker.js").read_text(encoding="utf-8")


def test_pages_have_formulas_docstrings_and_linked_files(site):
    text = lambda name: (site / name).read_text(encoding="utf-8")
    page = text("paper.html")
    assert page.count('<svg class="formula"') > 20 and "arithmatex" not in page
    assert r'aria-label="a_j = 2\cos(\phi_j, \phi_*)"' in page
    for words in ("apply <code>overrides</code>", "Trainer for strided EBFT of a causal LM", "A TRL reward function:"):
        assert words in text("api.html")
    assert "base_model: Qwen/Qwen2.5-1.5B" in text("examples/paper_full.yaml.txt")
    assert 'href="examples/paper_full.yaml.txt"' in text("results.html")
    assert (site / "studies/smollm2/results/overview.png").is_file()
