"""Config keys of training through Ray Train."""

from typing import Annotated

from pydantic import Field, field_validator

from ebft.config.section import NotBlank, Section

_KINDS = ("CPU", "GPU")


class RayKeys(Section):
    """Launching through Ray Train."""

    use_ray: bool = Field(
        False,
        description="Train in workers of Ray Train: of the cluster at RAY_ADDRESS, or else of a local Ray that `ebft "
        "train` starts. output_dir and the data must be on a file system that all workers share.",
    )
    ray_num_workers: int = Field(
        1, ge=1, le=100_000, description="Number of Ray workers, each of which is one training process."
    )
    ray_run_name: Annotated[NotBlank, Field(pattern=r"^[\w.-]+$")] | None = Field(
        None, description="Name of the run in Ray, also of its folder in output_dir/ray. If unset, Ray generates one."
    )
    ray_max_failures: int = Field(
        0,
        ge=0,
        description="Number of times that the workers are restarted, from the newest complete checkpoint, after one of "
        "them failed or was killed.",
    )
    resources_per_worker: dict[NotBlank, Annotated[float, Field(ge=0)]] | None = Field(
        None,
        description="Resources that Ray reserves for each worker, such as {GPU: 1, CPU: 4}; a worker trains on one GPU "
        "or none. If unset, one GPU if Ray has GPUs, otherwise one CPU.",
    )

    @field_validator("resources_per_worker")
    @classmethod
    def _as_ray_names_them(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name in value or {}:
            if name not in _KINDS and name.upper() in _KINDS:
                raise ValueError(f"resources_per_worker: {name} is written {name.upper()} in Ray.")
        if (value or {}).get("GPU", 0) not in (0, 1):
            raise ValueError(
                f"resources_per_worker: invalid value GPU: {value['GPU']:g}; expected 1 or 0, because each worker is "
                "one process, which trains on one GPU. Use ray_num_workers for more."
            )
        return value
