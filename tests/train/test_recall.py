"""Recall before and after fine-tuning, long rows against forgetting, and queries and keys brought back."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from sala.checkpoint.lora import read_adapter
from sala.checkpoint.random import write_random
from sala.config import ALWAYS_DENSE, SalaConfig
from sala.errors import InputError
from sala.lab.finetune.options import FinetuneOptions, read_lengths, read_share
from sala.lab.finetune.recall import RecallCallback, _count_tokens
from sala.lab.finetune.replay import long_rows, row_length
from sala.lab.finetune.run import finetune
from sala.lab.finetune.target import find_modules, load_base, load_target
from sala.lab.finetune.training import FinetuneCallbacks
from sala.lab.train.models import load_for_training, save_model
from sala.lab.train.parts import parts_of
from sala.lab.train.pipeline import run_recipe
from sala.lab.train.recall import (
    SHORTEST,
    Recall,
    affordable,
    describe,
    has_fallen,
    measure_recall,
    recall_cases,
    sparse_length,
)
from sala.lab.train.recipe import load_recipe
from sala.lab.train.recipe_run import RecipeRun
from sala.lab.train.restore import bring_back, turn, turned_change
from sala.text.tokenizer import Tokenizer
from tests.train.test_finetune import CONFIG, options_of, weights
from tests.train.test_finetune import room as room


@pytest.fixture(scope="module")
def tokenizer(room: Path) -> Tokenizer:
    return Tokenizer.load(room / "model")


def oracle(vocab_size: int, wrong: Callable[[int], bool] = lambda place: False) -> Any:
    """Logits of a model that knows every token, except after the places that are `wrong`."""

    def logits(tokens: Tensor, places: Tensor) -> Tensor:
        right = tokens[places + 1]
        answers = torch.where(torch.tensor([wrong(int(at)) for at in places]), (right + 1) % vocab_size, right)
        return 20.0 * torch.nn.functional.one_hot(answers, vocab_size).float()

    return logits


def test_what_is_found(tokenizer: Tokenizer) -> None:
    cases = recall_cases(tokenizer, 257, [2048, 4096], {2048: 2, 4096: 1})
    assert [case.length for case in cases] == [2048, 2048, 4096]
    for case in cases:
        assert case.length - 128 < len(case.tokens) <= case.length
        text = tokenizer.decode(case.tokens.tolist())
        for value in case.values:
            said = tokenizer.decode(case.tokens[list(value)].tolist()).strip()
            assert said
            assert not said.endswith(".")
            assert text.count(said) >= 2  # in the text, and in the answer
    size = CONFIG.vocab_size
    all_found = measure_recall(oracle(size), cases)
    assert [one.found for one in all_found] == [one.asked for one in all_found]
    assert all(one.loss < 1e-4 for one in all_found)
    blind = measure_recall(lambda tokens, places: torch.zeros(len(places), size), cases)
    assert [one.found for one in blind] == [0, 0]
    lost = cases[2].values[0]
    one_lost = measure_recall(oracle(size, lambda place: place + 1 == lost[-1]), cases[2:])
    assert one_lost[0].found == one_lost[0].asked - 1


def test_how_much_is_measured() -> None:
    assert affordable(1e9, 1 << 17, 0.1) == {2048: 8, 8192: 8, 32768: 8, 131072: 8}
    assert affordable(1e9, 1 << 17, 0.1, most=1) == {2048: 1, 8192: 1, 32768: 1, 131072: 1}
    assert affordable(3e5, 32768, 0.1) == {2048: 2, 8192: 2}
    assert affordable(10, 32768, 0.1) == {2048: 1}
    sparse = partial(affordable, longest=32768, share=0.1, first=8192)  # as in smol-sala
    assert sparse(10) == sparse(29_429) == sparse(1e5) == {8192: 1}
    assert sparse(102_400) == {2048: 1, 8192: 1}
    assert sparse(430_080) == {2048: 1, 8192: 1, 32768: 1}
    assert sparse(1e9) == {2048: 8, 8192: 8, 32768: 8}


def test_a_text_in_which_attention_is_sparse() -> None:
    def length(dense_len: int, trained: int | None = 1 << 15) -> int:
        geometry = replace(CONFIG.sparse_config, dense_len=dense_len)
        return sparse_length(replace(CONFIG, sparse_config=geometry, trained_length=trained))

    assert length(4096) == 8192
    assert length(24) == SHORTEST
    assert length(1 << 14) == length(20_000) == 1 << 15  # no longer than the model knows
    assert length(1 << 15) == length(ALWAYS_DENSE) == SHORTEST  # dense in all that it knows


def test_short_runs_measure_where_attention_is_sparse(room: Path, tmp_path: Path) -> None:
    geometry = replace(CONFIG.sparse_config, dense_len=1500)
    write_random(tmp_path / "model", replace(CONFIG, sparse_config=geometry))
    finetune(options_of(room, tmp_path / "out", model=str(tmp_path / "model"), recall=True, steps=1))
    table = json.loads((tmp_path / "out" / "losses.json").read_text())
    assert [one["length"] for one in table["recall"]["before"]] == [3000]


def test_how_lengths_and_shares_are_written() -> None:
    assert read_lengths("8K,2k") == (2000, 8192)
    for wrong in ("long", "64", ""):
        with pytest.raises(InputError, match="recall_lengths"):
            read_lengths(wrong)
    assert read_share("10%") == read_share(0.1) == 0.1


def test_a_loss_is_told() -> None:
    before = [Recall(2048, 8, 8, 0.1), Recall(8192, 10, 16, 0.2), Recall(32768, 0, 8, 9.0)]
    after = [Recall(2048, 8, 8, 0.1), Recall(8192, 8, 16, 0.9), Recall(32768, 0, 8, 9.0)]
    assert has_fallen(before, after) == [8192]
    assert has_fallen(before, [Recall(8192, 9, 16, 0.9)]) == []
    assert has_fallen([Recall(8192, 8, 8, 0.1)], [Recall(8192, 7, 8, 0.15)]) == []  # by chance
    assert has_fallen([Recall(8192, 8, 8, 0.1)], [Recall(8192, 7, 8, 0.3)]) == [8192]
    assert has_fallen([Recall(8192, 8, 8, 0.1)], [Recall(8192, 5, 8, 0.1)]) == [8192]
    assert describe(before[:2], after) == "8 → 8 of 8 at 2K, 10 → 8 of 16 at 8K"


def test_a_run_measures_and_keeps_long_rows(room: Path, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "book.txt").write_text("The ferry left the harbour before the rain came. " * 400)
    changes = {"keep_long": 0.5, "keep_long_length": 1024, "long_texts": tmp_path / "own", "recall": True}
    options = options_of(room, tmp_path / "out", **changes, recall_lengths="2K", recall_texts=1, steps=2)
    finetune(options, FinetuneCallbacks(said.append))
    table = json.loads((tmp_path / "out" / "losses.json").read_text())
    assert table["long_rows"] == 1
    assert [one["length"] for one in table["recall"]["before"]] == [2048]
    assert {one["asked"] for side in ("before", "after") for one in table["recall"][side]} != {0}
    assert table["recall"]["before"][0]["loss"] != table["recall"]["after"][0]["loss"]
    assert any("1 long rows of" in line for line in said)
    assert any(line.startswith("facts found in long texts before:") for line in said)
    assert any(line.startswith("facts found in long texts, before → after:") for line in said)


def test_long_rows(room: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("The ferry left the harbour before the rain came. " * 400)
    options = options_of(room, tmp_path / "out", keep_long=0.1, long_texts=tmp_path / "book.txt")
    rows = long_rows(options, room / "model", 257, 40_000, 1024)
    assert len(rows) == 4
    assert all(len(row) <= 1024 for row in rows)
    assert [row.loss_mask.mean() > 0.9 for row in rows] == [False, True, False, True]  # facts and own texts in turn
    learnt = tokenizer.decode(rows[0].tokens[rows[0].loss_mask].tolist())
    text = tokenizer.decode(rows[0].tokens.tolist())
    assert "ferry" in text
    assert learnt
    assert all(value in text for value in learnt.split())


def test_how_long_rows_are(room: Path, tmp_path: Path) -> None:
    options = options_of(room, tmp_path / "out", keep_long=0.1, max_length=4096)
    config = replace(CONFIG, sparse_config=replace(CONFIG.sparse_config, dense_len=8192), trained_length=1 << 18)
    assert row_length(options, config, 10_000_000, lambda length: True) == 16384
    assert row_length(options, config, 10_000_000, lambda length: length <= 8192) == 8192
    assert row_length(options, config, 10_000_000, lambda length: False) == 4096  # as long as other rows
    assert row_length(options, config, 20_000, lambda length: True) == 4096
    assert row_length(options, config, 100, lambda length: True) == 1024
    default = replace(options, keep_long=None)
    assert row_length(default, config, 10_000_000, lambda length: True) == 16384
    assert row_length(default, config, 20_000, lambda length: True) is None  # attention would be dense
    assert row_length(replace(default, long_texts=tmp_path), config, 20_000, lambda length: True) == 4096
    always = replace(config, sparse_config=replace(config.sparse_config, dense_len=1 << 20))
    assert row_length(default, always, 20_000, lambda length: True) == 4096
    assert row_length(replace(options, keep_long_length=777), config, 100, lambda length: False) == 777


def test_options_that_contradict_each_other(room: Path, tmp_path: Path) -> None:
    for changes, name in (
        ({"keep_long": 0.1, "objective": "dpo"}, "keep_long"),
        ({"keep_long": 0.0, "long_texts": tmp_path}, "long_texts"),
        ({"restore_by": "orthogonal"}, "restore_by"),
        ({"recall_lengths": "many"}, "recall_lengths"),
    ):
        with pytest.raises(InputError, match=name):
            options_of(room, tmp_path / "out", **changes)
    assert options_of(room, tmp_path / "out", objective="dpo", keep_long=None).long_share == 0
    assert options_of(room, tmp_path / "out", keep_long=None).long_share == 0.1


def test_heads_are_turned_back() -> None:
    generator = torch.Generator().manual_seed(3)
    before = torch.randn(12, 20, generator=generator)
    rotations = torch.linalg.qr(torch.randn(3, 4, 4, generator=generator))[0]
    trained = (rotations @ before.view(3, 4, 20)).view(12, 20)
    maps = turn(trained, before, 4)
    assert torch.allclose(maps, rotations.mT, atol=1e-5)
    assert torch.allclose(turn(before, before, 4), torch.eye(4).expand(3, 4, 4), atol=1e-5)
    noisy = trained + 0.3 * torch.randn(12, 20, generator=generator)
    best = (turn(noisy, before, 4) @ noisy.view(3, 4, 20)).view(12, 20)
    assert (best - before).norm() < 0.5 * (noisy - before).norm()
    for _ in range(20):  # no other orthogonal map comes closer
        other = torch.linalg.qr(torch.randn(3, 4, 4, generator=generator))[0]
        assert ((other @ noisy.view(3, 4, 20)).view(12, 20) - before).norm() >= (best - before).norm()


def test_an_adapter_of_higher_rank_holds_the_turned_change() -> None:
    generator = torch.Generator().manual_seed(4)
    before = torch.randn(32, 64, generator=generator)
    up, down = 0.02 * torch.randn(32, 2, generator=generator), torch.randn(2, 64, generator=generator)
    trained = before + 2 * up @ down
    wanted = (turn(trained, before, 16) @ trained.view(2, 16, 64)).view(32, 64)
    errors = []
    for most in (2, 4, 32):
        new_up, new_down = turned_change((up, down), before, 16, 2.0, most)
        assert new_up.shape[1] == new_down.shape[0] <= most
        errors.append(float((before + 2 * new_up @ new_down - wanted).norm() / (wanted - before).norm()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] <= 0.02


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_turns_queries_and_keys_back(room: Path, tmp_path: Path, method: str) -> None:
    results = {}
    for name, changes in {"as learnt": {}, "turned": {"restore_qk": True, "restore_by": "orthogonal"}}.items():
        finetune(options_of(room, tmp_path / name, method=method, steps=2, dropout=0.0, **changes))
        is_full = method == "full"
        results[name] = weights(tmp_path / name if is_full else room / "model", None if is_full else tmp_path / name)
    before = weights(room / "model")
    for name, weight in before.items():
        learnt, turned = results["as learnt"][name], results["turned"][name]
        if "q_proj" in name or "k_proj" in name:
            assert (turned - weight).norm() < (learnt - weight).norm()
            assert not torch.equal(turned, weight)
        else:
            assert torch.equal(turned, learnt)


def test_what_learns(room: Path, tmp_path: Path) -> None:
    options = options_of(room, tmp_path / "out", learns="lightning,mlps")
    modules = find_modules(options, CONFIG)
    assert modules
    assert {part for name in modules for part in parts_of(name, CONFIG)} == {"all", "mixers", "lightning", "mlps"}
    model = load_target(room / "model", options, torch.device("cpu"))
    adapted = {name.partition(".lora_A")[0] for name, one in model.named_parameters() if one.requires_grad}
    assert len({name for name in adapted if "lora_B" not in name}) == len(modules)
    finetune(replace(options, steps=2))
    changed = read_adapter(tmp_path / "out", CONFIG).changes
    assert sorted(changed) == modules
    full = replace(options, method="full", learns="norms")
    learning = [
        n for n, one in load_base(room / "model", full, torch.device("cpu")).named_parameters() if one.requires_grad
    ]
    assert learning
    assert all("norm" in name for name in learning)
    for wrong in ("q_proj", "", "norms"):
        with pytest.raises(InputError, match="learns"):
            find_modules(replace(options, learns=wrong) if wrong else _blank(options), CONFIG)


def _blank(options: FinetuneOptions) -> FinetuneOptions:
    return replace(options, learns=",")


def test_the_callback_of_any_trainer(room: Path, tmp_path: Path) -> None:
    """A plain Trainer on the model as transformers loads it, with a warning at the end of a run that ruins it."""
    from sala.plugins.transformers import load

    said: list[str] = []
    callback = RecallCallback([2048], 1, said.append)
    model = load(room / "model")
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(2)]
    arguments = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert callback.before[0].asked == callback.after[0].asked > 0
    assert [line.partition(":")[0] for line in said] == [
        "facts found in long texts before",
        "facts found in long texts, before → after",
    ]
    callback.before = [replace(callback.before[0], found=callback.before[0].asked)]
    callback.measure_after(arguments, model)
    assert said[-1].startswith(
        "WARNING: this run lost facts in long texts at 2K tokens: mix in long rows (--keep-long 20%)"
    )
    assert model.training


class PairTrainer(Trainer):
    """Preferences with TRL's hooks: sequences of a pair under its names, batches and a loss of its own, an adapter."""

    def __init__(self, model: Any, args: TrainingArguments, **more: Any) -> None:
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        super().__init__(adapted, args, data_collator=self.pair_up, **more)

    def pair_up(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        return {side: torch.tensor([row["prompt_ids"] + row[f"{side}_ids"] for row in rows]) for side in SIDES}

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        chosen, rejected = (model(input_ids=inputs[side], labels=inputs[side]).loss for side in SIDES)
        return torch.nn.functional.softplus(chosen - rejected)


SIDES = ("chosen", "rejected")
PAIR = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6, 7, 8]}


def test_the_callback_of_a_trainer_of_pairs(room: Path, tmp_path: Path) -> None:
    """The tokenizer comes from the trainer, as for a model that was loaded from a hub."""
    from sala.plugins.transformers import load

    said: list[str] = []
    callback, model = RecallCallback(note=said.append), load(room / "model")
    model.config._name_or_path = "org/model"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(room / "model")
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to="none", save_strategy="no",
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = PairTrainer(model, arguments, train_dataset=[PAIR] * 4, callbacks=[callback], processing_class=tokenizer)
    trainer.train()
    assert [one.length for one in callback.before] == [2048]
    assert callback.before[0].asked == callback.after[0].asked > 0
    assert len(said) == 2
    loader, state = SimpleNamespace(dataset=[PAIR] * 4), SimpleNamespace(max_steps=10)
    assert _count_tokens(loader, arguments, state) == 10 * 2 * 8
    loader.dataset = [{"input_ids": [1, 2, 3], "position_ids": [0, 1, 2]}]
    assert _count_tokens(loader, arguments, state) == 10 * 2 * 3


def test_the_callback_of_a_trainer_without_a_tokenizer_or_on_a_stream(room: Path, tmp_path: Path) -> None:
    from sala.plugins.transformers import load

    class Stream(IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return iter([{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8)

    arguments = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
    for name, told in ((str(room / "model"), "facts found in long texts before"), ("org/model", "is not measured")):
        said: list[str] = []
        model = load(room / "model")
        model.config._name_or_path = name
        trainer = Trainer(model, arguments, train_dataset=Stream(), callbacks=[RecallCallback(note=said.append)])
        trainer.train()
        assert told in said[0]


def test_a_stage_restores(tmp_path: Path) -> None:
    write_random(tmp_path / "model", CONFIG)
    (tmp_path / "recipe.toml").write_text(
        'dtype = "float32"\n[[stage]]\nname = "train"\nkind = "train"\nsteps = 1\nseq_len = 32\nbatch_rows = 2\n'
        'lr = 0.05\nwarmup_steps = 0\n[[stage.data]]\npath = "text.txt"\n'
        '[[stage]]\nname = "back"\nkind = "restore"\nhow = "plain"\nlayers = "attention"\n'
    )
    (tmp_path / "text.txt").write_text("The ferry left the harbour before the rain came. " * 40)
    recipe = load_recipe(tmp_path / "recipe.toml")
    run = RecipeRun(recipe, tmp_path, tmp_path / "work", None, torch.device("cpu"), lambda *_: None)
    final = run_recipe(run, tmp_path / "model")
    before, trained, after = (
        weights(path) for path in (tmp_path / "model", tmp_path / "work" / "01-train" / "model", final)
    )
    config = SalaConfig.load(final)
    for name in before:
        is_restored = ("q_proj" in name or "k_proj" in name) and "attention" in parts_of(name, config)
        assert torch.equal(after[name], before[name] if is_restored else trained[name]), name


def test_all_layers_or_those_with_attention(room: Path, tmp_path: Path) -> None:
    model = load_for_training(room / "model", torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    now = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in now.values():
            tensor.add_(1.0)
    bring_back(now, before.__getitem__, model.config, "plain", "all")
    restored = {name for name in now if torch.equal(now[name], before[name])}
    assert restored == {name for name in now if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))}
    save_model(model, tmp_path / "out", model.config, room / "model")
