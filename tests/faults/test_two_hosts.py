"""Training across two hosts: one dies, or the network does, for a while or for good."""

import re
import time

import pytest

from faults.harness import Fault, begun, difference, losses, reference, wait_until
from faults.hosts import ranks_left, two_hosts

CUT = Fault("lose network", "forward", 1, 2)  # given up after 20 seconds


@pytest.fixture
def hosts():
    with two_hosts() as found:
        if isinstance(found, str):
            pytest.skip(found)
        yield found


def means(found):
    """Step -> mean over ranks."""
    return {
        step: sum(v for (_, s), v in found.items() if s == step) / sum(s == step for _, s in found)
        for _, step in found
    }


def test_a_host_fails_and_the_run_goes_on_with_more_processes(hosts, tmp_path):
    codes, said = hosts.launch(tmp_path, 1, Fault("kill", "forward", 1, 2))
    assert all(codes), said
    # Nobody on its host has seen it die: its silence tells.
    assert (
        "Rank 1 on host-2 has not been heard of for" in said[0]
        and "Rank 0 ends too; it is in" in said[0]
    ), said[0]
    before = losses(tmp_path)
    assert max(step for _, step in before) == 4
    codes, said = hosts.launch(tmp_path, 2)
    assert codes == [0, 0], said
    assert begun(tmp_path) == {0: [0, 4], 1: [0, 4], 2: [4], 3: [4]}
    after = {key: loss for key, loss in losses(tmp_path).items() if before.get(key) != loss}
    assert {rank for rank, _ in after} == {0, 1, 2, 3} and {step for _, step in after} == set(
        range(4, 10)
    )
    # Other ranks hold other samples of a step's batch, but it is the same batch.
    whole = means(reference(2))
    for step, loss in means(after).items():
        assert loss == pytest.approx(whole[step], rel=1e-5)


def test_the_cable_is_out_for_a_while_and_the_run_goes_on(hosts, tmp_path):
    def cut():
        hosts.plug(False)
        (tmp_path / "go on").touch()
        time.sleep(8)
        assert losses(tmp_path).keys() == {(rank, step) for rank in (0, 1) for step in range(5)}
        hosts.plug(True)

    codes, said = hosts.launch(tmp_path, 1, CUT, meanwhile=cut)
    assert codes == [0, 0], said
    assert difference(losses(tmp_path), reference(2)) == 0


def test_the_cable_is_out_for_good_and_each_host_names_the_other(hosts, tmp_path):
    left = []

    def cut():
        hosts.plug(False)
        (tmp_path / "go on").touch()
        wait_until(lambda: not ranks_left(tmp_path), 60)
        left.append(ranks_left(tmp_path))
        hosts.plug(True)  # the store of the second host's torchrun would wait for many minutes

    assert ranks_left(tmp_path) == 0
    codes, said = hosts.launch(tmp_path, 1, CUT, meanwhile=cut)
    assert left == [0] and all(codes), said
    for mine, other in ((0, 1), (1, 0)):
        silence = rf"Rank {other} on host-{other + 1} has not been heard of for 2\d s \(.*network is gone\)"
        assert re.search(rf"{silence}.* Rank {mine} ends too; it is in forward", said[mine]), said


def test_a_narrow_line_that_loses_packets_changes_nothing(hosts, tmp_path):
    if problem := hosts.let_through("rate 1mbit burst 1600 limit 4000"):
        pytest.skip(f"the kernel has no token bucket filter: {problem}")
    codes, said = hosts.launch(tmp_path, 1)
    assert codes == [0, 0], said
    assert min(hosts.lost()) > 20
    assert difference(losses(tmp_path), reference(2)) == 0
