"""TensorBoard's own readers see images, texts and histograms as they were, and nothing of what is empty."""

import warnings

import numpy as np
import pytest
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

from equikd.metrics import BinCounts, Images, Summary, Texts, Values
from equikd.train import JsonLines, Record, Run, TensorBoard
from equikd.train._rendering import LONGEST
from equikd.train._writers import Writers, read_records
from tests.train._shown import events, images

with warnings.catch_warnings(action="ignore"):  # what TensorBoard cleans HTML with is deprecated
    from tensorboard.plugins.text.text_plugin import text_array_to_html

_RANDOM = np.random.default_rng(0)


def write(workdir, *records, writers=(TensorBoard(),), start_step=0):
    with Writers.open(writers, Run(workdir, "{}", num_steps=10, start_step=start_step)) as opened:
        for record in records:
            opened.write(record)


def row(step=5, metrics=None, **summaries):
    return Record(step, "test", metrics or {}, 1.0, summaries)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 4, 3), (2, 7, 2, 4)])
def test_images_come_back_to_the_bit(shape, tmp_path):
    made = Images(_RANDOM.integers(0, 256, shape).astype(np.uint8))
    write(tmp_path, Record(5, "test", {}, 1.0, {"a/b c": made}))
    found = events(tmp_path, "test")
    assert images(found, "a/b c") == {5: made}
    assert found.SummaryMetadata("a/b c").plugin_data.plugin_name == "images"


HOSTILE = {
    "markdown": "<s> *the* # cat\n\n  & | `a` ```b",
    "fences": "```\n````",
    "empty": "",
    "surrogate": "no \udcff Unicode",
    "null": "a\0b",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_texts_are_shown_as_they_are(name, tmp_path):
    text = HOSTILE[name]
    write(tmp_path, row(sample=Texts((text, "second"))))
    (event,) = events(tmp_path, "test").Tensors("sample")
    first, second = (value.decode() for value in event.tensor_proto.string_val)
    assert second == "```\nsecond\n```"
    fence, *lines, end = first.split("\n")
    assert "\n".join(lines) == text.replace("\udcff", "\\udcff")
    assert fence == end
    html = text_array_to_html(np.array([first, second]), True)
    assert html.count("<pre><code>") == 2
    if name == "markdown":
        assert "<pre><code>&lt;s&gt; *the* # cat\n\n  &amp; | `a` ```b\n</code></pre>" in html


def test_a_very_long_text_is_cut_and_says_so(tmp_path):
    write(tmp_path, row(sample=Texts(("x" * (LONGEST + 1234),))))
    (event,) = events(tmp_path, "test").Tensors("sample")
    (text,) = event.tensor_proto.string_val
    assert text.decode() == f"```\n{'x' * LONGEST}\n... and 1,234 more characters\n```"


def test_a_histogram_has_its_bins(tmp_path):
    counts, edges = np.array([1, 0, 2], np.int32), np.array([0.0, 0.5, 1.0, 1.5], np.float32)
    write(tmp_path, row(one=BinCounts(counts, edges), two=BinCounts(counts, edges, below=3, above=4)))
    found = events(tmp_path, "test")
    (event,) = found.Histograms("one")
    value = event.histogram_value
    assert (value.bucket_limit, value.bucket) == ([0.5, 1.0, 1.5], [1, 0, 2])
    assert (value.min, value.max, value.num) == (0, 1.5, 3)
    assert (value.sum, value.sum_squares) == (0.25 + 2 * 1.25, 0.25**2 + 2 * 1.25**2)
    (event,) = found.Histograms("two")
    value = event.histogram_value
    assert (value.bucket_limit, value.bucket) == ([0, 0.5, 1.0, 1.5, 2.0], [3, 1, 0, 2, 4])
    assert (value.min, value.max, value.num) == (-0.5, 2.0, 10)


def test_the_dashboards_find_them(tmp_path):
    bins = BinCounts(np.array([1, 2]), np.array([0.0, 1.0, 2.0]))
    pixels = Images(np.zeros((3, 2, 2, 1), np.uint8))
    write(tmp_path, row(pictures=pixels, sample=Texts(("a",)), weights=bins, loss=Values(np.zeros(2))))
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    provider, asked = MultiplexerDataProvider(multiplexer.Reload(), str(tmp_path)), context.RequestContext()
    found = provider.list_blob_sequences(asked, experiment_id="", plugin_name="images")["tensorboard/test"]
    assert {tag: series.max_length - 2 for tag, series in found.items()} == {"pictures": 3}  # beside width and height
    for plugin, tag in (("text", "sample"), ("histograms", "weights")):
        assert tag in provider.list_tensors(asked, experiment_id="", plugin_name=plugin)["tensorboard/test"]
    found = provider.read_tensors(asked, experiment_id="", plugin_name="histograms", downsample=9)
    assert found["tensorboard/test"]["weights"][0].numpy.tolist() == [[0, 1, 1], [1, 2, 2]]


class Own(Summary):
    """Of no known kind."""


def test_what_cannot_be_shown_is_left_out(tmp_path):
    nothing = np.full(3, np.nan)
    empty = {"a": Images(np.zeros((0, 2, 2, 1), np.uint8)), "b": Texts(()), "c": BinCounts(np.zeros(2, int), nothing)}
    write(tmp_path, row(metrics={"x": 1.0}, **empty, d=Values(np.zeros(2)), e=Own()))
    assert {kind: tags for kind, tags in events(tmp_path, "test").Tags().items() if tags} == {"scalars": ["x"]}


def test_a_resume_drops_the_summaries_that_it_makes_again(tmp_path):
    made = [Images(np.full((1, 2, 2, 1), value, np.uint8)) for value in range(3)]
    write(tmp_path, *(row(step, pictures=one) for step, one in zip((2, 4, 6), made, strict=True)))
    write(tmp_path, row(6, pictures=made[0]), start_step=4)
    assert images(events(tmp_path, "test"), "pictures") == {2: made[0], 4: made[1], 6: made[0]}


def test_json_lines_hold_the_scalars(tmp_path):
    write(tmp_path, row(metrics={"x": 1.0}, t=Texts(("a",))), row(6, t=Texts(("b",))), writers=(JsonLines(),))
    assert read_records(tmp_path / "metrics.jsonl") == [row(metrics={"x": 1.0}), row(6)]
