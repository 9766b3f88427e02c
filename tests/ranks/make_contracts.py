"""Measure what the tests of the contracts bound and write the figures to docs/CONTRACTS.md.

python tests/ranks/make_contracts.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "CONTRACTS.md"
HEAD = """# What the engine may cost

Written by `tests/ranks/make_contracts.py`. The tests named below count the same on every run and fail above the bound.
Ψ is the number of parameters, N the number of ranks (gloo, CPU, one machine). Exchanges, copies and allocations are those of a
step after the first, of {blocks} equal units.

| what | bound | why | found, N=2 | N=4 |
|-|-|-|-|-|
"""
TAIL = """
Tests: state, unsharded buffers, reduce buffer and the most memory in `tests/ranks/test_memory.py`; allocations in `test_allocations.py`;
calls, bytes, Python and copies in `test_contracts.py`. On a device (`pytest -m gpu tests/ranks`) gradients keep their memory,
and the reduce buffer has room for two neighbouring units, because a unit's reduction overlaps the next one's backward. On an
H100 what these tests count there was within the bounds: state, unsharded buffers, reduce buffer, exchanges, and no allocations in a step.
Allocations are the same in fp32, bf16-mixed, bf16-true and 16-true, with bf16 on the wire and with accumulation. Tensors below
1 KiB (votes, norms, flags) are not counted among them: at most 40 in a step, and more units make no more. The one that is left
on the CPU, for each param group, is of gradients: kept between steps they would take 4Ψ/N bytes while activations take the
most, which FSDP2's, freed as well, do not. On one rank
parameters view their shards and nothing is unsharded; gradients go through the reduce buffer and are freed all the same. Bytes sent and copied are those of messages between two
ranks, whose sums take one unit's gradients of memory while they are under way; in shared memory, the default on one machine, nothing but votes is sent, and an unshard copies all of a unit once. The bound for
Python calls is 150 in each case; a group for each unit takes 8 (its memory of gradients, window and tensors), mixed precision
4: for the norms' own exchanges.

Numbers: `tests/trainer/test_parity.py` compares runs on several ranks in float64 with one process on the joined batches, to
1e-13, and in fp32 with `ddp`, gradients to 1e-6 of a tensor's largest element (two tests to 2e-6, where terms cancel: found
1.4e-6 and 1.1e-6). The rows of [BEHAVIOURS.md](BEHAVIOURS.md) are compared to 2e-6 in fp32 (LBFGS to 2e-5; two rows on a GPU to
twice that), on one rank with the program in plain torch itself; those of Lightning's own features by
`torch.testing.assert_close` (1.3e-6, and 1e-5 absolute).

With `reduce_once` four micro-batches send no more than ddp's exchanges and those that unshard; by default each one is reduced, which
sends more and holds no whole gradients.
"""


def memory(world_size):
    """Rows of bytes that are held."""
    import test_memory as m
    import torch

    from helpers.ranks import run_ranks

    numels = m.unit_sizes(lambda name: 1)
    total = sum(numels)
    linear = sum(
        p.numel()
        for layer in m.Model().blocks.modules()
        if isinstance(layer, torch.nn.Linear)
        for p in layer.parameters()
    )

    def state(options):
        return max(run_ranks(m.count, world_size, options), key=lambda found: found[0])

    exact, mixed = state({}), state({"mixed": True})
    frozen = {dtype: state({"frozen": dtype})[0] for dtype in (torch.float32, torch.bfloat16)}
    rest = m.frozen_bytes(torch.float32) - 4 * linear
    kept = {dtype: (found * world_size - rest) / linear for dtype, found in frozen.items()}
    shards, largest = 4 * total / world_size, 4 * max(p.numel() for p in m.Model().parameters())
    most = max(most for _, most in run_ranks(m.most_in_a_backward, world_size, {}))
    pair = 4 * max(a + b for a, b in zip(numels, numels[1:], strict=False))
    return [
        f"{exact[0] * world_size / total:.3f} Ψ/N",
        f"{mixed[0] * world_size / total:.3f} Ψ/N",
        f"{kept[torch.float32]:.2f}, {kept[torch.bfloat16]:.2f} bytes",
        f"{exact[1]['slots'] / pair:.4f}",
        f"{exact[1]['reduce'] / (4 * max(numels)):.4f}",
        f"{most / (shards + largest):.3f}",
    ]


def steps(world_size):
    """Rows of what a step does."""
    import test_allocations as a
    import test_contracts as c

    from helpers.contracts import BLOCKS, UNIT_BYTES
    from helpers.ranks import run_ranks

    total = BLOCKS * UNIT_BYTES
    (freed, *_), (kept, *_) = (
        run_ranks(a.memory_of_a_step, world_size, lasting) for lasting in (False, True)
    )
    calls, *_ = run_ranks(c.calls_of_a_step, world_size)
    sent = {kind: max(run_ranks(c.sent, world_size, kind)) for kind in ("once", "each", "ddp")}
    copied = max(run_ranks(c.copies_of_a_step, world_size, False))
    gathers = calls["plain"]["all_gather"]
    return [
        f"{a.large(freed['plain']).total()}, {a.large(kept['plain']).total()}",
        ", ".join(f"{name} {count}" for name, count in calls["plain"].items()),
        ", ".join(f"{name} {count}" for name, count in calls["accumulation"].items()),
        "; ".join(f"{kind} {sent[kind] / total:.2f}" for kind in ("each", "once", "ddp")),
        f"{copied / (gathers * UNIT_BYTES / world_size + total):.3f}",
    ]


WHAT = [
    (
        "state, AdamW, fp32",
        "16.016 Ψ/N bytes",
        "value, gradient and two moments of 4 bytes; padding below 0.1%",
    ),
    ("the same, `bf16-mixed`", "16.016 Ψ/N bytes", "the shards are fp32"),
    (
        "a frozen parameter in fp32, in bf16",
        "4, 2 bytes",
        "its value alone (the rest of the model's padding counts here)",
    ),
    (
        "unsharded buffers, over the fp32 bytes of two neighbouring units",
        "1.001",
        "one unit in use, one unsharded ahead; half in bf16; none on one rank",
    ),
    (
        "reduce buffer, over the largest unit's fp32 gradients",
        "1.001",
        "a unit at a time, on one rank too",
    ),
    (
        "most memory in a forward and backward, over gradient shards and the largest parameter",
        "1 and activations",
        "one parameter's gradient at a time",
    ),
    (
        "allocations of 1 KiB or more: on the CPU; where gradients stay",
        "1, 0",
        "gradients are freed between steps",
    ),
    (
        "calls of the communicator in a step",
        "the same",
        "two units stay unsharded at the turn: 2U - 2 unshards, U reductions",
    ),
    ("the same with three micro-batches", "the same", "and two from each micro-batch to the next"),
    (
        "bytes that a rank sends in four micro-batches, over 4Ψ: reduced each, once; `ddp`",
        "(8U - 14 + 4U)/U, (8U - 14 + U)/U; 2: times (N-1)/N, and 2%",
        "an exchange sends (N-1)/N of what it moves; labels and votes",
    ),
    (
        "bytes copied, over one shard for each unshard and one unit for each reduction",
        "1",
        "no other copies",
    ),
]


def python_rows():
    """Rows of what a step of a unit costs the host."""
    import test_contracts as c

    rows, why = (
        [],
        {
            "fp32": (
                "68 for 34 tensors that are saved and read; 9 gradients; 3 exchanges; hooks and"
                " order. FSDP2: 1223"
            )
        },
    )
    why["a group each"] = "the same, with a param group for each unit"
    why["bf16-mixed"] = "norms travel by themselves, in fp32"
    for kind, most in c.MOST_CALLS.items():
        calls, _ = c.python_calls(kind)
        rows.append(
            f"| Python calls that a unit of nine parameters adds, {kind} | {most} | {why[kind]} |"
            f" {calls:.0f} | |"
        )
    return rows


def main():
    from helpers.contracts import BLOCKS

    two, four = (memory(n) + steps(n) for n in (2, 4))
    rows = [
        f"| {' | '.join(what)} | {a} | {b} |" for what, a, b in zip(WHAT, two, four, strict=True)
    ]
    TABLE.write_text(HEAD.format(blocks=BLOCKS) + "\n".join([*rows, *python_rows()]) + "\n" + TAIL)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "ranks")]
    main()
