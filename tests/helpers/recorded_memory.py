"""Figures of torch's CUDA allocator that others recorded on a GPU and published.

Both tables are outputs of `torch.cuda.memory_summary()` after a long training run, from the page
"Memory Efficient RL" of the Unsloth documentation
(https://unsloth.ai/docs/get-started/reinforcement-learning-rl-guide/memory-efficient-rl): the same
training twice. The second run shows no splits at all, which is how torch counts segments that
expand. Only the rows that are read here are kept. The tables round to MiB or KiB.
"""

SPLIT_SEGMENTS = """
|            CUDA OOMs: 0            |        cudaMalloc retries: 0         |
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
| Allocated memory      |  32249 MiB |  43042 MiB | 128336 GiB | 128305 GiB |
| GPU reserved memory   |  37644 MiB |  47504 MiB | 705806 MiB | 668162 MiB |
| Non-releasable memory | 713142 KiB |   4633 MiB | 103206 GiB | 103205 GiB |
"""
UNSPLIT_SEGMENTS = """
|            CUDA OOMs: 0            |        cudaMalloc retries: 0         |
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
| Allocated memory      |  32711 MiB |  52084 MiB | 142756 GiB | 142724 GiB |
| GPU reserved memory   |  49552 MiB |  52188 MiB |  86354 MiB |  36802 MiB |
| Non-releasable memory |      0 B   |      0 B   |      0 B   |      0 B   |
"""
_ROWS = {
    "Allocated memory": "allocated_bytes",
    "GPU reserved memory": "reserved_bytes",
    "Non-releasable memory": "inactive_split_bytes",
}
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def as_stats(table):
    """The table in the form of `torch.cuda.memory_stats_as_nested_dict()`."""
    counts, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()
    ]
    stats = {
        "num_ooms": int(counts[0].split()[-1]),
        "num_alloc_retries": int(counts[1].split()[-1]),
    }
    for name, *cells in rows:
        sizes = [int(number) * _UNITS[unit] for number, unit in (cell.split() for cell in cells)]
        stats[_ROWS[name]] = {
            "all": dict(zip(("current", "peak", "allocated", "freed"), sizes, strict=True))
        }
    return stats
