"""The recipes that come with the project: each can be read, says what was published, and one of them runs."""

import json
from pathlib import Path

import pytest

from sala.cli import run
from sala.config import SalaConfig
from sala.lab.train.recipe import Learning, Recipe, TrainStage, load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted([*(ROOT / "recipes").rglob("*.toml"), *(ROOT / "models").glob("*/recipe*.toml")])

# name: tokens in billions, tokens of a row, rows, rates at the peak and at the end, warm-up, sparse
SALA_9B = {
    "stable": (314.6, 4096, 7.8, 7.5e-3, None, 2000, False),
    "short-decay": (1006.6, 4096, 7.8, 7.5e-3, 3.75e-4, 0, False),
    "long-32k": (102.2, 32 * 1024, 7.8, 3e-4, 2e-4, 0, True),
    "long-160k": (62.9, 160 * 1024, 9.8, 2e-4, 1e-4, 0, True),
    "long-520k": (50.6, 520 * 1024, 10.1, 1e-4, 3.75e-5, 0, True),
    "sft-64k": (204.5, 64 * 1024, 15.7, 1e-3, 1e-4, 1000, True),
    "sft-140k": (213.3, 140 * 1024, 17.8, 1e-3, 1e-4, 1000, True),
}


def learning(recipe: Recipe) -> dict[str, Learning]:
    return {stage.name: stage for stage in recipe.stages if isinstance(stage, Learning)}


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_it_is_read_and_every_rate_is_sane(file: Path) -> None:
    for stage in learning(load_recipe(file)).values():
        last = max(stage.num_steps - 1, stage.warmup_steps)  # a stage may be bounded by seconds instead
        assert stage.learning_rate.at(stage.warmup_steps) == pytest.approx(stage.lr, rel=1e-3)
        assert 0 < stage.learning_rate.at(0) <= stage.lr
        if stage.schedule != "constant":
            assert stage.learning_rate.at(last, 1.0) == pytest.approx(stage.final_lr, rel=1e-6)


@pytest.mark.parametrize("name", SALA_9B)
def test_the_stages_of_minicpm_sala(name: str) -> None:
    tokens, seq_len, batch, lr, final, warmup, is_sparse = SALA_9B[name]
    stage = learning(load_recipe(ROOT / "recipes" / "sala-9b.toml"))[name]
    assert isinstance(stage, TrainStage)
    assert stage.tokens == pytest.approx(tokens * 1e9)
    assert stage.seq_len == seq_len
    assert stage.batch_rows * stage.seq_len == pytest.approx(batch * 1e6, rel=0.01)
    assert (stage.lr, stage.warmup_steps, stage.is_sparse) == (lr, warmup, is_sparse)
    assert stage.schedule == ("constant" if final is None else "exponential")
    assert final is None or stage.final_lr == final


def test_the_conversion_of_minicpm_sala() -> None:
    stages = load_recipe(ROOT / "recipes" / "sala-9b.toml").stages
    align, select, distil = stages[:3]
    assert align.tokens + distil.tokens == 1_300_000_000
    assert align.seq_len == distil.seq_len == 512
    assert select.layers == (0, 9, 16, 17, 22, 29, 30, 31)


def test_halo_as_published() -> None:
    stages = learning(load_recipe(ROOT / "recipes" / "halo.toml"))
    assert {name: (s.tokens, s.seq_len, s.batch_rows, s.lr) for name, s in stages.items()} == {
        "align": (320_000_000, 512, 32, 1e-3),
        "distil": (1_000_000_000, 512, 96, 1e-4),
        "long": (1_000_000_000, 16_384, 128, 1e-5),
    }


def test_a_small_recipe_trains(tiny: Path, tmp_path: Path) -> None:
    """The second small recipe, with rows of 64 tokens and three steps."""
    text = (ROOT / "recipes" / "small" / "2-stable.toml").read_text()
    small = {"tokens = 10_000_000": "steps = 3", "seq_len = 4096": "seq_len = 64", "warmup_steps = 30": ""}
    for old, new in small.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "recipe.toml").write_text(text)
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": f"TokenStream {number} of a text that repeats itself."}) for number in range(60)]
    (tmp_path / "data" / "text.jsonl").write_text("\n".join(lines))
    arguments = [
        "train",
        str(tmp_path / "recipe.toml"),
        "-m",
        str(tiny),
        "-o",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    assert run(arguments) == 0
    assert SalaConfig.load(tmp_path / "out").mixer_types == SalaConfig.load(tiny).mixer_types
    log = [json.loads(line) for line in (tmp_path / "out.run" / "01-stable" / "metrics.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 3
    assert log[-1]["loss"] < log[0]["loss"]
    assert run(arguments) == 1  # nothing is overwritten


def test_a_teacher_is_asked_for(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("word " * 400)
    (tmp_path / "recipe.toml").write_text(
        '[[stage]]\nname = "d"\nkind = "distil"\nsteps = 2\nbatch_rows = 2\nseq_len = 64\n'
        '[[stage.data]]\npath = "text.txt"\n'
    )
    arguments = [
        "train",
        str(tmp_path / "recipe.toml"),
        "-m",
        str(tiny),
        "-o",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    assert run(arguments) == 2
    assert "--teacher" in capsys.readouterr().err
    assert run([*arguments, "--teacher", str(tiny)]) == 0  # what was begun goes on, now with a teacher: itself
    log = (tmp_path / "out.run" / "01-d" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(log[0])["kl"] < 1e-4
