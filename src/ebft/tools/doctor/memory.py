"""The memory and disk space that a run needs, estimated from the model's configuration, without loading weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from ebft.machine import available_memory, gib
from ebft.models.adapter import attach_adapter
from ebft.models.load import spare_gpu, weights_dtype
from ebft.run.checkpoints import optimizer_bytes
from ebft.run.config.schema import RunConfig
from ebft.tools.doctor.environment import Check
from ebft.tools.doctor.rows import LongestRows

# Bytes of activations per token, layer and unit of the hidden size, as a multiple of the bytes of a number: without
# attention scores, about 17 (Korthikanti et al. 2022); with gradient checkpointing, the input of each layer.
_ACTIVATIONS, _CHECKPOINTED = 17, 1
# The peak of a strided forward pass whose activations are kept for the loss, as a multiple of the activations, without
# and with an adapter. Measured with SmolLM2-135M on the CPU: 1.2, and 1.8 to 1.95.
_FORWARD_FULL, _FORWARD_ADAPTER = 1.2, 1.9
_ROUGH = "activations (rough)"
_LAST = "loss and backward"


@dataclass(frozen=True)
class Estimate:
    """Bytes by purpose. `phases`: those on the device of the model, in each phase of `measure_step`. Activations,
    rollouts and features are rough; the rest follows from the weights."""

    phases: dict[str, dict[str, int]]
    features: int  # a frozen copy of the model
    features_on: str | None  # its device; None: the model's
    gradients: int
    checkpoint: int  # on disk
    parameters: int
    trained: int
    placed_on: str | None  # `auto` with a device_map over all GPUs; None: the device that trains

    @property
    def total(self) -> int:
        """The most that the device of the model needs at any time."""
        return self.during(self.peak)

    @property
    def peak(self) -> str:
        """The phase that needs the most."""
        return max(self.phases, key=self.during)

    def parts(self, phase: str) -> dict[str, int]:
        """Return the bytes that the device of the model needs in a phase, by name of their purpose."""
        return self.phases.get(phase, self.phases[_LAST])

    def during(self, phase: str) -> int:
        """Return the sum of the `parts` of a phase."""
        return sum(self.parts(phase).values())


@dataclass(frozen=True)
class Needs:
    """The inputs of estimates for a config and for variations of it: the numbers of weights, and of trained ones."""

    config: RunConfig
    model_config: Any
    rows: LongestRows
    weights: int
    trained: int

    @cached_property
    def now(self) -> Estimate:
        """The estimate for the config itself."""
        return self.of(self.config)

    def of(self, config: RunConfig, trained: int | None = None) -> Estimate:
        """Return the estimate for a step with a variation of the config, which may train another number of weights."""
        trained = self.trained if trained is None else trained
        dtype, is_full, method = weights_dtype(config), config.adapter is None, config.method
        per_weight = 0.56 if config.load_in_4bit else 1 if config.load_in_8bit else dtype.itemsize
        trained_bytes = dtype.itemsize if is_full else 4
        gradients = trained * trained_bytes
        text = self.model_config.get_text_config()
        # Embeddings and the output layer are not quantised.
        plain = text.vocab_size * text.hidden_size * (1 if self.model_config.tie_word_embeddings else 2)
        plain = min(plain, self.weights)
        weights = int((self.weights - plain) * per_weight) + plain * dtype.itemsize + (0 if is_full else gradients)
        states = optimizer_bytes(config.optimizer, trained_bytes) * trained
        has_copy = is_full and method.copies_model(config)
        features_on = None  # the device of the model
        if has_copy and method.compares_features(config) and torch.cuda.is_available():
            device, here = config.ebft.feature_device, torch.cuda.current_device()
            if device is not None:
                features_on = None if device in ("cuda", f"cuda:{here}") else device
            elif config.device_map is None:
                features_on = spare_gpu(here, weights)
        heads = getattr(text, "num_attention_heads", None) or 1
        width = vars(text).get("head_dim") or text.hidden_size // heads  # with getattr, Gemma 4's is an error
        # Keys and values of a token in all layers.
        cached = 2 * text.num_hidden_layers * (vars(text).get("num_key_value_heads") or heads) * width
        tokens = self.rows.step_tokens(config)
        layer = text.hidden_size * dtype.itemsize  # bytes of a token's hidden state
        factor = _CHECKPOINTED if config.gradient_checkpointing else _ACTIVATIONS
        activations = tokens.loss * layer * text.num_hidden_layers * factor
        if method.keeps_logits(config):
            activations += 2 * tokens.loss * text.vocab_size * 4  # logits and their gradients, in float32
        forward = activations
        if method.samples_blocks:
            forward = int(activations * (_FORWARD_FULL if is_full else _FORWARD_ADAPTER))
        cache = tokens.sampling * cached * dtype.itemsize
        features = tokens.features * (layer * _ACTIVATIONS + text.hidden_size * 4 * len(config.ebft.feature_layers))

        precision = "4 bits" if config.load_in_4bit else "8 bits" if config.load_in_8bit else str(dtype).split(".")[1]
        model = {f"weights in {precision}": weights}
        copied = model | {method.copy_name: weights if has_copy and features_on is None else 0}
        step = copied | {"optimizer": states}
        # Gradients of earlier micro-batches, while a later one samples and embeds.
        accumulates = method.samples_blocks and config.gradient_accumulation_steps > 1
        sampling = step | {"gradients": gradients if accumulates else 0}
        ebft, single = config.ebft, config.ebft.single_pass
        keeps = not (config.gradient_checkpointing or ebft.rollout_tokens_per_pass is not None)
        if method.samples_blocks and keeps and (not torch.cuda.is_available() if single is None else single):
            rollouts, scoring, kept = {"activations and cache of rollouts (rough)": forward + cache}, 0, activations
        else:
            rollouts, scoring, kept = {"cache of rollouts (rough)": cache}, forward, 0
        embedding = sampling | {_ROUGH: kept, "features (rough)": features}
        phases = {
            "before loading": {},
            "model": model,
            "trainer setup": copied,
            "rollouts": sampling | rollouts,
            "log-probabilities": sampling | {_ROUGH: scoring},
            "features": embedding,
            "rewards and features": embedding,
            "optimizer": step | {"gradients": gradients},
            _LAST: step | {"gradients": gradients, _ROUGH: activations},
        }
        return Estimate(
            phases=phases,
            features=weights if has_copy else 0,
            features_on=features_on,
            gradients=gradients,
            checkpoint=gradients + (0 if config.save_only_model else states),
            parameters=self.weights + (0 if is_full else trained),
            trained=trained,
            placed_on="auto" if config.device_map not in (None, "cpu") else config.device_map,
        )


def needs(config: RunConfig, model_config: Any, rows: LongestRows) -> Needs:
    """Return the inputs of estimates, with the weights of `config` counted without allocating them."""
    with init_empty_weights(include_buffers=True):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=weights_dtype(config), trust_remote_code=config.trust_remote_code
        )
        weights = trained = model.num_parameters()
        if config.adapter is not None and config.lora_model_dir is not None:
            files = Path(config.lora_model_dir).expanduser().glob("adapter_model.*")
            trained = sum(path.stat().st_size for path in files) // 4
        elif config.adapter is not None:  # its layers are as in the unquantised model
            plain = config.model_copy(update={"load_in_4bit": False, "load_in_8bit": False})
            adapted = attach_adapter(model, plain)
            trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    found = Needs(config, model_config, rows, weights, trained)
    _ = found.now  # raises for models whose configuration lacks what it reads
    return found


CHANGES_TRAINING = "(changes the training)"  # of changes with which the step is not the same
_LEAST = 0.01  # of the phase's memory; what saves less is not listed


def advice(needs: Needs | None, phase: str) -> str:
    """Return changes that lower the memory of `phase` of `measure_step`, one per line, the least cost in quality first.
    Each is estimated alone, on the device of the model. Empty if the memory cannot be estimated, or nothing lowers it.
    """
    if needs is None:
        return ""
    now, found, half = needs.now.during(phase), "", needs.rows.longest // 2
    options = [*changes(needs.config, needs.rows.step_tokens(needs.config).loss, torch.cuda.is_available())]
    text = f"sequence_len: {half}, half of the longest row; longer rows are cut, or dropped for lack of room"
    options.append((f"{text} {CHANGES_TRAINING}", {"sequence_len": half}))
    for text, values in options:
        trained = 0 if "adapter" in values and needs.config.adapter is None else None
        saved = now - needs.of(changed(needs.config, values), trained).during(phase)
        if saved > _LEAST * now:
            found += f"\n  - {text} (saves about {gib(saved)})"
    return found and f" To lower it:{found}"


def changes(config: RunConfig, tokens: int, on_gpu: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what may lower the memory of a step of `tokens` tokens, the least cost first."""
    size = config.micro_batch_size
    if size > 1:
        smaller = max(part for part in range(1, size) if size % part == 0)
        accumulation = config.gradient_accumulation_steps * size // smaller
        text = f"micro_batch_size: {smaller} with gradient_accumulation_steps: {accumulation} (same step)"
        yield text, {"micro_batch_size": smaller, "gradient_accumulation_steps": accumulation}
    if config.method.samples_blocks and config.ebft.rollout_tokens_per_pass is None:
        part = min(4096, tokens // 2)
        text = f"ebft.rollout_tokens_per_pass: {part}, which computes rollouts in parts (same step)"
        yield text, {"ebft.rollout_tokens_per_pass": part}
    if not config.gradient_checkpointing:
        text = "gradient_checkpointing: true, which recomputes activations in the backward pass (same step)"
        yield text, {"gradient_checkpointing": True}
    is_full = config.adapter is None
    if is_full and on_gpu and "8bit" not in config.optimizer:
        yield f"optimizer: adamw_bnb_8bit {CHANGES_TRAINING}", {"optimizer": "adamw_bnb_8bit"}
    if weights_dtype(config).itemsize > 2:
        lost = "; small updates are lost to rounding" if is_full else ""
        text = f"torch_dtype: bfloat16, for weights of half the size{lost} {CHANGES_TRAINING}"
        yield text, {"torch_dtype": "bfloat16"}
    if is_full and config.method.compares_features(config) and on_gpu and config.ebft.feature_device != "cpu":
        text = "ebft.feature_device: cpu, or another GPU, for the frozen copy of the model; slow on a CPU (same step)"
        yield text, {"ebft.feature_device": "cpu"}
    if is_full:
        text = "adapter: lora, without gradients, optimizer state or a frozen copy of the base model"
        yield f"{text} {CHANGES_TRAINING}", {"adapter": "lora"}
    elif on_gpu and not (config.load_in_4bit or config.load_in_8bit):
        yield f"adapter: qlora with load_in_4bit: true {CHANGES_TRAINING}", {"adapter": "qlora", "load_in_4bit": True}
    section, counts = "trl", {"max_completion_length": 1} if config.method.rows == "prompts" else {}
    if config.method.samples_blocks:
        section, counts = "ebft", {"n_samples_per_prompt": 2, "generate_max_len": 1}
    for key, least in counts.items():
        now = getattr(getattr(config, section), key)
        value = -(-now // 2)
        if least <= value < now:
            yield f"{section}.{key}: {value} {CHANGES_TRAINING}", {f"{section}.{key}": value}


def changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """Return the config with other values, some in sections (`ebft.stride`)."""
    top: dict[str, Any] = {}
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        if section:
            value = top.get(section, getattr(config, section)).model_copy(update={key: value})
        top[section or key] = value
    return config.model_copy(update=top)


def memory_checks(needs: Needs) -> Iterator[Check]:
    """Compare the estimate with the free memory of the model's device, and of the frozen copy's if it is another. An
    error if what follows from the number of weights is more."""
    needed = needs.now
    free, where = available_memory(needed.placed_on)
    shown = ", ".join(f"{name} {gib(size)}" for name, size in needed.parts(needed.peak).items() if size)
    text = f"estimated {gib(needed.total)} at the peak, in {needed.peak}: {shown}"
    text += f"; {needed.trained:,} of {needed.parameters:,} weights are trained"
    text += f". {gib(free)} are free on {where}" if free is not None else ""
    text += ". Without weights and data, `--for CARD` or `--memory SIZE` runs the operations of a step instead"
    if free is not None and needed.during("optimizer") > free:
        phase = "trainer setup" if needed.during("trainer setup") > free else "optimizer"
        yield Check("error", "memory", f"{text}.{advice(needs, phase)}")
    elif free is not None and needed.total > 0.9 * free:
        yield Check("warning", "memory", f"{text}.{advice(needs, needed.peak)}")
    else:
        yield Check("ok", "memory", text)
    if needed.features_on is not None:
        free, where = available_memory(needed.features_on)
        text = f"{gib(needed.features)} for the frozen copy of the model on {needed.features_on}"
        text += f"; {gib(free)} are free on {where}" if free is not None else ""
        if free is not None and needed.features > free:
            remedy = "Set ebft.feature_device to cpu or to another GPU, or adapter: lora, which needs no copy."
            yield Check("error", "feature network", f"{text}. {remedy}")
        else:
            yield Check("ok", "feature network", text)
