"""Images, texts and histograms from end to end: in results, in history, in events, over resumes, in the preflight."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console as RichConsole

import equikd as ek
from equikd.errors import WiringError
from equikd.metrics import Images, Texts
from equikd.train._writers import Writers, read_records
from tests.train._shown import METRICS, TEST, TRAIN, WRITTEN, Keep, Letters, events, images, shown
from tests.train._small import BATCH

ALL = {"train/pictures/some", "train/sample", "train/weights", "test/pictures/some", "test/sample"}


def first(batches, count):
    """What is shown of the first rows of some batches."""
    spell = Letters("A")
    image = np.concatenate([batch["image"] for batch in batches])[:count]
    tokens = np.concatenate([batch["tokens"] for batch in batches])[:2]
    return Images.of(image), Texts(tuple(map(spell, tokens)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A result, its run directory, and the records that a writer gets."""
    workdir = tmp_path_factory.mktemp("run")
    return shown(writers=(Keep(), ek.train.TensorBoard())).train(workdir), workdir, tuple(WRITTEN)


def test_results_and_records_have_them(run):
    result, _, written = run
    assert not any(row.summaries for row in result.history)  # those of a long run would fill the memory
    assert result.summaries.keys() == ALL
    assert {*result.metrics} == {f"{s}/{n}" for s in ("train", "test") for n in RESULTS}
    trainer = shown()
    batches = [batch.data for batch, _ in zip(trainer.batches(trainer.init()), range(8), strict=False)]
    rows = {(row.split, row.step): row for row in written}
    for step in (4, 8):
        pictures, sample = first(batches[step - 4 : step], 3)
        assert rows["train", step].summaries["pictures/some"] == pictures
        assert rows["train", step].summaries["sample"] == sample
        pictures, sample = first([TEST], 3)
        assert rows["test", step].summaries == {"pictures/some": pictures, "sample": sample}
    assert result.summaries["train/sample"] == rows["train", 8].summaries["sample"]
    assert rows["train", 4].summaries["sample"] != rows["train", 8].summaries["sample"]


RESULTS = ("accuracy", "loss", "losses/ce", "weighted/ce")


def test_a_histogram_of_parameters_counts_each_of_each_step(run):
    result, *_ = run
    found = result.summaries["train/weights"]
    assert found.total == 4 * result.model.first.weight.size
    np.testing.assert_allclose(found.edges, np.linspace(-0.25, 0.25, 6), rtol=1e-6)


def test_tensorboard_shows_what_the_records_have(run):
    result, workdir, written = run
    for split in ("train", "test"):
        found = events(workdir, split)
        rows = {row.step: row for row in written if row.split == split}
        expected = {step: row.summaries["pictures/some"] for step, row in rows.items()}
        assert images(found, "pictures/some") == expected
        for event in found.Tensors("sample"):
            texts = [text.decode().split("\n")[1] for text in event.tensor_proto.string_val]
            assert texts == list(rows[event.step].summaries["sample"].texts)
    for event in events(workdir, "train").Histograms("weights"):
        assert event.histogram_value.num == result.summaries["train/weights"].total


def test_metrics_jsonl_has_the_scalars(run):
    result, workdir, _ = run
    written = read_records(workdir / "metrics.jsonl")
    assert [(row.step, row.split, row.metrics) for row in written] == [
        (row.step, row.split, row.metrics) for row in result.history
    ]


def test_evaluate_gives_scalars(run):
    result, *_ = run
    expected = {name: value for name, value in result.metrics.items() if name.startswith("test/")}
    assert shown().evaluate(result.state) == expected


def test_a_finished_run_shows_its_evals_again(run):
    result, workdir, _ = run
    before = [path.read_bytes() for path in sorted(workdir.glob("tensorboard/test/*"))]
    again = shown().train(workdir)
    expected = {name: one for name, one in result.summaries.items() if name.startswith("test/")}
    assert again.summaries == expected
    after = [path.read_bytes() for path in sorted(workdir.glob("tensorboard/test/*"))]
    assert before == after[: len(before)]
    assert images(events(workdir, "test"), "pictures/some").keys() == {4, 8}


def test_an_equal_experiment_compiles_nothing(run, compilations):
    """Though each trace makes the decoder of its node anew."""
    del run
    compilations.clear()
    shown().train()
    assert compilations.names == []


class Stop(Exception):
    """An interruption."""


@ek.config.config
class StopAt:
    """A writer of one's own, which knows nothing of summaries."""

    step: int

    def open(self, run):
        return self

    def tick(self, step):
        if step == self.step:
            raise Stop

    def write(self, record):
        sorted(record.metrics)

    def flush(self): ...
    def close(self): ...


def test_a_resume_within_an_interval_shows_its_first_rows(run, tmp_path):
    result, *_ = run
    checkpoints = ek.train.Checkpoints(every=2)
    with pytest.raises(Stop):
        shown(checkpoints=checkpoints, writers=(StopAt(7), ek.train.TensorBoard())).train(tmp_path)
    again = shown(checkpoints=checkpoints).train(tmp_path)
    assert [row.step for row in again.history] == [8, 8]
    assert again.summaries == result.summaries
    assert images(events(tmp_path, "train"), "pictures/some").keys() == {4, 8}


def test_an_eval_of_summaries_alone_writes_its_row(tmp_path):
    data = ek.data.InMemory(TEST, batch_size=25)
    only = ek.evals.Eval(data=data, losses={}, metrics={"pictures": ek.metrics.ShowImages(images="batch.image", n=60)})
    result = shown(evals={"only": only}, num_steps=1).train(tmp_path)
    (row,) = (row for row in read_records(tmp_path / "metrics.jsonl") if row.split == "only")
    assert row.metrics == {}
    assert result.summaries["only/pictures"] == Images.of(TEST["image"])


@pytest.mark.parametrize("terminal", [False, True])
def test_the_console_shows_the_scalars(run, terminal, tmp_path):
    written = run[2]
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    console = RichConsole(file=stream, force_terminal=terminal, width=120)
    to = ek.train.Run(None, "{}", num_steps=8, start_step=0)
    only = ek.train.Record(8, "only", {}, 2.0, written[-1].summaries)
    with Writers((ek.train.Console(seconds=0).open(to, console=console),)) as writers:
        writers.tick(8)
        for record in (*written, only):
            writers.write(record)
    text = stream.getvalue()
    assert "step 8/8  only\n" in text.replace(" \n", "\n")
    assert "accuracy" in text
    assert "Images" not in text


def test_the_preflight_lists_them(snapshot):
    found = ek.inspect.check(shown())
    assert {name for name, shape in found.results.items() if isinstance(shape, str)} == ALL
    table = str(found).partition("\nResults\n")[2].partition("\n\n")[0]
    snapshot("preflight", table)


def letters(tokens: np.ndarray) -> str:
    return Letters()(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "name", "lambda", "none"])
def test_a_decode_of_any_kind(kind):
    kinds = {"function": letters, "name": ek.lazy(letters), "lambda": lambda row: letters(row[:]), "none": None}
    metrics = {"sample": ek.metrics.ShowTexts(tokens="batch.tokens", decode=kinds[kind])}
    found = shown(metrics=metrics, num_steps=1, writers=()).train().summaries["test/sample"]
    texts = [" ".join(map(str, row)) if kind == "none" else letters(row) for row in TEST["tokens"][:8]]
    assert found == Texts(tuple(texts))


class Needs:
    """A decoder that fails on what it has not seen."""

    def __call__(self, tokens: np.ndarray) -> str:
        raise KeyError(f"no token {tokens[0]}")


@pytest.mark.slow
def test_a_decode_that_fails_is_named():
    metrics = {"sample": ek.metrics.ShowTexts(tokens="batch.tokens", decode=ek.lazy(Needs)())}
    with pytest.raises(KeyError, match="no token") as error:
        shown(metrics=metrics, num_steps=1, evals={}).train()
    assert "while computing metric 'sample' (ShownTexts.compute)" in error.value.__notes__


def test_what_is_no_image_is_refused_before_anything_runs(snapshot):
    two = {**TRAIN, "image": TRAIN["image"][..., :2]}
    with pytest.raises(WiringError) as error:
        shown(train_data=ek.data.InMemory(two, batch_size=BATCH), evals={}).init()
    snapshot("two_channels", str(error.value))


def test_a_metric_that_fails_is_found_beside_summaries():
    """Summaries need values, which a trace has not; the metrics beside them are traced all the same."""

    class Fails(ek.metrics.Average):
        def compute(self):
            raise KeyError("no such thing")

    @ek.config.config
    class Failing(ek.metrics.Mean):
        def from_values(self, values, mask):
            return Fails.of(values, mask)

    metrics = {**METRICS, "mine": Failing(values="batch.x")}
    with pytest.raises(KeyError, match="no such thing") as error:
        shown(metrics=metrics).init()
    assert "while computing metric 'mine'" in "\n".join(error.value.__notes__)


@pytest.mark.slow
def test_the_command_line_trains_with_them(tmp_path):
    root = Path(__file__).parents[2]
    words = [sys.executable, "-m", "equikd", "train", "tests/train/_shown.py", "--workdir", str(tmp_path / "run")]
    done = subprocess.run(words, cwd=root, check=True, capture_output=True, text=True)
    assert "test   accuracy" in done.stdout
    assert images(events(tmp_path / "run", "test"), "pictures/some")[8] == Images.of(TEST["image"][:3])
