"""Well-known names of other strategies' options, and what stands here for each."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

# names of FSDP, fully_shard, DDP and DeepSpeed -> what to do
_INSTEAD = {
    "auto_wrap_policy": 'Take it out: repeated blocks are found; `unit_policy=["MyBlock"]` chooses'
    " others.",
    "activation_checkpointing activation_checkpointing_policy partition_activations": "Call"
    " `torch.utils.checkpoint` in the model.",
    "cpu_checkpointing": 'Write `activations="host"`, and call `torch.utils.checkpoint` in the'
    " model.",
    "sharding_strategy device_mesh mesh data_parallel_size": "All of parameters, gradients and"
    " optimizer state is sharded (FULL_SHARD); `shard_size=8` does so over 8 ranks"
    " (HYBRID_SHARD). ZeRO-2 (SHARD_GRAD_OP) is not offered.",
    "stage zero_optimization": "It is stage 3 always; `shard_size=8` shards over 8 ranks.",
    "reshard_after_forward": "Take it out: parameters are resharded after forward always, but for"
    " the last two units. ZeRO-2 is not offered.",
    "mixed_precision mp_policy loss_scale initial_scale_power fp16 bf16": "Write"
    ' `Trainer(precision="bf16-mixed")`, or another precision; `reduce_dtype="bf16"` is for what'
    " travels.",
    "state_dict_type save_distributed_checkpoint": "Write"
    ' `checkpoint=CheckpointOptions(kind="sharded")`, or leave it out for one file.',
    "load_full_weights exclude_frozen_parameters": "Any checkpoint is loaded;"
    " `checkpoint=CheckpointOptions(exclude_frozen=True)` saves what is trained alone.",
    "cpu_offload offload_policy offload_parameters offload_params_device": "Write"
    ' `offload="parameters"`.',
    "offload_optimizer offload_optimizer_device": 'Write `offload="optimizer"`.',
    "nvme_path remote_device": "Offload to NVMe is not offered; to host memory it is:"
    ' `offload="parameters"`.',
    "tensor_parallel_size": "Tensor parallelism is not offered.",
    "config": "DeepSpeed's configuration has no file here: its options are the Trainer's"
    " (`accumulate_grad_batches`, `gradient_clip_val`, `precision`) and those of this class.",
    "find_unused_parameters static_graph gradient_as_bucket_view bucket_cap_mb broadcast_buffers"
    " use_orig_params sync_module_states backward_prefetch forward_prefetch limit_all_gathers"
    " param_init_fn contiguous_gradients overlap_comm allgather_partitions reduce_scatter"
    " allgather_bucket_size reduce_bucket_size sub_group_size zero_allow_untested_optimizer"
    " pin_memory": "Take it out: this needs no option here.",
    "ddp_comm_hook ddp_comm_state ddp_comm_wrapper": '`reduce_dtype="bf16"` sends gradients as'
    " bfloat16; other hooks are not offered.",
    "ignored_modules ignored_parameters ignored_params ignored_states": "All parameters are"
    " sharded; a module that each rank is to have whole may be in a list"
    " (`self.teacher = [module]`).",
}
_BY_NAME = {name: answer for names, answer in _INSTEAD.items() for name in names.split()}


def refuse_others(names: Collection[str], known: Collection[str]) -> None:
    """Refuse options that `Zero3Strategy` does not have.

    Args:
        names: of these options.
        known: the names of those that it has, one of which may be meant.

    Raises:
        TypeError: there is one; of each the error says what to write instead.
    """
    if not names:
        return
    answers = []
    for name in names:
        answer = _BY_NAME.get(name, "The docstring of `Zero3Strategy` lists the options.")
        if name not in _BY_NAME and (meant := get_close_matches(name, known, 1)):
            answer = f"Did you mean `{meant[0]}`?"
        answers.append(f"{name}: {answer}" if len(names) > 1 else answer)
    told = f"option{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"
    raise TypeError("\n".join([f"Zero3Strategy has no {told}.", *answers]))
