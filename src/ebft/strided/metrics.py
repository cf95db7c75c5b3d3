"""The metrics that the strided trainer logs, as means over the samples, blocks and tokens of the steps since a log."""

from __future__ import annotations

from accelerate import Accelerator
from torch import Tensor

from ebft.monitor.metrics import MeanMetrics
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.output import StridedOutput


class StepMetrics(MeanMetrics):
    """Sums of the terms of steps, which are logged as means."""

    def record(
        self,
        output: StridedOutput,
        entropy: Tensor,
        text_logps: Tensor,
        documents: Documents,
        layout: StridedLayout,
    ) -> None:
        """Accumulate the sums of the logged means, over samples, blocks and tokens (masked-out blocks are zero)."""
        blocks = layout.num_blocks
        samples, generated = blocks * layout.num_samples, layout.num_generated
        add = self.add
        add("ebft/alignment", output.alignment.sum(), samples)
        add("ebft/diversity", output.diversity.sum(), samples)
        add("ebft/mean_reward", output.rewards.sum(), samples)
        add("ebft/cfm_loss", output.cfm.sum(), blocks)
        add("ebft/advantages_mean", output.advantages.sum(), samples)
        add("ebft/advantages_std", output.advantages.square().sum(), samples)
        add("ebft/rl_loss", -(output.advantages.unsqueeze(-1) * output.logps).sum(), generated)
        add("ebft/ce_loss", -text_logps.detach().sum(), documents.ce_mask.sum())
        add("entropy", entropy.sum(), generated)

    def drain(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the logged means, with `ebft/reward` as an alias of the mean reward and the std of the advantages."""
        means = super().drain(accelerator)
        if means:
            mean = means.pop("ebft/advantages_mean")
            means["ebft/advantages_std"] = max(means["ebft/advantages_std"] - mean**2, 0.0) ** 0.5
            means["ebft/reward"] = means["ebft/mean_reward"]
        return means
