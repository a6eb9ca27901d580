"""One process of several that run commands of divdec one after the other, so that torch is loaded once for all.

What is printed is printed by one of them; each command's exit code goes to its own file.
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from divdec.cli import main
from divdec_research.suites import muse, tofu

if __name__ == "__main__":
    commands, codes = Path(sys.argv[1]), []
    tofu.NEW_TOKENS = muse.VERBMEM_TOKENS = muse.KNOWMEM_TOKENS = int(os.environ["NEW_TOKENS"])
    dist.init_process_group("gloo")
    for command in json.loads(commands.read_text()):
        codes.append(main(command))
    commands.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(codes))
    dist.destroy_process_group()
