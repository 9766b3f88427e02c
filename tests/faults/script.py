"""The program as a script, for launchers: python script.py FOLDER PROCESSES_PER_NODE NODES [KIND
PHASE RANK WORLD_SIZE].
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    import torch

    from faults.harness import Fault
    from faults.program import train

    torch.set_num_threads(1)
    folder, devices, nodes, *rest = sys.argv[1:]
    fault = Fault(rest[0], rest[1], int(rest[2]), int(rest[3])) if rest else None
    # torchrun may come back with fewer nodes than it began with.
    train(folder, fault, int(devices), int(os.environ.get("GROUP_WORLD_SIZE", nodes)))
