"""Where models are placed: fallbacks, with a warning, for what this machine does not have, and GPUs that are idle."""

import os
import warnings
from importlib.util import find_spec

import torch

from ebft.over_transformers import is_flash_attn_2_available, is_flash_attn_3_available

_IDLE = 0.9  # free part of the memory of a GPU that no program uses; drivers and displays take some
_FLASH = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}


def usable_attention(wanted: str | None) -> str | None:
    """`wanted`, or `sdpa` with a warning if it requires a GPU or a package that is missing; None stays None."""
    if wanted == "flex_attention" and not torch.cuda.is_available():
        warnings.warn(
            "flex_attention supports training on CUDA only: sdpa is used, with the same results.", stacklevel=2
        )
        return "sdpa"
    if wanted is not None and "/" in wanted:
        available = lambda: find_spec("kernels") is not None
    else:
        available = _FLASH.get(wanted)
    if available is None or (torch.cuda.is_available() and available()):
        return wanted
    package = "the package kernels" if "/" in wanted else "its package"
    lacking = f"{package} is not installed" if torch.cuda.is_available() else "no CUDA device is available"
    warnings.warn(f"attn_implementation: {wanted} cannot be used ({lacking}): sdpa is used instead.", stacklevel=2)
    return "sdpa"


def usable_device_map(wanted: str | dict | None) -> str | dict | None:
    """`wanted`, or None with a warning if it contains a device that this machine does not have."""
    places = wanted.values() if isinstance(wanted, dict) else [] if wanted is None else [wanted]
    missing = [place for place in places if not _exists(place)]
    if not missing:
        return wanted
    warnings.warn(
        f"device_map: {wanted} is ignored because {missing[0]} is not available "
        f"({torch.cuda.device_count()} CUDA devices). The trainer places the model.",
        stacklevel=2,
    )
    return None


def _exists(place: str | int) -> bool:
    """Whether a value of a device map can be used; names such as auto, cpu and disk always can."""
    if isinstance(place, str) and place.isdigit():
        place = int(place)
    if isinstance(place, str) and place.startswith("cuda"):
        number = place.partition(":")[2] or "0"
        place = int(number) if number.isdigit() else -1
    return not isinstance(place, int) or 0 <= place < torch.cuda.device_count()


def spare_gpu(taken: int | None, needed: int) -> str | None:
    """Return a GPU other than number `taken` that is idle and has `needed` free bytes, such as cuda:1; None if none is.

    Idle GPUs have nearly all of their memory free, so a GPU of a vLLM server or of another run is not one. None if
    there are several training processes, each of which has a GPU.
    """
    count = torch.cuda.device_count()
    if taken is None or count < 2 or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return None
    memory = {index: torch.cuda.mem_get_info(index) for index in range(count) if index != taken}
    idle = {index: free for index, (free, total) in memory.items() if free >= _IDLE * total and free > needed}
    return f"cuda:{max(idle, key=idle.__getitem__)}" if idle else None
