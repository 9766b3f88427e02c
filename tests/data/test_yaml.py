"""The options of the data from a YAML file, through the Lightning CLI."""

import pytest
from lightning.pytorch.cli import LightningCLI

from data.trainers import Recorder
from lightning_zero3 import DataOptions

CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: lightning_zero3.Zero3Strategy
    init_args:
      data: {data}
"""
AS_MAPPING = "{{{}}}"
AS_CLASS = "{{class_path: lightning_zero3.DataOptions, init_args: {{{}}}}}"
OPTIONS = (
    "sharding: split, even_batches: false, tail: uneven, exact_evaluation: false, streams: own,"
    " seed: 3, per_sample_seed: true, distinct_rank_rng: false,"
    " prefetch_to_device: false, on_world_change: keep_global_batch"
)
EXPECTED = DataOptions(
    "split",
    False,
    "uneven",
    False,
    "own",
    3,
    True,
    False,
    False,
    on_world_change="keep_global_batch",
)


def options_from(folder, data):
    file = folder / "config.yaml"
    file.write_text(CONFIG.format(data=data))
    cli = LightningCLI(
        Recorder,
        run=False,
        save_config_callback=None,
        args=[f"--config={file}", "--model.loaders={}"],
    )
    return cli.trainer.strategy._data.options


@pytest.mark.parametrize("form", [AS_MAPPING, AS_CLASS])
def test_every_option(tmp_path, form):
    assert options_from(tmp_path, form.format(OPTIONS)) == EXPECTED
    assert options_from(tmp_path, form.format("sharding: dispatch")) == DataOptions(
        sharding="dispatch"
    )
    assert options_from(tmp_path, "null") == DataOptions()


def test_a_value_that_does_not_exist_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        options_from(tmp_path, AS_MAPPING.format("sharding: rows"))
    assert "rows" in capsys.readouterr().err
