"""The examples are real: they reach what they say, in the time that they say."""

import inspect
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.config import from_json, roles, to_json, validate
from equikd.errors import ConfigError
from equikd.examples import dqn, gan
from equikd.examples.digits import Classifier, Digits, get_config, load
from equikd.metrics import Images
from equikd.testing import check_loss, check_metric


@pytest.fixture(scope="module")
def trained():
    """The digits example as `equikd train equikd.examples.digits` trains it, and the seconds that it took."""
    start = time.monotonic()
    result = ek.override(get_config(), {"writers": ()}).train()
    return result, time.monotonic() - start


def test_digits_are_learnt_within_a_minute(trained):
    result, seconds = trained
    assert result.metrics["test/accuracy"] >= 0.97
    assert seconds < 60


def test_digits_predict_the_test_split(trained):
    result, _ = trained
    test = load("test")
    logits = result.predict({"image": test["image"]})
    assert logits.shape == (360, 10)
    assert (logits.argmax(1) == test["label"]).mean() == pytest.approx(result.metrics["test/accuracy"], abs=1e-6)


def test_the_splits_are_fixed_disjoint_and_whole():
    train, test = load("train"), load("test")
    assert (len(train["label"]), len(test["label"])) == (1437, 360)
    rows = np.concatenate([train["image"], test["image"]]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    everything = (load_digits().data / 16).astype(np.float32)
    np.testing.assert_array_equal(np.sort(rows.view("f4"), 0), np.sort(everything, 0))
    for split, again in ((train, load("train")), (test, load("test"))):
        for name, column in split.items():
            np.testing.assert_array_equal(column, again[name])
    assert train["image"].dtype == np.float32
    assert train["label"].dtype == np.int32
    assert (train["image"].min(), train["image"].max()) == (0, 1)
    with pytest.raises(KeyError):
        load("validation")


def test_each_setting_reaches_the_trainer():
    settings = Digits(learning_rate=0.5, weight_decay=0.25, dropout=0.125, width=3, depth=4, batch_size=5, num_steps=6)
    trainer = get_config(settings)
    assert (trainer.optimizer.learning_rate, trainer.optimizer.weight_decay) == (0.5, 0.25)
    assert (trainer.model.dropout, trainer.model.width, trainer.model.depth) == (0.125, 3, 4)
    assert (trainer.train_data.batch_size, trainer.num_steps) == (5, 6)
    assert trainer.inputs == {"x": "batch.image"}
    assert from_json(to_json(trainer)) == trainer
    assert len(inspect.signature(get_config).parameters) == 1
    assert {name: role for name, (role, *_) in roles(Digits).items()}["learning_rate"] == "leaf"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("width", 0),
        ("depth", 0),
        ("batch_size", 0),
        ("num_steps", 0),
    ],
)
def test_settings_that_cannot_train_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        validate(Digits(**{name: value}))


def test_the_model_takes_one_image():
    model = Classifier(pixels=64, classes=10, width=8, depth=3, dropout=0.5, key=jax.random.key(0))
    image = jnp.ones((8, 8))
    first, second = (model(image, key=jax.random.key(seed)) for seed in (1, 2))
    assert first.shape == (10,)
    assert not jnp.array_equal(first, second)  # dropout
    assert len(model.hidden) == 3


def test_a_larger_rate_is_another_run_of_the_same_program(compilations):
    trainer = ek.override(get_config(Digits(num_steps=20)), {"writers": (), "evals": {}})
    first = trainer.train()
    compilations.clear()
    second = ek.override(trainer, {"optimizer.learning_rate": 1e-2, "model.dropout": 0.3}).train()
    assert compilations.names == []
    assert first.metrics["train/loss"] != second.metrics["train/loss"]


# The adversarial example.


TINY = gan.Adversarial(noise=3, width=4, batch_size=16, num_steps=2)


@pytest.fixture(scope="module")
def adversarial():
    """A trainer of tiny players, and its result."""
    trainer = ek.override(gan.get_config(TINY), {"writers": (), "log_every": 1, "evals.test.at": ()})
    return trainer, trainer.train()


@pytest.mark.slow
def test_the_noise_of_a_step_is_not_drawn_from_the_key_of_a_row(monkeypatch):
    """The model's keys are those that the step's key is split into."""
    drawn = []

    class Enough(Exception):
        """The noise is drawn."""

    def normal(key, shape):
        drawn.append(key)
        raise Enough

    trainer = ek.override(gan.get_config(TINY), {"writers": ()})
    state = trainer.init()
    batch = next(trainer.batches(state))
    monkeypatch.setattr(gan.step.jax.random, "normal", normal)
    with pytest.raises(Enough):
        gan.adversarial_step(trainer.in_step, state, batch)
    step_key = jax.random.fold_in(state.key, 0)
    taken = [
        step_key,
        *jax.random.split(step_key, len(batch.mask)),
        *(jax.random.fold_in(state.key, n) for n in (1, 2)),
    ]
    assert len(drawn) == 1
    data = jax.random.key_data(drawn[0])
    assert not any((data == jax.random.key_data(key)).all() for key in taken)


@pytest.mark.slow
def test_two_players_are_two_optimizers_and_two_losses(adversarial):
    """Against a loop by hand: each player follows the gradient of its own loss, with moments of its own."""
    trainer, result = adversarial
    state = trainer.init()
    players = {"generator": state.model.generator, "discriminator": state.model.discriminator}
    rates = {"generator": 2e-3, "discriminator": 1e-3}
    adams = {name: optax.adam(rate, b1=0.5) for name, rate in rates.items()}
    moments = {name: adams[name].init(eqx.filter(player, eqx.is_array)) for name, player in players.items()}

    def judged(generator, discriminator, image, noise):
        return jax.vmap(discriminator)(image), jax.vmap(discriminator)(jax.vmap(generator)(noise))

    def of_discriminator(discriminator, generator, *data):
        real, fake = judged(generator, discriminator, *data)
        return -jnp.mean(jnp.log(jax.nn.sigmoid(real))) - jnp.mean(jnp.log(1 - jax.nn.sigmoid(fake)))

    def of_generator(generator, discriminator, *data):
        return -jnp.mean(jnp.log(jax.nn.sigmoid(judged(generator, discriminator, *data)[1])))

    @eqx.filter_jit
    def gradients(players, image, noise):
        generator, discriminator = players["generator"], players["discriminator"]
        return {
            "generator": eqx.filter_grad(of_generator)(generator, discriminator, image, noise),
            "discriminator": eqx.filter_grad(of_discriminator)(discriminator, generator, image, noise),
        }

    for step, batch in zip(range(2), trainer.batches(state), strict=False):
        noise = jax.random.normal(jax.random.fold_in(jax.random.fold_in(state.key, step), 16), (16, 3))
        grads = gradients(players, batch.data["image"], noise)
        for name, adam in adams.items():
            updates, moments[name] = adam.update(grads[name], moments[name])
            players[name] = eqx.apply_updates(players[name], updates)
    for name, player in players.items():
        ours, theirs = eqx.filter((getattr(result.model, name), player), eqx.is_array)
        for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_an_eval_of_two_players_has_what_people_look_at(adversarial):
    trainer, result = adversarial
    names = {name for name in result.metrics if name.startswith("test/")}
    assert {f"test/{name}" for name in ("real_accuracy", "fake_accuracy", "distance", "losses/generator")} <= names
    assert 0 < result.metrics["test/distance"] < 50
    grid = result.summaries["test/samples"]
    assert isinstance(grid, Images)
    assert grid.pixels.shape == (1, 8 * 9 * 4 - 4, 8 * 9 * 4 - 4, 1)
    data = gan.configs.load_with_noise("test", 3)
    verdicts = result.predict(data)
    assert verdicts.sample.shape == (360, 8, 8)
    np.testing.assert_array_equal(grid.pixels[0, ::4, ::4][:8, :8], Images.of(verdicts.sample[:1]).pixels[0])
    assert result.metrics["test/fake_accuracy"] == pytest.approx(float((verdicts.fake < 0).mean()))
    assert result.metrics["test/losses/real"] == pytest.approx(float(jax.nn.softplus(-verdicts.real).mean()), rel=1e-5)
    assert from_json(to_json(trainer)) == trainer


def test_the_frechet_distance():
    distance = gan.FrechetDistance(real="batch.image", fake="preds")
    draw = np.random.default_rng(0)
    x, mask = draw.normal(size=(500, 3)).astype(np.float32), jnp.ones(500, bool)
    of = lambda a, b: float(distance.from_values(jnp.asarray(a), jnp.asarray(b), mask).finalize().compute())
    assert of(x, x) == pytest.approx(0, abs=1e-4)
    assert of(x, x + np.float32([3, 0, 4])) == pytest.approx(25, rel=1e-3)
    scaled = sum((2 - 1) ** 2 * x.astype(np.float64).var(0)) + (x.mean(0) ** 2).sum()
    assert of(x, 2 * x) == pytest.approx(scaled, rel=1e-3)  # (sigma - 2 sigma)^2 along each axis
    y = x @ draw.normal(size=(3, 3)).astype(np.float32)
    c, d = np.cov(x.T, bias=True), np.cov(y.T, bias=True)
    root = np.sqrt(np.linalg.eigvals(c @ d).real).sum()
    means = ((x.mean(0) - y.mean(0)) ** 2).sum()
    assert of(x, y) == pytest.approx(means + np.trace(c + d) - 2 * root, rel=1e-3)
    assert math.isnan(distance.from_values(jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.zeros(2, bool)).compute())


@pytest.mark.slow
def test_what_the_examples_add_is_exact():
    check_metric(gan.VerdictAccuracy("preds", real=False))
    check_metric(gan.FrechetDistance(real="batch.image", fake="preds"), rtol=1e-2)
    check_loss(gan.Verdict("preds", real=True))
    check_loss(dqn.TemporalDifference(values_of="preds", action="batch.action", target="batch.target"))


# Q-learning.


def test_the_cart_is_that_of_gym():
    after = dqn.moved(jnp.zeros(4), jnp.array(1))
    np.testing.assert_allclose(after, [0, 0.19512195, 0, -0.29268293], rtol=1e-6)
    after = dqn.moved(jnp.array([0.1, -0.2, 0.05, 0.3]), jnp.array(0))
    np.testing.assert_allclose(after, [0.096, -0.3957976, 0.056, 0.6080232], rtol=1e-5)
    states = jnp.array([[0.0] * 4, [2.41, 0, 0, 0], [0, 9, 0, 9], [0, 0, -0.21, 0], [-2.39, 0, 0.2, 0]])
    assert dqn.fallen(states).tolist() == [False, True, False, True, False]


def test_episodes_end_with_the_fall():
    class Right(eqx.Module):
        def __call__(self, state):
            return jnp.array([0.0, 1.0])

    start = jnp.zeros(4)
    states = [start]
    while not dqn.fallen(states[-1]):
        states.append(dqn.moved(states[-1], jnp.array(1)))
    assert int(dqn.Player(Right())(start)) == len(states) - 1 == 9


@pytest.fixture(scope="module")
def balancing():
    """A trainer of a tiny network, and its states after 0, 1 and 2 steps."""
    settings = dqn.Balancing(width=4, transitions=64, batch_size=16, num_steps=2, rate=0.25, discount=0.5)
    trainer = ek.override(dqn.get_config(settings), {"writers": (), "evals.play.at": ()})
    states = [trainer.init()]
    for batch, _ in zip(trainer.batches(states[0]), range(2), strict=False):
        states.append(ek.train.step(trainer, states[-1], batch)[0])
    return trainer, states


def test_the_target_network_follows_slowly(balancing):
    trainer, states = balancing
    arrays = lambda tree: jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    slow = arrays(states[0].model)
    for one, other in zip(arrays(states[0].extra), slow, strict=True):
        np.testing.assert_array_equal(one, other)
    for state in states[1:]:
        slow = [s + 0.25 * (f - s) for s, f in zip(slow, arrays(state.model), strict=True)]
        for one, other in zip(arrays(state.extra), slow, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert "step.rate" in ek.tree.named_leaves(trainer.in_step)
    result = trainer.train()
    for one, other in zip(arrays(result.state.extra), slow, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert 1 <= result.metrics["play/least_steps"] <= result.metrics["play/steps"] <= 500


def test_what_an_action_is_worth_is_what_the_slow_copy_says(balancing):
    trainer, (_, state, _) = balancing
    batch = next(trainer.batches(state)).data
    fast, slow = (np.asarray(jax.vmap(network)(batch["after"])) for network in (state.model, state.extra))
    worth = np.where(batch["fallen"], -1, 0.5 * slow[np.arange(16), fast.argmax(1)])
    said = np.asarray(jax.vmap(state.model)(batch["state"]))[np.arange(16), batch["action"]]
    error = np.abs(said - worth)
    huber = np.where(error <= 1, error**2 / 2, error - 0.5).mean()
    _, aux = ek.train.step(trainer, state, batch)
    assert float(aux.loss) == pytest.approx(huber, rel=1e-5)
    assert batch["fallen"].any()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (dqn.Balancing(learning_rate=0.0), "learning_rate"),
        (dqn.Balancing(rate=0.0), "rate"),
        (dqn.Balancing(discount=1.5), "discount"),
        (dqn.Balancing(transitions=0), "transitions"),
        (gan.Adversarial(discriminator_rate=-1.0), "discriminator_rate"),
        (gan.Adversarial(b1=1.0), "b1"),
        (gan.Adversarial(noise=0), "noise"),
    ],
)
def test_settings_of_the_other_examples_that_cannot_train_are_refused(settings, name):
    with pytest.raises(ConfigError, match=name):
        validate(settings)


# As people run them.


def trained_by_command(module: str, workdir: Path, *flags: str) -> tuple[dict[str, float], float]:
    """The last row of each eval of a run from the command line, and the seconds that it took."""
    home = str(Path(ek.__file__).parents[1])
    start = time.monotonic()
    words = [sys.executable, "-m", "equikd", "train", module, "--workdir", str(workdir), *flags]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": home}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds = time.monotonic() - start
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {f"{row['split']}/{name}": value for row in rows for name, value in row["metrics"].items()}, seconds


@pytest.fixture(scope="module")
def full_gan(tmp_path_factory):
    """The run directory of the adversarial example, its results, and the seconds that it took."""
    workdir = tmp_path_factory.mktemp("gan")
    return workdir, *trained_by_command("equikd.examples.gan", workdir)


@pytest.mark.slow
def test_samples_look_like_digits(full_gan):
    """A classifier of real digits is sure what samples are, and finds all ten; noise convinces it of nothing."""
    from sklearn.linear_model import LogisticRegression

    workdir, metrics, seconds = full_gan
    assert seconds < 120
    assert metrics["test/distance"] < 0.8  # 0.2 between real images, 11 before training
    assert 0.6 < metrics["train/real_accuracy"] < 0.9  # neither player has won
    assert 0.6 < metrics["train/fake_accuracy"] < 0.9
    state = gan.get_config().restore(workdir)
    noise = np.random.default_rng(1).normal(size=(1000, 32)).astype(np.float32)
    samples = np.asarray(jax.vmap(state.model.generator)(noise)).reshape(1000, 64)
    train, test = load("train"), load("test")
    classifier = LogisticRegression(max_iter=1000).fit(train["image"].reshape(-1, 64), train["label"])

    def sure_and_varied(images):
        chances = classifier.predict_proba(images.reshape(-1, 64))
        shares = np.bincount(chances.argmax(1), minlength=10) / len(images)
        return chances.max(1).mean(), -(shares * np.log(np.maximum(shares, 1e-9))).sum() / np.log(10)

    sure, varied = sure_and_varied(samples)
    assert sure > sure_and_varied(test["image"])[0] - 0.15
    assert varied > 0.85


@pytest.mark.slow
def test_samples_are_in_the_events(full_gan):
    workdir, *_ = full_gan
    written = b"".join(path.read_bytes() for path in (workdir / "tensorboard").rglob("*tfevents*"))
    assert written.count(b"\x89PNG") == 7  # at 0 and each 1000 of 6000 steps


@pytest.mark.slow
def test_the_pole_stays_up(tmp_path):
    metrics, seconds = trained_by_command("equikd.examples.dqn", tmp_path / "slow")
    assert seconds < 60
    assert metrics["play/steps"] > 480
    without, _ = trained_by_command("equikd.examples.dqn", tmp_path / "none", "--args.rate=1.0")
    assert without["play/steps"] < 400  # its values run away
    assert without["train/best_value"] > 10 > metrics["train/best_value"]
