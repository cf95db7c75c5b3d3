"""FSDP2 on CPU: accelerate shards on accelerators alone, and the config check says so; nothing else differs."""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def shard_on_cpu():
    """Let `fsdp` of the training arguments have its effect in processes over gloo."""
    plain = AcceleratorState.__init__

    def with_plugin(self, *args, fsdp_plugin=None, **kwargs):
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState().distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = with_plugin
