"""The main job in a few seconds, for every Python that is supported: train, resume, evaluate, write, read."""

import json

import equikd as ek
from equikd.config import from_json, to_json
from equikd.examples.digits import Digits, get_config, load


def test_the_main_job(tmp_path, capsys):
    trainer = get_config(Digits(num_steps=60, width=64, dropout=0.0))
    trainer = ek.override(trainer, {"evals.test.every": 50, "log_every": 25, "checkpoints.every": 20})
    assert from_json(to_json(trainer)) == trainer

    ek.override(trainer, {"num_steps": 40}).train(tmp_path / "run")
    result = trainer.train(tmp_path / "run")
    assert "resuming" in capsys.readouterr().err
    assert int(result.state.step) == 60
    assert result.metrics["test/accuracy"] > 0.8

    test = load("test")
    right = result.predict(test).argmax(1) == test["label"]
    assert abs(float(right.mean()) - result.metrics["test/accuracy"]) < 1e-6

    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["split"]) for row in rows] == [
        (25, "train"),
        (40, "train"),
        (40, "test"),
        (50, "train"),
        (50, "test"),
        (60, "train"),
        (60, "test"),
    ]
    assert from_json((tmp_path / "run/config.json").read_text()) == trainer
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "config.40.json",
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "tensorboard",
    ]

    ek.save_model(tmp_path / "model", result.model)
    state = trainer.init(model=ek.load_model(tmp_path / "model"))
    assert (ek.train.predict(trainer, state, test).argmax(1) == test["label"]).mean() == right.mean()
