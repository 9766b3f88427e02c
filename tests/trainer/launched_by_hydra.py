"""The same with hydra's command line: python launched_by_hydra.py +folder=... +strategy=..."""

import hydra

from trainer.launched import fit


@hydra.main(version_base=None, config_path=None)
def main(config):
    fit(config.folder, config.strategy, 2, 1)


if __name__ == "__main__":
    main()
