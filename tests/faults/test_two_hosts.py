"""Training across two hosts: one dies, the other says so, and both go on with twice the
processes.
"""

import pytest

from faults.harness import Fault, begun, losses, reference
from faults.hosts import two_hosts


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
