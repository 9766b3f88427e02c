"""torchrun loses a node and goes on with the other one by itself, from the last complete
checkpoint, which two ranks wrote.
"""

import os
import re
import signal
import time

import pytest

from faults.harness import Fault, begun, losses, reference
from faults.hosts import Place, torchrun
from helpers.ranks import free_port

FAULT = Fault("lose node", "forward", 1, 2)
PATIENCE = ",last_call_timeout=2,keep_alive_interval=1"  # seconds; three heartbeats may be missed
LIMIT_S = 120


def test_torchrun_goes_on_with_fewer_nodes(tmp_path):
    meet = f"127.0.0.1:{free_port()}"
    places = [Place(number, "127.0.0.1", meet, "lo") for number in (1, 2)]
    nodes = [torchrun(place, tmp_path, 1, FAULT, 1, "1:2", patience=PATIENCE) for place in places]
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and any(node.poll() is None for node in nodes):
        time.sleep(0.1)
    codes = [node.poll() for node in nodes]
    for node, code in zip(nodes, codes, strict=True):
        if code is None:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
    said, other = ((tmp_path / f"log.{number}").read_text() for number in (1, 2))
    assert codes == [0, -signal.SIGKILL], said + other
    assert re.findall(r"zero3: (\d+) rank", said)[-2:] == ["2", "1"], said
    assert (
        "Rank 1 died without a word" in said and "in forward, unit net.blocks.1, step 5" in said
    ), said
    assert begun(tmp_path)[0][-1] == 4 and 4 not in begun(tmp_path)[1]
    found, whole = losses(tmp_path), reference(2)
    for step in range(10):
        # From step 4 on, where the last checkpoint is, one rank has the batches of both; before,
        # unless the second came late.
        ranks = [0, 1] if step < 4 and (1, step) in found else [0]
        mine = sum(found[rank, step] for rank in ranks) / len(ranks)
        assert mine == pytest.approx((whole[0, step] + whole[1, step]) / 2, rel=1e-5)
