"""Summaries as the values of TensorBoard events, written as plain dicts: its dashboards for images, texts, histograms.

One metric is one tag. A tag of images holds the PNG of each of them, which TensorBoard shows as samples beside each
other, with a slider over the steps. Texts are shown in code blocks, since TensorBoard reads them as Markdown, and a
`<s>` or `*` in them would be gone.
"""

import re
from typing import Any

import numpy as np

from equikd.metrics import BinCounts, Images, Summary, Texts
from equikd.train._png import png

LONGEST = 20_000
"""Characters of a text; a browser that is given megabytes stands still."""


def rendered(tag: str, summary: Summary) -> list[dict[str, Any]]:
    """The event's values for one summary; none for what TensorBoard has no dashboard for, and for nothing at all.

    Args:
        tag: the result's name.
        summary: what a metric has computed.
    """
    match summary:
        case Images(pixels) if pixels.size:
            size = [str(pixels.shape[2]).encode(), str(pixels.shape[1]).encode()]  # width, height
            return [_strings(tag, "images", [*size, *map(png, pixels)])]
        case Texts(texts) if texts:
            return [_strings(tag, "text", [_block(text) for text in texts])]
        case BinCounts() if summary.total:
            return [{"tag": tag, "histo": _histogram(summary)}]
        case _:
            return []


def _strings(tag: str, plugin: str, strings: list[bytes]) -> dict[str, Any]:
    shape = {"dim": [{"size": len(strings)}]}
    tensor = {"dtype": "DT_STRING", "tensor_shape": shape, "string_val": strings}
    return {"tag": tag, "metadata": {"plugin_data": {"plugin_name": plugin}}, "tensor": tensor}


def _block(text: str) -> bytes:
    """A text as a code block; what is no Unicode (half of a surrogate pair) is spelt out."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}\n... and {len(text) - LONGEST:,} more characters"
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}\n{text}\n{fence}".encode("utf-8", "backslashreplace")


def _histogram(found: BinCounts) -> dict[str, Any]:
    """Bins by their upper edges. What lies outside, nobody knows where, gets a bin of equal width beside the others."""
    edges, counts = found.edges.astype(np.float64), found.counts.astype(np.float64)
    if found.below:
        edges, counts = np.append(2 * edges[0] - edges[1], edges), np.append(found.below, counts)
    if found.above:
        edges, counts = np.append(edges, 2 * edges[-1] - edges[-2]), np.append(counts, found.above)
    middles = (edges[:-1] + edges[1:]) / 2  # so sums are those of the bins, as near as these tell
    return {
        "min": edges[0],
        "max": edges[-1],
        "num": counts.sum(),
        "sum": (counts * middles).sum(),
        "sum_squares": (counts * middles**2).sum(),
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.tolist(),
    }
