"""Which tests run in which tier: `fast`, `gate` or `all`; CONTRIBUTING.md says how to run them.

The gate runs every test that stands in no list here, and a tenth of the variants. Times are told in
docs/TEST_TIMES.md.
"""

import re
import zlib

# No training, hardly a process: integers, texts, imports.
FAST = [
    "ints/*",
    "data/test_order.py*",
    "test_format.py*",
    "test_layering.py*",
    "test_site.py*",
    "test_types.py*",
]
# With `--all` alone: what takes long and changes rarely.
LONG = [
    "behaviours/test_default_device.py*",
    "behaviours/test_over_a_group.py::test_right_on_two_ranks*",
    "behaviours/test_table.py::test_other_engines*",
    "checkpoints/test_example.py*",
    "checkpoints/test_single_file.py::test_more_than_4_gib",
    "data/test_against_accelerate.py::test_random*",
    "data/test_trainer.py::test_kill_at_every_batch*",
    "export/test_callback.py::test_a_script_is_checked*",
    "export/test_callback.py::test_merged_adapters",
    "export/test_example.py*",
    "export/test_models.py::*[others-*",
    "faults/test_elastic.py*",
    "faults/test_example_elastic.py*",
    "faults/test_example_restart.py*",
    "faults/test_random_kills.py*",
    "faults/test_two_hosts.py*",
    "graphs/test_ranks.py::test_two_ranks_of_zero3*",
    "graphs/test_ranks.py::test_what_one_rank_cannot_capture*",
    "callbacks/test_allocator_launch.py*",
    "callbacks/test_memory_cost.py*",
    "offload/test_example.py*",
    "plan/test_plan.py::test_a_step_that_asks*",
    "plan/test_plan.py::test_other_options",
    "plan/test_plan.py::test_the_grid*",
    "plan/test_plan.py::test_what_fits",
    "ranks/test_inductor.py*",
    "ranks/test_random_gradient_programs.py*",
    "trainer/test_console.py*",
    "trainer/test_launched_faults.py*",
    "trainer/test_example_notebook.py*",
    "trainer/test_hugging_face.py*",
    "trainer/test_launchers.py*",
    "trainer/test_ray.py*",
    "trainer/test_lightning_callbacks.py::test_as_in_one_process*",
    "trainer/test_nonfinite.py::test_every_rank*",
    "trainer/test_parity.py::test_fifty_steps*",
    "trainer/test_stages.py::test_a_rank_that_is_slow_before*",
    "ints/test_watch.py::test_what_is_no_message*",
]
# The same as something in the gate, in another setting: a tenth of these is drawn for each commit.
VARIANTS = [
    "behaviours/test_behaviours.py::test_outcomes_are_recognised[sleeping*",
    "behaviours/test_behaviours.py::test_right_with_a_parameter*",
    "behaviours/test_in_bfloat16.py*",
    "behaviours/test_in_debug.py*",
    "behaviours/test_in_the_trainer.py::test_one_rank*",
    "behaviours/test_over_a_group.py*",
    "callbacks/test_memory_ledger.py::test_ledger_against*",
    "callbacks/test_memory_tracker.py::test_several_stages*",
    "checkpoints/test_callback.py::test_the_callback*",
    "checkpoints/test_sharded.py::test_on_another_number*",
    "checkpoints/test_sharded.py::test_what_was_saved*[1]",
    "checkpoints/test_sharded.py::test_what_was_saved*[2]",
    "checkpoints/test_sharded.py::test_what_was_saved*[3]",
    "checkpoints/test_sharded.py::test_what_was_saved*[4]",
    "data/test_evaluation.py::test_every_sample*[1]",
    "data/test_evaluation.py::test_every_sample*[3]",
    "data/test_evaluation.py::test_every_sample*[4]",
    "data/test_loader.py::test_a_sampler_without_a_length*-wrap]",
    "data/test_trainer.py::test_augmentation_goes_on_after_every*",
    "data/test_trainer.py::test_resume_from_every*",
    "data/test_trainer_streams.py::test_combined*",
    "data/test_trainer_streams.py::test_streams_resume*",
    "export/test_models.py*",
    "export/test_onnx.py*",
    "faults/test_faults.py*",
    "graphs/test_exact.py*",
    "graphs/test_ranks.py*",
    "graphs/test_recapture.py*",
    "offload/test_trainer.py::test_every_number*added]",
    "offload/test_trainer.py::test_every_number*bfloat16]",
    "offload/test_trainer.py::test_every_number*pruned]",
    "offload/test_trainer.py::test_every_number*several]",
    "offload/test_trainer.py::test_every_number*whole parameters]",
    "ranks/test_contracts.py::test_bytes_of_an_accumulation_window[4]",
    "ranks/test_contracts.py::test_python_calls_per_unit*[a group each]",
    "ranks/test_contracts.py::test_python_calls_per_unit*[bf16-mixed]",
    "ranks/test_environment_report.py::test_torchrun_brings*",
    "ranks/test_group_communicator.py*",
    "ranks/test_uneven_steps.py*",
    "ranks/test_memory.py::test_state_is_16*-4]",
    "ranks/test_reduce_once.py::test_a_window*",
    "test_public_surface.py::test_registering_again*[reload]",
    "test_public_surface.py::test_the_other_package_says*",
    "trainer/test_alike_anywhere.py::test_all_ranks[on_train_end]",
    "trainer/test_alike_anywhere.py::test_all_ranks[on_train_epoch_end]",
    "trainer/test_around_fit.py::test_the_process_that_called_fit_saves[zero3_spawn]",
    "trainer/test_checkpoint_full.py::test_any_strategy*",
    "trainer/test_checkpoint_full.py::test_resumed*-1]",
    "trainer/test_checkpoint_full.py::test_resumed*-3]",
    "trainer/test_checkpoint_full.py::test_resumed*-4]",
    "trainer/test_example_train_gpt.py::test_it_stops*",
    "trainer/test_fit.py::test_fit_validate_test_predict[3]",
    "trainer/test_fit.py::test_fit_validate_test_predict[4]",
    "trainer/test_hybrid.py::test_checkpoints*",
    "trainer/test_hybrid.py::test_parity*",
    "trainer/test_lightning_callbacks.py::test_buffers*[1]",
    "trainer/test_nonfinite.py::test_gradients_alone*",
    "trainer/test_process_group.py::test_a_group_ends*",
    "trainer/test_process_group.py::test_a_notebook*",
    "trainer/test_process_group.py::test_ranks_do_not_wait*",
    "trainer/test_process_group.py::test_sigterm*",
    "trainer/test_process_group.py::test_the_watch_takes_no_orders*",
    "trainer/test_stages.py::test_a_collective_of_one_rank_is_told[test*",
    "trainer/test_stages.py::test_a_collective_of_one_rank_is_told[validate*",
    "trainer/test_stages.py::test_a_slow_rank_of_a_test*",
    "trainer/test_torchmetrics.py::test_every_metric_of_the_library[2]",
    "trainer/test_uneven_evaluation.py::test_as_one_process[3-*",
    "trainer/test_whole_tensors.py::test_replicas_own_the_same",
    "trainer/test_whole_tensors.py::test_resumed_on_other*",
    "ints/test_frames.py::test_frames_can_be_listed*",
    "ints/test_ranks_helper.py::test_ranks_die_with*",
    "ints/test_watch.py::test_a_rank_ends_though*[OSError]",
]


def matches(globs: list[str], name: str) -> str | None:
    """The first of ``globs`` that fits; in these only ``*`` has a meaning, "anything"."""
    for glob in globs:
        if re.fullmatch(re.escape(glob).replace(r"\*", ".*"), name, re.DOTALL):
            return glob
    return None


def belongs(name: str, is_variant: bool, tier: str, commit: str) -> bool:
    """Whether a test runs in a tier.

    Args:
        name: "trainer/test_fit.py::test_it[1]", the path below `tests/`.
        is_variant: the test is marked so, beside those in ``VARIANTS``.
        tier: "fast", "gate" or "all".
        commit: draws the tenth, so that a run can be repeated.
    """
    if tier == "all":
        return True
    if tier == "fast":
        return matches(FAST, name) is not None
    if matches(LONG, name):
        return False
    if is_variant or matches(VARIANTS, name):
        return zlib.crc32(f"{commit} {name}".encode()) % 10 == 0
    return True
