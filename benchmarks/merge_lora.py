"""Peak memory of `ebft merge-lora` on SmolLM2-135M in shards of 20 MB, beside the size of the model.

    python -m benchmarks.merge_lora [--shard 20MB] [--peft]

With --peft, the same adapter is merged by PEFT's merge_and_unload, for comparison. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from ebft.catalog import cached_folder

PREPARE = """
import sys
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
source, base, adapter, shard = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source)
AutoTokenizer.from_pretrained(source).save_pretrained(base)
model.save_pretrained(base, max_shard_size=shard)
model.config.name_or_path = base
settings = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
get_peft_model(model, settings).save_pretrained(adapter)
"""
START = """
import json, sys
from pathlib import Path
import peft, transformers
from ebft.machine import peak_resident
from ebft.tools.export.merge import MergeSource, merge_adapter
base, adapter, to = sys.argv[1:]
before = peak_resident()
"""
MERGE = """
result = merge_adapter(MergeSource(Path(adapter), base), Path(to))
sizes = {"shards": result.shards, "model": result.total_size, "largest_shard": result.largest_shard}
print(json.dumps(sizes | {"baseline": before, "over_baseline": peak_resident() - before}))
"""
PEFT = """
model = transformers.AutoModelForCausalLM.from_pretrained(base)
peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(to)
print(json.dumps({"baseline": before, "over_baseline": peak_resident() - before}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shard", default="20MB", help="shard size of the base model")
    parser.add_argument("--peft", action="store_true", help="also merge with PEFT's merge_and_unload")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base, adapter, to = (str(Path(folder) / name) for name in ("base", "adapter", "merged"))
        run(PREPARE, str(cached_folder("smollm2-135m")), base, adapter, options.shard)
        found = {"ebft": json.loads(run(START + MERGE, base, adapter, to))}
        if options.peft:
            found["peft"] = json.loads(run(START + PEFT, base, adapter, f"{to}-peft"))
        found["ebft"]["adapter"] = sum(path.stat().st_size for path in Path(adapter).glob("*.safetensors"))
    for name, sizes in found.items():
        shown = {key: value for key, value in sizes.items() if key != "shards"}
        print(f"{name}: " + ", ".join(f"{key} {value / 2**20:.1f} MiB" for key, value in shown.items()))
    print(json.dumps(found))


def run(code: str, *arguments: str) -> str:
    """The last line that Python prints for `code`, in a process of its own, since peaks are those of a process."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().rpartition("\n")[2]


if __name__ == "__main__":
    main()
