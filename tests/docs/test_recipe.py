import re
from pathlib import Path

from ebft.run.config.schema import parse_yaml
from ebft.tools.init.config import _settings_of

ROOT = Path(__file__).parents[2]
PAGES = "README.md", "docs/texts.md", "docs/structured.md"
RECIPE = {"temperature": 1.0, "embed_method": "mean_pooling", "ce_coef": 0.2}


def test_every_place_has_the_recipe():
    found = {name: _settings_of(name, {}) for name in ("ebft", "ebft-structured")}
    for path in (*ROOT.glob("examples/str*.yaml"), *map(ROOT.joinpath, PAGES)):
        found[path.name] = parse_yaml(re.search(r"(?ms)^base_model:.*?(?=```|\Z)", path.read_text())[0])
    assert {keys["learning_rate"] for keys in found.values()} == {1e-4}  # of adapters
    for name in ("tiny", "smollm2"):  # with higher rates, as they are short
        found[name] = parse_yaml((ROOT / "examples" / "quickstart" / f"{name}.yaml").read_text())
    for page in ("README.md", "docs/strided.md"):
        given = re.search(r"args = StridedEBFTConfig\((.*?)\)", (ROOT / page).read_text())[1]
        found[f"program of {page}"] = {key: parse_yaml(value) for key, value in re.findall(r"(\w+)=([^,]+)", given)}
    for place, keys in found.items():
        section = keys | keys.get("trl", {}) | keys.get("ebft", {})
        pooling = "completion_mean" if "trl" in keys else "mean_pooling"
        assert {key: section.get(key) for key in RECIPE} == RECIPE | {"embed_method": pooling}, place
        assert not section.get("use_whitening") and section.get("diversity_coef", 1) == 1, place
