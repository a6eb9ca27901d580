"""One process of several that train under FSDP, and the same without it.

`accelerate launch --use_fsdp` sets what is set here. accelerate has FSDP for accelerators only; what it does there
works on a CPU too, once it is told so.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate import state as accelerate_state
from accelerate.utils import DistributedType

from divdec.cli import main


def shard(version):
    os.environ.update(
        ACCELERATE_USE_FSDP="true", FSDP_VERSION=version, FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
    )  # fmt: skip
    original = accelerate_state.AcceleratorState.__init__

    def told(self, *arguments, fsdp_plugin=None, **options):
        original(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    accelerate_state.AcceleratorState.__init__ = told


def watch():
    """Count the steps of optimizers that move pieces of weights."""
    from torch.distributed.tensor import DTensor

    steps, step = [], torch.optim.AdamW.step

    def counted(self, *arguments, **options):
        steps.append(all(isinstance(w, DTensor) for group in self.param_groups for w in group["params"]))
        return step(self, *arguments, **options)

    torch.optim.AdamW.step = counted
    return steps


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    shard(given["version"])
    steps = watch()
    codes = [main(command) for command in given["commands"]]
    report = {"codes": codes, "steps": len(steps), "pieces": all(steps)}
    Path(sys.argv[1]).with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(report))
