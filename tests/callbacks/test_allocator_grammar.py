"""The strict grammar: what is documented passes, what is malformed does not, whatever torch
says.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero3.callbacks.allocator.grammar import (
    ALIASES,
    OPTIONS,
    AllocatorOptionError,
    check,
    parse,
    roundup_table,
    to_text,
    torch_gaps,
)

NEWEST = (2, 13)
INSTALLED = tuple(int(number) for number in torch.__version__.split(".")[:2])

# The values that torch's documentation and headers show.
DOCUMENTED = {
    "backend:native": {"backend": "native"},
    "backend:cudaMallocAsync": {"backend": "cudaMallocAsync"},
    "max_split_size_mb:20": {"max_split_size_mb": 20},
    "max_split_size_mb:128": {"max_split_size_mb": 128},
    "max_non_split_rounding_mb:64": {"max_non_split_rounding_mb": 64},
    "large_segment_size_mb:64": {"large_segment_size_mb": 64},
    "roundup_power2_divisions:4": {"roundup_power2_divisions": 4},
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]": {
        "roundup_power2_divisions": {"256": 1, "512": 2, "1024": 4, ">": 8}
    },
    "roundup_power2_divisions:[64:8,256:4,1024:4,>:1]": {
        "roundup_power2_divisions": {"64": 8, "256": 4, "1024": 4, ">": 1}
    },
    "roundup_power2_divisions:[>:4]": {"roundup_power2_divisions": {">": 4}},
    "roundup_power2_divisions:[256:0]": {"roundup_power2_divisions": {"256": 0}},
    "garbage_collection_threshold:0.8": {"garbage_collection_threshold": 0.8},
    "garbage_collection_threshold:.8": {"garbage_collection_threshold": 0.8},
    "expandable_segments:True": {"expandable_segments": True},
    "expandable_segments:False": {"expandable_segments": False},
    "per_process_memory_fraction:0.5": {"per_process_memory_fraction": 0.5},
    "per_process_memory_fraction:1": {"per_process_memory_fraction": 1.0},
    "throw_on_cudamalloc_oom:True": {"throw_on_cudamalloc_oom": True},
    "graph_capture_record_stream_reuse:True": {"graph_capture_record_stream_reuse": True},
    "release_lock_on_cudamalloc:True": {"release_lock_on_cudamalloc": True},
    "release_lock_on_hipmalloc:True": {"release_lock_on_cudamalloc": True},
    "pinned_use_cuda_host_register:True": {"pinned_use_cuda_host_register": True},
    "pinned_use_hip_host_register:False": {"pinned_use_cuda_host_register": False},
    "pinned_num_register_threads:8": {"pinned_num_register_threads": 8},
    "pinned_use_background_threads:True": {"pinned_use_background_threads": True},
    "pinned_reserve_segment_size_mb:512": {"pinned_reserve_segment_size_mb": 512},
    "pinned_max_round_threshold_mb:64": {"pinned_max_round_threshold_mb": 64},
    "pinned_max_cached_size_mb:64": {"pinned_max_cached_size_mb": 64},
    "pinned_free_catch_all:True": {"pinned_free_catch_all": True},
    " max_split_size_mb : 64 , expandable_segments:False ": {
        "max_split_size_mb": 64,
        "expandable_segments": False,
    },
    "": {},
    "  ": {},
}


# Malformed texts, each with the name that the error must give.
FLAGS = [
    "expandable_segments",
    "throw_on_cudamalloc_oom",
    "graph_capture_record_stream_reuse",
    "release_lock_on_cudamalloc",
    "pinned_use_cuda_host_register",
    "pinned_use_background_threads",
    "pinned_free_catch_all",
]
SIZES = [
    "large_segment_size_mb",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
]
FRACTIONS = ["garbage_collection_threshold", "per_process_memory_fraction"]

NOT_A_FLAG = ["true", "FALSE", "1", "0", "yes", "", "True;", "'True'"]
NOT_A_SIZE = [
    "64MB",
    "64.9",
    "-5",
    "abc",
    "",
    "+64",
    "0x40",
    "064",
    "1e3",
    "64 64",
    "99999999999999999999",
]
NOT_A_FRACTION = ["x", "0.8xyz", "-0.1", "1.1", "nan", "inf", "", "80%", "1e-1", "0,8", "+0.5"]

MALFORMED = [
    *((f"{name}:{value}", name) for name in FLAGS for value in NOT_A_FLAG),
    *((f"{name}:{value}", name) for name in SIZES for value in NOT_A_SIZE),
    *(
        (f"{name}:{value}", name)
        for name in FRACTIONS
        for value in NOT_A_FRACTION
        if value != "0,8"
    ),
    # Ranges.
    ("large_segment_size_mb:10", "large_segment_size_mb"),
    ("large_segment_size_mb:3", "large_segment_size_mb"),
    ("max_split_size_mb:19", "max_split_size_mb"),
    ("max_split_size_mb:0", "max_split_size_mb"),
    ("max_non_split_rounding_mb:10", "max_non_split_rounding_mb"),
    ("max_split_size_mb:17592186044416", "max_split_size_mb"),
    ("garbage_collection_threshold:0", "garbage_collection_threshold"),
    ("garbage_collection_threshold:1", "garbage_collection_threshold"),
    ("garbage_collection_threshold:1.0", "garbage_collection_threshold"),
    ("garbage_collection_threshold:0,8", "garbage_collection_threshold"),
    ("per_process_memory_fraction:2", "per_process_memory_fraction"),
    ("pinned_num_register_threads:3", "pinned_num_register_threads"),
    ("pinned_num_register_threads:0", "pinned_num_register_threads"),
    ("pinned_num_register_threads:256", "pinned_num_register_threads"),
    ("pinned_num_register_threads:8.0", "pinned_num_register_threads"),
    ("pinned_reserve_segment_size_mb:0", "pinned_reserve_segment_size_mb"),
    # Words and names.
    ("backend:foo", "backend"),
    ("backend:Native", "backend"),
    ("backend:", "backend"),
    ("backend:cudamallocasync", "backend"),
    ("backend", "backend"),
    ("bogus:1", "bogus"),
    ("Max_Split_Size_Mb:64", "Max_Split_Size_Mb"),
    ("max_split_size:64", "max_split_size"),
    ("expandable_segment:True", "expandable_segment"),
    ("max_split_size_mb :64:", "max_split_size_mb"),
    # Separators.
    ("max_split_size_mb", "max_split_size_mb"),
    ("max_split_size_mb=64", "max_split_size_mb"),
    ("max_split_size_mb:64;expandable_segments:True", "max_split_size_mb"),
    ("expandable_segments:True;max_split_size_mb:64", "expandable_segments"),
    ("max_split_size_mb:64,", "max_split_size_mb"),
    (",max_split_size_mb:64", "max_split_size_mb"),
    ("max_split_size_mb:64,,expandable_segments:True", "max_split_size_mb"),
    ("max_split_size_mb:64 expandable_segments:True", "max_split_size_mb"),
    ("max_split_size_mb::64", "max_split_size_mb"),
    ("max_split_size_mb:64,max_split_size_mb:64", "max_split_size_mb"),
    ("max_split_size_mb:64,expandable_segments:True,max_split_size_mb:32", "max_split_size_mb"),
    (
        "release_lock_on_hipmalloc:True,release_lock_on_cudamalloc:False",
        "release_lock_on_cudamalloc",
    ),
    ("max_split_size_mb:[64]", "max_split_size_mb"),
    ("max_split_size_mb:64]", "max_split_size_mb"),
    # Divisions.
    *(
        (f"roundup_power2_divisions:{value}", "roundup_power2_divisions")
        for value in [
            *(
                "",
                "3",
                "0",
                "-4",
                "4.0",
                "x",
                "[",
                "]",
                "[]",
                "[[256:1]]",
                "[256:1",
                "256:1]",
                "[256:1]]",
            ),
            *(
                "[256:3]",
                "[256:-1]",
                "[256:x]",
                "[256]",
                "[256:]",
                "[:1]",
                "[:]",
                "[256:1,]",
                "[,256:1]",
            ),
            *(
                "[256:1,,512:2]",
                "[300:1]",
                "[0:4]",
                "[-1:4]",
                "[65536:4]",
                "[131072:4]",
                "[256.0:1]",
            ),
            *(
                "[>:8,256:1]",
                "[>:2,>:4]",
                "[1024:4,256:1]",
                "[256:1,256:2]",
                "[256:1;512:2]",
                "[256=1]",
            ),
            *(
                "[256:1 512:2]",
                "[<:4]",
                "[>=512:4]",
                "[256:1,512:2]x",
                "[256MB:1]",
                "4]",
                "[256:131072]",
                "131072",
            ),
        ]
    ),
]

# What torch itself takes without a word (torch 2.13).
LAX = [
    "max_split_size_mb:-5",
    "max_split_size_mb:64MB",
    "max_split_size_mb:64.9",
    "garbage_collection_threshold:0.8xyz",
    "roundup_power2_divisions:[>:8,256:1]",
    "roundup_power2_divisions:[]",
    "roundup_power2_divisions:[1024:4,256:1]",
    "roundup_power2_divisions:[>:2,>:4]",
    "roundup_power2_divisions:[131072:4]",
    "max_split_size_mb:64,",
    "max_split_size_mb:64,max_split_size_mb:32",
]


@pytest.fixture
def torch_reader():
    """torch's own parser, with the settings put back to the defaults afterwards."""
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(
        "expandable_segments:False,large_segment_size_mb:20,pinned_use_background_threads:False"
    )


@pytest.mark.parametrize("text", DOCUMENTED)
def test_documented_values_are_accepted_by_us_and_by_torch(text, torch_reader):
    canonical = to_text(DOCUMENTED[text])
    for written in (text, canonical):
        assert parse(written, NEWEST) == DOCUMENTED[text]
        if any(OPTIONS[name].since > INSTALLED for name in DOCUMENTED[text]):
            with pytest.raises(ValueError, match="Unrecognized key"):
                torch_reader(written)
        elif written == "backend:cudaMallocAsync" and torch.backends.cuda.is_built():
            with pytest.raises(
                RuntimeError, match="parsed at runtime != allocator backend parsed at load time"
            ):
                torch_reader(written)
        else:
            torch_reader(written)


def test_every_option_and_alias_is_among_the_documented_values():
    named = {
        entry.partition(":")[0].strip()
        for text in DOCUMENTED
        for entry in text.split(",")
        if ":" in entry
    }
    assert named >= {*OPTIONS, *ALIASES}


def test_the_option_table_has_every_key_that_torch_knows():
    """The keys are string literals in the headers of the installed torch, which has none of a newer
    one.
    """
    include = torch.__path__[0] + "/include/c10"
    core = open(f"{include}/core/AllocatorConfig.h").read()
    cuda = open(f"{include}/cuda/CUDAAllocatorConfig.h").read().replace('"\n        "', "")
    known = {
        name
        for name, option in OPTIONS.items()
        if f'"{name}"' in cuda or (option.scope != "backend" and name.removesuffix("_mb") in core)
    }
    assert known == {name for name, option in OPTIONS.items() if option.since <= INSTALLED}
    listed = cuda[cuda.index("getKeys") :]
    keys = {part for part in listed[: listed.index("}")].split('"')[1::2]}
    assert keys <= {*OPTIONS, *ALIASES}


def test_at_least_200_malformed_texts_are_refused_by_name():
    assert len({text for text, _ in MALFORMED}) >= 200
    for text, name in MALFORMED:
        with pytest.raises(AllocatorOptionError) as caught:
            parse(text, NEWEST)
        assert caught.value.option == name, (text, caught.value)
        assert repr(name) in str(caught.value), text


@pytest.mark.parametrize("text", LAX)
def test_we_refuse_what_torch_silently_takes(text, torch_reader):
    torch_reader(text)
    with pytest.raises(AllocatorOptionError):
        parse(text, NEWEST)


@pytest.mark.parametrize(
    ("name", "value", "since"),
    [("throw_on_cudamalloc_oom", True, (2, 12)), ("pinned_max_cached_size_mb", 64, (2, 13))],
)
def test_an_option_of_a_newer_torch_is_refused_with_both_versions(name, value, since):
    older = (since[0], since[1] - 1)
    message = rf"{name}.*needs torch {since[0]}\.{since[1]}.*this is 2\.{older[1]}"
    with pytest.raises(AllocatorOptionError, match=message):
        parse(f"{name}:{value}", older)
    assert parse(f"{name}:{value}", since) == {name: value}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_split_size_mb", True),
        ("max_split_size_mb", 64.0),
        ("max_split_size_mb", "64"),
        ("expandable_segments", 1),
        ("expandable_segments", "True"),
        ("garbage_collection_threshold", float("nan")),
        ("garbage_collection_threshold", "0.8"),
        ("backend", "cuda"),
        ("roundup_power2_divisions", 3),
        ("roundup_power2_divisions", {"256": 3}),
        ("roundup_power2_divisions", [4]),
    ],
)
def test_typed_values_are_as_strict_as_text(name, value):
    with pytest.raises(AllocatorOptionError, match=name):
        check(name, value, NEWEST)


def test_the_roundup_table_by_hand():
    # 16 intervals: 1, 2, 4, ..., 256 (9th), 512, 1024 (11th), ..., 32768.
    assert roundup_table(4) == (4,) * 16
    assert roundup_table({"256": 1, "512": 2, "1024": 4, ">": 8}) == (1,) * 9 + (2, 4) + (8,) * 5
    assert roundup_table({"256": 1, ">": 8}, overwrite_last=True) == (1,) * 8 + (8,) * 8
    assert roundup_table({"256": 1, "1024": 4}) == (1,) * 9 + (0, 4) + (0,) * 5
    assert torch_gaps({"256": 1, "1024": 4}) == [512]
    assert torch_gaps({"256": 1, "512": 2, ">": 8}) == []


divisions = st.one_of(
    st.sampled_from([2**power for power in range(8)]),
    st.builds(
        lambda powers, values, rest: dict(
            [(str(2**power), value) for power, value in zip(sorted(powers), values, strict=False)]
            + ([(">", rest)] if rest is not None else [])
        ),
        st.sets(st.integers(0, 15), min_size=1),
        st.lists(st.sampled_from([0, 1, 2, 4, 8, 16]), min_size=16, max_size=16),
        st.none() | st.sampled_from([0, 1, 8]),
    ),
)
VALUES = {
    "flag": lambda option: st.booleans(),
    "word": lambda option: st.sampled_from(option.words),
    "divisions": lambda option: divisions,
    "fraction": lambda option: st.floats(0.001, 0.999),
    "whole": lambda option: (
        st.sampled_from([2**power for power in range(8)])
        if option.is_power_of_two
        else st.integers(int(option.low) + 30, 2**30)
    ),
}
configurations = st.fixed_dictionaries(
    {}, optional={name: VALUES[option.kind](option) for name, option in OPTIONS.items()}
)


@settings(max_examples=200, deadline=None)
@given(configurations)
def test_fuzz_what_we_write_we_read_back(options):
    assert parse(to_text(options), NEWEST) == options
    assert all(check(name, value, NEWEST) == value for name, value in options.items())


# The device's own option parser lives in the CUDA library; `backend` may not change while it runs.
for_torch = configurations.map(
    lambda options: {
        name: value
        for name, value in options.items()
        if name != "backend"
        and not (
            name in ("max_split_size_mb", "max_non_split_rounding_mb")
            and "large_segment_size_mb" in options
        )
    }
)


@settings(max_examples=100, deadline=None)
@given(for_torch)
def test_fuzz_what_we_write_torch_accepts(options):
    if torch.backends.cuda.is_built():
        pytest.skip("the fuzzed options would reach the running CUDA allocator")
    # Without it the segment size of the example before stays, and bounds max_split_size_mb.
    torch._C._accelerator_setAllocatorSettings(to_text({"large_segment_size_mb": 20, **options}))


PIECES = [
    *OPTIONS,
    *ALIASES,
    ":",
    ",",
    "[",
    "]",
    ">",
    "64",
    "0.8",
    "True",
    "true",
    " ",
    "-",
    "256",
    ";",
    "é",
    "\n",
]


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=12).map("".join)))
def test_fuzz_any_text_is_read_canonically_or_refused(text):
    try:
        options = parse(text, NEWEST)
    except AllocatorOptionError as error:
        assert error.option in str(error) or repr(error.option) in str(error)
        return
    assert parse(to_text(options), NEWEST) == options
