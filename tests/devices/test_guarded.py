"""Lines of `src/ebft` that do something else on a GPU than on CPU, and what runs them without one.

A new line of this kind fails the test until it is listed, with the case of `tests/devices` in which it runs, or the
test on CPU that replaces what it asks for.
"""

import ast
import re
from pathlib import Path

import ebft
from tests.devices.__main__ import CASES

ROOT, SOURCE = Path(__file__).parents[2], Path(ebft.__file__).parent
GUARD = re.compile(
    r"torch\.cuda\.|torch\.backends\.cuda|torch\.accelerator\.|\.is_cuda\b|is_accelerator\("
    r"|\.type [!=]= [\"'](cuda|cpu)[\"']|[\"']cuda[\"']"
)
GUARDED = {  # "file function", or a folder or file -> how
    "features.py _beside": "strided_evaluated",
    "machine.py available_memory": "tests/devices/test_cuda.py",
    "machine.py total_memory": "tests/devices/test_cuda.py",
    "machine.py copy_to": "strided_lora",
    "models/load.py usable_attention": "tests/models/test_base.py",
    "models/load.py spare_gpu": "tests/models/test_placement.py",
    "models/load.py weights_dtype": "tests/models/test_base.py",
    "models/load.py usable_quantisation": "tests/models/test_base.py",
    "monitor/metrics.py peak_memory_gib": "strided_as_cuda_resumed",
    "prefix/attention/flex.py available": "tests/strided/test_flex.py",
    "prefix/attention/flex.py attend_all": "strided_flex",
    "prefix/attention/flex.py pass_mask": "tests/devices/test_cuda.py",
    "prefix/attention/passes.py document_attention": "strided_lora",
    "prefix/attention/passes.py takes_grouped_heads": "tests/devices/test_cuda.py",
    "prefix/attention/passes.py rows_per_tile": "strided_lora",
    "prefix/attention/tiles.py": "strided_lora",
    "prefix/cpu.py cpu_matmul": "strided_lora",
    "prefix/cpu.py _suits": "tests/prefix/test_cpu.py",
    "prefix/cpu.py keep_freed_memory": "tests/run/test_freed_memory.py",
    "prefix/gpu.py": "strided_lora",
    "prefix/parity.py difference_and_tolerance": "strided_tf32",
    "prefix/sampling.py of_device": "strided_lora",
    "run/callbacks.py": "tests/run/test_callbacks.py",
    "run/trainer.py this_machine": "strided_lora",
    "run/training.py _services": "structured_single_turn",
    "serving/command.py": "tests/serving/test_command.py",
    "strided/embed.py embed_prefixes": "strided_cpu_features",
    "strided/layout.py place": "strided_lora",
    "strided/passes.py make": "strided_lora",
    "strided/trainer.py __post_init__": "tests/strided/test_trainer.py",
    "strided/trainer.py _trains_on_the_sampling_pass": "strided_lora",
    "structured/config.py __post_init__": "structured_autocast",
    "structured/grpo.py __init__": "structured_single_turn",
    "tools/cli/models.py vllm_serve": "tests/cli/test_vllm_serve.py",
    "tools/doctor/": "tests/doctor/test_doctor.py",
    "tools/evaluation/models.py placed": "strided_evaluated",
    "tools/evaluation/result.py machine_card": "tests/devices/test_cuda.py",
    "tools/evaluation/run.py evaluate": "strided_as_cuda_resumed",
    "tools/evaluation/run.py sample": "tests/devices/test_cuda.py",
    "tools/export/quantize.py": "tests/devices/test_cuda.py",
    "tools/init/": "tests/init/test_init.py",
    "tools/launch/plan.py": "tests/launch/test_plan.py",
    "tools/quickstart/smollm2.py": "tests/examples/test_quickstart.py",
    "trainer/base.py log": "strided_as_cuda_resumed",
    "trainer/base.py _peak_memory": "strided_as_cuda_resumed",
    "trainer/checkpoints.py": "strided_as_cuda_resumed",
}


def guarded():
    """The places of such lines: `file function`."""
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        functions = {}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                functions |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), node.name)
        for number, line in enumerate(source.splitlines(), start=1):
            if GUARD.search(line) and not line.lstrip().startswith(("#", "from ")):
                found.add(f"{path.relative_to(SOURCE).as_posix()} {functions.get(number, '')}".strip())
    return found


def test_what_depends_on_the_device_is_run_without_a_gpu():
    places = guarded()
    assert not [place for place in places if not place.startswith(tuple(GUARDED))], "name what runs them, in GUARDED"
    assert not [listed for listed in GUARDED if not any(place.startswith(listed) for place in places)], "they are gone"
    for how in GUARDED.values():
        assert how in CASES or (ROOT / how).is_file(), how
