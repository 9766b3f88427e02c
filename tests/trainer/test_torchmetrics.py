"""Every metric of torchmetrics on several ranks as on one process, with ranks that have less or
nothing to measure.
"""

import copy
import importlib
import inspect
import pickle
import warnings
from functools import cache, partial

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric, MetricCollection, classification, regression, retrieval

from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.evaluation.torchmetrics import prepare_metrics

DOMAINS = (
    "aggregation audio classification clustering detection image nominal regression retrieval"
    " segmentation shape text wrappers"
).split()
CLASSES, LABELS = 3, 4
WORDS = "the cat sat on a mat while rain fell".split()
# Not metrics by themselves; resampled at random.
LEFT_OUT = {"BaseAggregator", "Metric", "MetricInputTransformer", "Running", "BootStrapper"}
LEFT_OUT |= {"DeepImageStructureAndTextureSimilarity"}  # needs torchvision when it is updated
LEFT_OUT |= {"BERTScore", "InfoLM"}  # load weights from the network, as all of `multimodal` does


def draw(generator, *shape):
    return torch.rand(*shape, generator=generator)


def sentence(g):
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (4,), generator=g))


def classified(name, g):
    target = torch.randint(2, (1,), generator=g)
    if name.startswith("Binary"):
        groups = (torch.randint(2, (1,), generator=g),) if name in GROUPED else ()
        return (draw(g, 1), target, *groups)
    if name.startswith("Multilabel"):
        return draw(g, 1, LABELS), torch.randint(2, (1, LABELS), generator=g)
    if name == "MulticlassExactMatch":
        return tuple(torch.randint(CLASSES, (1, 2), generator=g) for _ in range(2))
    return draw(g, 1, CLASSES).softmax(1), torch.randint(CLASSES, (1,), generator=g)


GROUPED = {"BinaryFairness", "BinaryGroupStatRates"}
THRESHOLDS = {
    "PrecisionAtFixedRecall": "min_recall",
    "RecallAtFixedPrecision": "min_precision",
    "SensitivityAtSpecificity": "min_specificity",
    "SpecificityAtSensitivity": "min_sensitivity",
}


def classification_options(name):
    options = {}
    if name.startswith("Multiclass"):
        options["num_classes"] = CLASSES
    if name.startswith("Multilabel"):
        options["num_labels"] = LABELS
    if name in GROUPED:
        options["num_groups"] = 2
    if name.endswith("FBetaScore"):
        options["beta"] = 2.0
    for suffix, option in THRESHOLDS.items():
        if name.endswith(suffix):
            options[option] = 0.5
    return options


def image(g):
    return draw(g, 1, 3, 48, 48), draw(g, 1, 3, 48, 48)


def panchromatic(g):
    large, small = draw(g, 2, 3, 48, 48).split(1), draw(g, 2, 3, 16, 16).split(1)
    return large[0], {"ms": small[0], "pan": large[1], "pan_lr": small[1]}


def question(g):
    answers = {"answer_start": [1], "text": [sentence(g)]}
    return {"prediction_text": sentence(g), "id": "1"}, {"answers": answers, "id": "1"}


SAMPLES = {  # what one update with one sample gets, by domain or by name
    "aggregation": lambda g: (draw(g, 1),),
    "audio": lambda g: (draw(g, 1, 1000), draw(g, 1, 1000)),
    "ComplexScaleInvariantSignalNoiseRatio": lambda g: (draw(g, 1, 9, 9, 2), draw(g, 1, 9, 9, 2)),
    "PermutationInvariantTraining": lambda g: (draw(g, 1, 2, 90), draw(g, 1, 2, 90)),
    "SourceAggregatedSignalDistortionRatio": lambda g: (draw(g, 1, 2, 90), draw(g, 1, 2, 90)),
    "clustering": lambda g: tuple(torch.randint(3, (1,), generator=g) for _ in range(2)),
    "CalinskiHarabaszScore": lambda g: (draw(g, 1, 4), torch.randint(2, (1,), generator=g)),
    "DaviesBouldinScore": lambda g: (draw(g, 1, 4), torch.randint(2, (1,), generator=g)),
    "DunnIndex": lambda g: (draw(g, 1, 4), torch.randint(2, (1,), generator=g)),
    "detection": lambda g: tuple(torch.randint(2, (1, 4, 4, 2), generator=g) for _ in range(2)),
    "image": image,
    "MultiScaleStructuralSimilarityIndexMeasure": lambda g: (
        draw(g, 1, 1, 180, 180),
        draw(g, 1, 1, 180, 180),
    ),
    "PeakSignalNoiseRatioWithBlockedEffect": lambda g: (draw(g, 1, 1, 48, 48),) * 2,
    "QualityWithNoReference": panchromatic,
    "SpatialDistortionIndex": panchromatic,
    "MemorizationInformedFrechetInceptionDistance": lambda g: (
        draw(g, 1, 4),
        bool(draw(g, 1) < 0.5),
    ),
    "TotalVariation": lambda g: (draw(g, 1, 3, 8, 8),),
    "multimodal": lambda g: (draw(g, 3, 9, 3), draw(g, 3, 9, 3)),
    "nominal": lambda g: tuple(torch.randint(CLASSES, (1,), generator=g) for _ in range(2)),
    "FleissKappa": lambda g: (
        torch.tensor([[2, 1, 1], [1, 3, 0]])[torch.randint(2, (1,), generator=g)],
    ),
    "regression": lambda g: (draw(g, 1), draw(g, 1)),
    "ContinuousRankedProbabilityScore": lambda g: (draw(g, 1, 5), draw(g, 1)),
    "CosineSimilarity": lambda g: (draw(g, 1, 4), draw(g, 1, 4)),
    "JensenShannonDivergence": lambda g: (draw(g, 1, 4).softmax(1), draw(g, 1, 4).softmax(1)),
    "KLDivergence": lambda g: (draw(g, 1, 4).softmax(1), draw(g, 1, 4).softmax(1)),
    "retrieval": lambda g: (
        draw(g, 3),
        torch.tensor([True, False, True]),
        torch.randint(4, (1,), generator=g).expand(3),
    ),
    "segmentation": lambda g: tuple(
        torch.randint(2, (1, CLASSES, 6, 6), generator=g) for _ in range(2)
    ),
    "shape": lambda g: (draw(g, 1, 7, 3), draw(g, 1, 7, 3)),
    "text": lambda g: ([sentence(g)], [sentence(g)]),
    "SQuAD": question,
    "ClasswiseWrapper": partial(classified, "Multiclass"),
    "BinaryTargetTransformer": partial(classified, "Binary"),
    "LambdaInputTransformer": lambda g: (draw(g, 1), draw(g, 1)),
    "MinMaxMetric": lambda g: (draw(g, 1),),
    "MultioutputWrapper": lambda g: (draw(g, 1, 2), draw(g, 1, 2)),
    "MultitaskWrapper": lambda g: ({"a": draw(g, 1)}, {"a": draw(g, 1)}),
    "Perplexity": lambda g: (draw(g, 1, 3, 5), torch.randint(5, (1, 3), generator=g)),
}
for name in ("BLEUScore", "SacreBLEUScore", "CHRFScore", "TranslationEditRate"):
    SAMPLES[name] = lambda g: ([sentence(g)], [[sentence(g)]])


OPTIONS = {
    "BinaryTargetTransformer": {"wrapped_metric": classification.BinaryAUROC(), "threshold": 0},
    "ClasswiseWrapper": {"metric": classification.MulticlassAUROC(CLASSES, average=None)},
    "ClusterAccuracy": {"num_classes": CLASSES},
    "LambdaInputTransformer": {"wrapped_metric": regression.SpearmanCorrCoef()},
    "MinMaxMetric": {"base_metric": torchmetrics.MeanMetric()},
    "MultioutputWrapper": {"base_metric": regression.PearsonCorrCoef(), "num_outputs": 2},
    "MultitaskWrapper": {"task_metrics": {"a": regression.KendallRankCorrCoef()}},
    "PeakSignalNoiseRatioWithBlockedEffect": {"data_range": 1.0},
    "ROUGEScore": {"rouge_keys": ("rouge1", "rougeL")},
    "CriticalSuccessIndex": {"threshold": 0.5},
    "DiceScore": {"num_classes": CLASSES},
    "FleissKappa": {"mode": "counts"},
    "GeneralizedDiceScore": {"num_classes": CLASSES},
    "HausdorffDistance": {"num_classes": CLASSES},
    "LipVertexError": {"mouth_map": [0, 2, 4]},
    "MeanIoU": {"num_classes": CLASSES},
    "MemorizationInformedFrechetInceptionDistance": {"feature": nn.Flatten()},
    "MinkowskiDistance": {"p": 3},
    "ModifiedPanopticQuality": {"things": {0}, "stuffs": {1}},
    "MultiScaleStructuralSimilarityIndexMeasure": {"data_range": 1.0},
    "PanopticQuality": {"things": {0}, "stuffs": {1}},
    "PeakSignalNoiseRatio": {"data_range": 1.0},
    "PermutationInvariantTraining": {
        "metric_func": torchmetrics.functional.scale_invariant_signal_noise_ratio
    },
    "RetrievalRecallAtFixedPrecision": {"min_precision": 0.5},
    "StructuralSimilarityIndexMeasure": {"data_range": 1.0},
}
for name in ("CramersV", "PearsonsContingencyCoefficient", "TheilsU", "TschuprowsT"):
    OPTIONS[name] = {"num_classes": CLASSES}


COUNTS = (1, 2, 9, 10)
# (ranks, samples) -> what torchmetrics itself computes otherwise, from states of several processes.
_LAST_FIVE = {"RunningMean", "RunningSum"}  # each rank's last ones
_SPREAD = {"PearsonCorrCoef", "ConcordanceCorrCoef", "MultioutputWrapper"}  # of one sample: none
_RANGE = {"NormalizedRootMeanSquaredError"}  # an IndexError on three ranks
_EMPTY = {"RootMeanSquaredErrorUsingSlidingWindow"}  # an error on a rank without a sample
DIFFERING = {
    (2, 1): _EMPTY,
    (2, 2): _SPREAD,
    (2, 9): _LAST_FIVE,
    (2, 10): _LAST_FIVE,
    (3, 1): _RANGE | _EMPTY,
    (3, 2): _SPREAD | _RANGE | _EMPTY,
    (3, 9): _LAST_FIVE | _RANGE,
    (3, 10): _LAST_FIVE | _RANGE,
}


def all_metrics():
    """(domain, name, a new metric) of each class that is a metric by itself, and whose packages are
    here.
    """
    for domain in DOMAINS:
        module = importlib.import_module(f"torchmetrics.{domain}")
        for name, cls in inspect.getmembers(module, inspect.isclass):
            is_factory = cls.__new__ is not Metric.__new__  # `Accuracy(task=...)` makes another
            if not issubclass(cls, Metric) or is_factory or name in LEFT_OUT:
                continue
            is_classified = domain == "classification"
            options = classification_options(name) if is_classified else OPTIONS.get(name, {})
            try:
                yield domain, name, cls(**options)
            except (ModuleNotFoundError, RuntimeError) as error:
                assert "install" in str(error), name


def draw_samples(domain, name, count):
    sample = SAMPLES.get(name) or SAMPLES.get(domain) or partial(classified, name)
    return [sample(torch.Generator().manual_seed(k)) for k in range(count)]


def compute(metric, samples):
    """The value, or the name of the error."""
    try:
        for sample in samples:
            metric.update(*sample)
        return {"value": metric.compute()}
    except Exception as error:
        return {type(error).__name__: torch.zeros(())}


def compute_all(rank, world_size):
    warnings.simplefilter("ignore")
    values = {}
    for domain, name, metric in all_metrics():
        prepare_metrics(metric, (), torch.device("cpu"))
        for count in COUNTS:
            mine = draw_samples(domain, name, count)[rank::world_size]
            values[name, count] = compute(copy.deepcopy(metric), mine)
    return values


@cache
def on_one_process():
    return run_ranks(compute_all, 1)[0]


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(1, marks=pytest.mark.variant), 2, pytest.param(3, marks=pytest.mark.variant)],
)
def test_every_metric_of_the_library(ranks):
    expected = on_one_process()
    assert len(expected) > 4 * 150
    assert sum("value" in value for value in expected.values()) > 0.95 * len(expected)
    differing = {(ranks, count): set() for count in COUNTS}
    for found in run_ranks(compute_all, ranks):
        for (name, count), value in expected.items():
            try:
                torch.testing.assert_close(
                    found[name, count], value, rtol=1e-5, atol=1e-6, equal_nan=True
                )
            except AssertionError:
                differing[ranks, count].add(name)
    assert differing == {case: DIFFERING.get(case, set()) for case in differing}


class Owning(pl.LightningModule):
    """Metrics where people keep them, logged or computed in hooks."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.logged = retrieval.RetrievalMAP()
        self.all = MetricCollection([regression.SpearmanCorrCoef(), regression.PearsonCorrCoef()])
        self.listed = [retrieval.RetrievalMRR(), {"cat": (torchmetrics.CatMetric(),)}]
        self.rouge = torchmetrics.text.ROUGEScore(rouge_keys="rouge1")
        self.masks = Masks()
        self.found = {}

    def validation_step(self, batch, batch_index):
        x, index = batch
        scores = self.net(x)[:, 0]
        self.logged.update(scores, x[:, 0] > 0, indexes=index % 3)
        self.log("map", self.logged, on_epoch=True)
        self.all.update(scores, x[:, 1])
        self.listed[0].update(scores, x[:, 0] > 0, indexes=index % 3)
        self.listed[1]["cat"][0].update(index)
        self.rouge.update([f"a {i} {i % 3}" for i in index.tolist()], ["a 1 2"] * len(index))
        self.masks.update(index)

    def on_validation_epoch_end(self):
        listed, others = self.listed
        (kept,) = others["cat"]
        found = {**self.all.compute(), **self.rouge.compute(), "mrr": listed.compute()}
        found |= {"cat": kept.compute(), "masks": self.masks.compute()}
        for metric in (self.all, self.rouge, listed, kept, self.masks):
            metric.reset()
        self.found = found

    def training_step(self, batch, batch_index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Masks(Metric):
    """As detection metrics, whose states are lists of tensors and of tuples, here of many dtypes."""

    DTYPES = (torch.bool, torch.bfloat16, torch.complex64, torch.int16)

    def __init__(self):
        super().__init__()
        self.add_state("boxes", [], dist_reduce_fx=None)
        self.add_state("masks", [], dist_reduce_fx=None)
        self.add_state("most", torch.zeros(2, dtype=torch.float16), dist_reduce_fx="max")

    def _apply(self, fn):
        return super()._apply(fn, exclude_state=("masks",))

    def update(self, index):
        for i in index.tolist():
            for dtype in self.DTYPES:
                self.boxes.append(torch.full((i % 3, 2), i, dtype=dtype))
            self.masks.append(((i, 2), b"mask"))
            self.most = torch.maximum(self.most, self.most + i / 16)

    def compute(self):
        boxes = [(str(box.dtype), box.tolist()) for box in self.boxes]
        return [*sorted(map(repr, boxes)), *sorted(self.masks), len(self.boxes)]


def validate(rank, world_size, samples, fits):
    torch.manual_seed(0)
    module = Owning()
    data = torch.randn(samples, 4, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(TensorDataset(data, torch.arange(samples)), batch_size=1)
    options = {"limit_val_batches": 1.0, "use_distributed_sampler": True, "max_epochs": 2}
    runner = trainer(
        zero3(unit_policy=["Linear"]) if world_size > 1 else "auto", world_size, **options
    )
    # the strategy has set up the metrics of the first before it is copied
    runner.validate(module, loader, verbose=False)
    modules = module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for module in modules:
        if fits:
            training = DataLoader(TensorDataset(torch.ones(world_size, 4)), batch_size=1)
            runner.fit_loop.max_epochs = runner.current_epoch + 1
            runner.fit(module, training, loader)
        else:
            runner.validate(module, loader, verbose=False)
    return {"map": runner.callback_metrics["map"], **module.found}


@pytest.mark.parametrize("fits", [False, True])
@pytest.mark.parametrize("samples", [1, 3, 9])
def test_where_people_keep_them(samples, fits):
    expected = validate(0, 1, samples, fits)
    assert len(expected) == 9
    for found in run_ranks(validate, 2, samples, fits, timeout=60):
        masks = found.pop("masks")
        assert masks == expected["masks"] and masks[-1] == 4 * samples
        for name, value in found.items():
            torch.testing.assert_close(
                value.sort().values if name == "cat" else value,
                expected[name],
                rtol=1e-5,
                atol=1e-6,
                equal_nan=True,
                check_dtype=name != "map",
            )
