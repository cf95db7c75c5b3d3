import re
from pathlib import Path

from ebft.run.config.schema import parse_yaml
from ebft.tools.init.config import _settings_of

ROOT = Path(__file__).parents[2]
RECIPE = {"temperature": 1.0, "embed_method": "mean_pooling", "ce_coef": 0.2}


def test_every_place_has_the_recipe():
    found = {"init": _settings_of("ebft", {})["ebft"]}
    for name in ("strided_prompt_completion", "strided_text_lora", "quickstart/tiny"):
        found[name] = parse_yaml((ROOT / "examples" / f"{name}.yaml").read_text())["ebft"]
    for page in ("README.md", "docs/texts.md"):
        found[page] = parse_yaml(re.search(r"```yaml\n(base_model:.*?)```", (ROOT / page).read_text(), re.DOTALL)[1])[
            "ebft"
        ]
    for page in ("README.md", "docs/strided.md"):
        given = re.search(r"args = StridedEBFTConfig\((.*?)\)", (ROOT / page).read_text())[1]
        found[f"program of {page}"] = {key: parse_yaml(value) for key, value in re.findall(r"(\w+)=([^,]+)", given)}
    for place, section in found.items():
        assert {key: section.get(key) for key in RECIPE} == RECIPE, place
        assert not section.get("use_whitening") and section.get("diversity_coef", 1) == 1, place
