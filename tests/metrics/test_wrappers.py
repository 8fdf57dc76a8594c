"""Wrappers: a metric that may be absent, and one for each leaf of a tree."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equikd as ek
from equikd.config import from_json, to_json, validate
from equikd.errors import ConfigError, WiringError
from equikd.metrics import Accuracy, Average, Mean, MeanSquaredError, Norm, SkipIfMissing, TreeMap, empty_state
from equikd.metrics._aux import Aux
from equikd.typing import ShapeError
from equikd.wiring import Context

ROWS = jnp.array([True, True, False])
ACCURACY = Accuracy(preds="preds", labels="batch.label")


def results(metric, context):
    return Aux(metrics={"m": metric.from_context(context)}).results()


class TestSkipIfMissing:
    metric = SkipIfMissing(ACCURACY, missing="batch.label")
    preds = jnp.eye(3)

    def test_it_is_the_metric_where_nothing_is_missing(self):
        context = Context(preds=self.preds, batch={"label": jnp.array([0, 0, 2])}, mask=ROWS)
        assert results(self.metric, context) == {"m": 0.5}
        assert self.metric.takes_mask
        assert self.metric.reads() == {
            "metric.preds": "preds",
            "metric.labels": "batch.label",
            "metric.mask": "mask",
        }

    def test_it_gives_no_result_where_the_path_is_missing(self):
        context = Context(preds=self.preds, batch={"x": jnp.ones(3)}, mask=ROWS)
        assert results(self.metric, context) == {}
        state = self.metric.from_context(context)
        assert (state | empty_state(state)) == state

    def test_another_path_that_is_missing_is_an_error(self, snapshot):
        wrong = SkipIfMissing(Accuracy(preds="preds.logit", labels="batch.label"), missing="batch.label")
        for batch in ({"x": jnp.ones(3)}, {"label": jnp.array([0, 0, 2])}):
            with pytest.raises(WiringError, match=r"metric\.preds = 'preds\.logit' leads nowhere"):
                wrong.from_context(Context(preds={"logits": self.preds}, batch=batch, mask=ROWS))
        misspelt = SkipIfMissing(Accuracy(preds="preds", labels="batch.lable"), missing="batch.label")
        with pytest.raises(ConfigError) as error:
            validate(misspelt)
        snapshot("not_read", str(error.value))

    def test_a_shape_that_does_not_fit_is_an_error(self):
        context = Context(preds=self.preds, batch={"label": jnp.zeros((3, 2), int)}, mask=ROWS)
        with pytest.raises(ShapeError, match="labels"):
            self.metric.from_context(context)

    def test_as_data(self):
        assert from_json(to_json(self.metric)) == self.metric
        longer = ek.override(self.metric, {"metric.labels": "batch.y", "missing": "batch.y"})
        assert longer.metric.labels == "batch.y"
        assert len(jax.tree.leaves(SkipIfMissing(Mean("batch.x"), "batch.x"))) == 0

    def test_around_each_other(self):
        both = SkipIfMissing(TreeMap(MeanSquaredError(preds="preds", targets="batch.y")), missing="batch.y")
        tree = {"a": jnp.ones(3), "b": jnp.zeros(3)}
        assert results(both, Context(preds=tree, batch={}, mask=ROWS)) == {}
        assert results(both, Context(preds=tree, batch={"y": tree}, mask=ROWS)) == {"m/a": 0.0, "m/b": 0.0}
        with pytest.raises(WiringError, match=r"metric\.metric\.preds = 'preds\.c'"):
            ek.override(both, {"metric.metric.preds": "preds.c"}).from_context(Context(preds=tree, batch={}, mask=ROWS))


class TestTreeMap:
    def test_each_leaf_by_its_path(self):
        preds = {"head": [jnp.array([1.0, 3.0, jnp.nan]), jnp.array([5.0, 7.0, jnp.inf])]}
        metric = TreeMap(Mean(values="preds"))
        context = Context(preds=preds, mask=ROWS)
        assert results(metric, context) == {"m/head[0]": 2.0, "m/head[1]": 6.0}
        state = metric.from_context(context)
        assert Aux(metrics={"m": state | empty_state(state) | state}).results() == results(metric, context)
        stacked = jax.tree.map(lambda x: jnp.stack([x, x]), state)
        assert Aux(metrics={"m": stacked.reduce()}).results() == results(metric, context)

    def test_trees_of_equal_paths_and_shared_arrays(self):
        preds, targets = {"a": jnp.ones(3), "b": jnp.zeros(3)}, {"a": jnp.zeros(3), "b": jnp.zeros(3)}
        metric = TreeMap(MeanSquaredError(preds="preds", targets="batch"))
        assert results(metric, Context(preds=preds, batch=targets, mask=ROWS)) == {"m/a": 1.0, "m/b": 0.0}
        assert results(metric, Context(preds=preds, batch=jnp.ones(3), mask=ROWS)) == {"m/a": 0.0, "m/b": 1.0}

    def test_a_metric_of_many_results(self):
        grads = {"a": {"w": jnp.array([3.0, 4.0])}, "b": {"w": jnp.array([6.0, 8.0])}}
        context = Context(grads=grads, mask=ROWS)
        assert results(TreeMap(Norm("grads")), context) == {"m/a.w": 5.0, "m/b.w": 10.0}

    @pytest.mark.parametrize(
        ("name", "preds", "targets"),
        [
            ("no_tree", jnp.ones(3), jnp.ones(3)),
            ("other_paths", {"a": jnp.ones(3), "b": jnp.ones(3)}, {"a": jnp.ones(3), "c": jnp.ones(3)}),
            ("shape", {"a": jnp.ones(3)}, {"a": jnp.ones((3, 2))}),
        ],
        ids=["no_tree", "other_paths", "shape"],
    )
    def test_what_does_not_fit(self, name, preds, targets, snapshot):
        metric = TreeMap(MeanSquaredError(preds="preds", targets="batch"))
        with pytest.raises((WiringError, ShapeError)) as error:
            metric.from_context(Context(preds=preds, batch=targets, mask=ROWS))
        snapshot(name, re.sub(r"/\S*equikd/", "equikd/", str(error.value)))

    @pytest.mark.parametrize("seed", range(5))
    def test_equals_the_metric_on_each_leaf(self, seed):
        random = np.random.default_rng(seed)
        tree = {name: jnp.asarray(random.normal(size=(7, 2)), jnp.float32) for name in "abc"}
        mask = jnp.asarray(random.random(7) < 0.6)
        found = results(TreeMap(Mean(values="preds")), Context(preds=tree, mask=mask))
        for name, leaf in tree.items():
            assert found[f"m/{name}"] == Average.of(leaf, mask).compute()
