"""Recipes are strict, and rates follow them."""

import math
from pathlib import Path

import pytest

from sala.errors import ConfigError
from sala.lab.train.recipe import (
    AlignStage,
    DistilStage,
    SampleStage,
    Schedule,
    SelectStage,
    TrainStage,
    load_recipe,
)

STAGE = """
[[stage]]
name = "one"
kind = "train"
steps = 3
lr = 1
betas = [0.9, 0.99]
[[stage.data]]
path = "a.jsonl"
"""


def read(tmp_path: Path, text: str):
    (tmp_path / "recipe.toml").write_text(text)
    return load_recipe(tmp_path / "recipe.toml")


def test_values_and_defaults(tmp_path: Path) -> None:
    recipe = read(tmp_path, "seed = 4\n[sparse]\nblock_size = 16\nkernel_size = 8\nkernel_stride = 4\n" + STAGE)
    (stage,) = recipe.stages
    assert isinstance(stage, TrainStage)
    assert (stage.lr, stage.betas, stage.num_steps, recipe.seed) == (1.0, (0.9, 0.99), 3, 4)
    assert isinstance(stage.lr, float)
    assert stage.data[0].path == "a.jsonl"
    assert recipe.sparse.block_size == 16


def test_kinds_of_stages(tmp_path: Path) -> None:
    data = "steps = 1\n[[stage.data]]\npath = 'a'\n"
    text = "[[stage]]\nname = 'a'\nkind = 'sample'\n[[stage]]\nname = 'b'\nkind = 'select'\n"
    text += "".join(f"[[stage]]\nname = '{kind}'\nkind = '{kind}'\n{data}" for kind in ("align", "distil", "train"))
    kinds = [SampleStage, SelectStage, AlignStage, DistilStage, TrainStage]
    assert [type(stage) for stage in read(tmp_path, text).stages] == kinds


def test_tokens_instead_of_steps(tmp_path: Path) -> None:
    text = STAGE.replace("steps = 3", "tokens = 100_000\nbatch_rows = 4\nseq_len = 500")
    assert read(tmp_path, text).stages[0].num_steps == 50  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("old", "new", "said", "remedy"),
    [
        ("lr = 1", "learning = 1\nl_r = 2", "'learning' is not a valid key", ""),
        ("lr = 1", "batch_row = 2", "'batch_row' is not a valid key", "did you mean batch_rows"),
        ("path =", "paths =", "'paths' is not a valid key", "did you mean path"),
        ("lr = 1", 'lr = "1e-3"', "lr is '1e-3'", "a number"),
        ("steps = 3", "steps = 3.5", "steps is 3.5", "whole number"),
        ("steps = 3", "steps = true", "steps is True", "whole number"),
        ("steps = 3", "steps = -3", "steps is -3", "negative"),
        ("lr = 1", "lr = -1", "lr is -1", "negative"),
        ("lr = 1", "checkpointing = 1", "checkpointing is 1", "true or false"),
        ("[0.9, 0.99]", "[0.9]", "betas must have 2 entries", ""),
        ("[0.9, 0.99]", "0.9", "betas must be a list", ""),
        ("lr = 1", "packing = 'tight'", "packing is 'tight'", "'stream', 'documents'"),
        ('kind = "train"', 'kind = "tain"', "kind is 'tain'", "'sample', 'align'"),
        ('name = "one"', "", "'name' is missing", ""),
        ("steps = 3", "", "neither steps nor tokens", ""),
        ('name = "one"', 'name = "../one"', "names consist of letters", ""),
        ("lr = 1", "micro_rows = 5", "not a multiple of micro_rows 5", ""),
        ('[[stage.data]]\npath = "a.jsonl"', "", "'data' is missing", ""),
        ('[[stage.data]]\npath = "a.jsonl"', "data = []", "has no data", ""),
        ("[[stage]]", "sed = 4\n[[stage]]", "'sed' is not a valid key", "did you mean seed"),
        (
            "[[stage]]",
            "[sparse]\nblok_size = 4\n[[stage]]",
            "'blok_size' is not a valid key",
            "did you mean block_size",
        ),
        (STAGE, "seed = 1", r"has no \[\[stage\]\]", ""),
        (STAGE, "seed = ", "not valid TOML", ""),
        (STAGE, STAGE * 2, "must be unique", ""),
    ],
)
def test_refused(tmp_path: Path, old: str, new: str, said: str, remedy: str) -> None:
    assert old in STAGE
    with pytest.raises(ConfigError, match=said) as caught:
        read(tmp_path, STAGE.replace(old, new, 1))
    assert remedy in (caught.value.remedy or "")


def test_windows_of_the_teacher_fill_a_row(tmp_path: Path) -> None:
    text = STAGE.replace('"train"', '"distil"').replace("lr = 1", "seq_len = 512\nteacher_window = {}")
    read(tmp_path, text.format(256))
    read(tmp_path, text.format(1000))  # longer than a row: no windows at all
    with pytest.raises(ConfigError, match="teacher_window"):
        read(tmp_path, text.format(300))


def test_what_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    distil = STAGE.replace('"train"', '"distil"').replace("lr = 1", "seq_len = 512\nteacher_window = 256\nlr = 1")
    with pytest.raises(ConfigError, match="needs packing = 'stream'"):
        read(tmp_path, distil.replace("lr = 1", 'packing = "documents"\nlr = 1'))
    with pytest.raises(ConfigError, match="cannot start or end at 0"):
        read(tmp_path, STAGE.replace("lr = 1", 'schedule = "exponential"\nfinal_lr = 0\nlr = 1'))


def test_truth_is_a_share(tmp_path: Path) -> None:
    stage = read(tmp_path, STAGE.replace("[[stage.data]]", "[[stage.data]]\ntruth = 0.25", 1)).stages
    assert any(source.truth == 0.25 for one in stage if hasattr(one, "data") for source in one.data)
    with pytest.raises(ConfigError, match="truth is a share"):
        read(tmp_path, STAGE.replace("[[stage.data]]", "[[stage.data]]\ntruth = 1.5", 1))


def test_a_geometry_of_its_own(tmp_path: Path) -> None:
    geometry = "[stage.sparse]\ntopk = 3\ndense_len = 0\n[[stage.data]]"
    text = STAGE.replace("[[stage.data]]", geometry).replace("lr = 1", "lr = 1\nis_sparse = true")
    stage = read(tmp_path, text).stages[0]
    assert isinstance(stage, TrainStage)
    assert stage.sparse is not None
    assert (stage.sparse.topk, stage.sparse.dense_len, stage.sparse.block_size) == (3, 0, 64)
    with pytest.raises(ConfigError, match="sparse needs is_sparse"):
        read(tmp_path, text.replace("is_sparse = true", ""))


def test_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_recipe(tmp_path / "none.toml")


def rates(kind: str, **options: int) -> list[float]:
    schedule = Schedule(kind, 1.0, 0.01, 11, **options)
    return [schedule.at(step) for step in range(11)]


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd", "exponential"])
def test_the_warm_up_rises_to_the_peak(kind: str) -> None:
    assert rates(kind, warmup_steps=3)[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_ways_to_the_end() -> None:
    assert rates("constant") == [1.0] * 11
    assert rates("cosine") == pytest.approx([0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * i / 10)) for i in range(11)])
    assert rates("exponential") == pytest.approx([0.01 ** (i / 10) for i in range(11)])
    assert rates("wsd", decay_steps=3) == pytest.approx([1.0] * 8 + [0.67, 0.34, 0.01])
    assert rates("wsd") == [1.0] * 11
    assert rates("cosine", warmup_steps=4)[-1] == pytest.approx(0.01)
    assert rates("cosine", warmup_steps=4)[7] == pytest.approx(0.505)
