"""LLM: what goes in, what comes out."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import sala
from sala.errors import ConfigError, ContextTooLong, InputError, NoTokenizer, SalaError
from sala.llm import LLM
from sala.protocol import Sampling
from tests.golden import DATA
from tests.integrity import integrity

GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, device="cpu", ctx=2048)


def test_generate_text(llm: LLM) -> None:
    out = llm.generate("hello", **GREEDY)
    assert out.text == llm.tokenizer.decode(out.token_ids)
    assert out.finish_reason == "length"
    assert out.usage.prompt_tokens == 6
    assert out.usage.completion_tokens == len(out.token_ids) == 12
    assert out.timings.prompt_n == 6 - out.usage.cached_tokens
    assert out.timings.predicted_per_second > 0


def test_generate_from_ids_and_lists(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    one = llm.generate("hello", **GREEDY)
    many = llm.generate(["hello", ids, "other"], Sampling(**GREEDY))
    assert [out.token_ids for out in many[:2]] == [one.token_ids] * 2
    assert llm.generate(np.array(ids), **GREEDY).token_ids == one.token_ids


def test_stream_is_generate_in_pieces(llm: LLM) -> None:
    events = list(llm.stream("hello", temperature=1.5, seed=4, max_tokens=30))
    whole = llm.generate("hello", temperature=1.5, seed=4, max_tokens=30)
    assert "".join(event.text for event in events) == whole.text
    assert [token for event in events for token in event.token_ids] == whole.token_ids
    assert events[-1].completion is not None
    assert events[-1].completion.text == whole.text


def test_seeds(llm: LLM) -> None:
    def draw(seed: int | None) -> list[int]:
        return llm.generate("hello", temperature=1.0, seed=seed, max_tokens=20).token_ids

    assert draw(1) == draw(1) != draw(2)
    assert draw(None) != draw(None)


def test_stop_strings(llm: LLM) -> None:
    whole = llm.generate("hello", temperature=0, max_tokens=30).text
    stop = whole[5:8]
    out = llm.generate("hello", temperature=0, max_tokens=30, stop=(stop,))
    assert out.text == whole[: whole.find(stop)]
    assert out.finish_reason == "stop"
    assert "token_ids" not in out.as_message()


def test_stop_tokens_end_the_answer(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "m")
    first = LLM(tiny, device="cpu").generate("hello", temperature=0, max_tokens=5).token_ids
    (tmp_path / "m" / "generation_config.json").write_text(f'{{"eos_token_id": [{first[2]}]}}')
    llm = LLM(tmp_path / "m", device="cpu")
    out = llm.generate("hello", temperature=0, max_tokens=50)
    assert out.token_ids == first[: first.index(first[2]) + 1]
    assert out.finish_reason == "stop"
    assert out.text == llm.tokenizer.decode(out.token_ids[:-1])
    assert len(llm.generate("hello", temperature=0, max_tokens=5, ignore_eos=True).token_ids) == 5


def test_chat_continues_on_the_live_cache(llm: LLM) -> None:
    llm.reset()
    messages = [{"role": "user", "content": "first question"}]
    first = llm.chat(messages, **GREEDY)
    assert first.usage.cached_tokens == 0
    messages += [first.as_message(), {"role": "user", "content": "second"}]
    second = llm.chat(messages, **GREEDY)
    assert second.usage.cached_tokens == first.usage.prompt_tokens + len(first.token_ids) - 1
    llm.reset()
    assert llm.chat(messages, **GREEDY).token_ids == second.token_ids


def test_repeating_a_prompt_computes_one_token(llm: LLM) -> None:
    llm.generate("the very same prompt", **GREEDY)
    again = llm.generate("the very same prompt", **GREEDY)
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1


def test_an_abandoned_stream_leaves_a_good_cache(llm: LLM) -> None:
    llm.reset()
    want = llm.generate("hello there", **GREEDY).token_ids
    llm.reset()
    stream = llm.stream("hello there", **GREEDY)
    for _ in range(4):
        next(stream)
    stream.close()
    assert llm.generate("hello there", **GREEDY).token_ids == want


def test_progress(tiny: Path) -> None:
    llm = LLM(tiny, device="cpu", prefill_chunk=100, ctx=2048)
    seen: list[tuple[int, int]] = []
    llm.generate("x" * 450, on_progress=lambda *at: seen.append(at), **GREEDY)
    assert seen == [(0, 451), (100, 451), (200, 451), (300, 451), (400, 451), (450, 451), (451, 451)]


def test_cancelling_a_prefill_keeps_what_was_read(tiny: Path) -> None:
    llm = LLM(tiny, device="cpu", prefill_chunk=100, ctx=2048)

    def stop(done: int, total: int) -> None:
        if done >= 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate("x" * 450, on_progress=stop, **GREEDY)
    out = llm.generate("x" * 450, **GREEDY)
    assert out.usage.cached_tokens in (300, 400, 450)  # the engine may be a step ahead of the callback
    llm.reset()
    assert llm.generate("x" * 450, **GREEDY).token_ids == out.token_ids


def test_a_failure_in_the_model_ends_that_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.reset()
    want = llm.generate("hello there", **GREEDY).token_ids

    def explode(plan: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(llm._executor, "run", explode)
        with pytest.raises(MemoryError):
            llm.generate("hello there and more", **GREEDY)
    assert integrity(llm.engine) == []
    assert llm.generate("hello there", **GREEDY).token_ids == want


def test_the_context_has_an_end(tiny: Path) -> None:
    llm = LLM(tiny, device="cpu", ctx=100)
    assert llm.ctx == 100
    for length, count in ((99, 2), (100, 1)):
        out = llm.generate([65] * length, temperature=0, max_tokens=50, ignore_eos=True)
        assert (len(out.token_ids), out.finish_reason) == (count, "length")
    with pytest.raises(ContextTooLong, match=r"101 tokens .* 100"):
        llm.generate([65] * 101)


def test_an_impossible_context(tiny: Path) -> None:
    with pytest.raises(InputError, match="GiB"):
        LLM(tiny, device="cpu", ctx=10**12)


@pytest.mark.parametrize("prompt", [[], "", [-1], [260], [10**12], [1.5], ["a", 1], [True]])
def test_bad_prompts(tiny: Path, prompt: object) -> None:
    llm = LLM(tiny, device="cpu", ctx=128)
    llm.tokenizer._adds_bos = False
    with pytest.raises(InputError, match="prompt"):
        llm.generate(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [[], "hi", [{}], [{"role": 3}], ["x"], [{"role": "user", "content": 5}]])
def test_bad_messages(llm: LLM, messages: object) -> None:
    with pytest.raises(InputError, match="messages"):
        llm.chat(messages)  # type: ignore[arg-type]


def test_bad_bias(llm: LLM) -> None:
    with pytest.raises(InputError, match="logit_bias"):
        llm.generate("x", logit_bias={260: 1.0})


def test_without_tokenizer_files() -> None:
    llm = LLM(DATA / "block16", device="cpu", ctx=256)
    out = llm.generate([1, 2, 3], temperature=0, max_tokens=4, ignore_eos=True)
    assert len(out.token_ids) == 4
    assert out.text == ""
    for call in (
        lambda: llm.generate("text"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.perplexity("x"),
    ):
        with pytest.raises(NoTokenizer):
            call()


def test_perplexity_is_that_of_the_logits(llm: LLM) -> None:
    ids = llm.tokenizer.encode("some text to be scored, long enough for two chunks")
    logits = llm.logits(ids).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = np.exp(-logprobs[np.arange(len(ids) - 1), ids[1:]].mean())
    assert llm.perplexity(ids, chunk=7) == pytest.approx(want, rel=1e-5)
    with pytest.raises(InputError):
        llm.perplexity([1])


def test_logprobs(llm: LLM) -> None:
    out = llm.generate("hello", temperature=0, max_tokens=3, logprobs=2)
    assert out.logprobs is not None
    assert [sampled.token for sampled in out.logprobs] == out.token_ids
    assert all(sampled.top_logprobs[0][0] == sampled.token for sampled in out.logprobs)


@pytest.mark.parametrize("options", [{"device": "tpu9"}, {"dtype": "int3"}, {"backend": "jax"}])
def test_bad_options(tiny: Path, options: dict[str, str]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        LLM(tiny, **options)  # type: ignore[arg-type]


def test_a_tokenizer_of_another_model(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(DATA / "block16", tmp_path / "m")
    shutil.copy(tiny / "tokenizer.json", tmp_path / "m")
    with pytest.raises(ConfigError, match="do not belong together"):
        LLM(tmp_path / "m")


def test_weights_that_are_not_quantized_as_they_say(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "m")
    text = (tmp_path / "m" / "config.json").read_text()
    (tmp_path / "m" / "config.json").write_text(text.replace("{", '{"quantization": {"bits": 8, "group_size": 64},', 1))
    with pytest.raises(SalaError, match="8 bits"):
        LLM(tmp_path / "m")


def test_the_small_functions(tiny: Path) -> None:
    config = sala.get_model_args(tiny)
    tokenizer = sala.load_tokenizer(tiny)
    model = sala.load_model(tiny, device="cpu")
    caches = sala.create_layer_caches(model, max_tokens=256)
    ids = tokenizer.encode("hello")
    logits = sala.forward(model, ids, caches)
    assert logits.shape == (len(ids), config.vocab_size)
    tokens = []
    for _ in range(12):
        token = sala.sample(logits[-1], temperature=0)
        tokens.append(token)
        logits = sala.forward(model, [token], caches)
    assert tokens == LLM(tiny, device="cpu").generate("hello", **GREEDY, ignore_eos=True).token_ids
    assert 0 <= sala.sample(logits[-1], temperature=1.0) < config.vocab_size
    assert sala.is_stop_token(257, config)
    assert not sala.is_stop_token(65, config)
    prompt = sala.format_chat_prompt("Be brief.", "Hi")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt == tokenizer.render_chat(messages)
    with pytest.raises(ContextTooLong):
        sala.forward(model, [65] * 256, caches)


def test_stop_strings_among_others(llm: LLM) -> None:
    """Each request stops at its own stop string, with the right reason and no token too many."""
    whole = llm.generate("abc def", temperature=0, max_tokens=40).text
    stop = whole[6:9]
    alone = llm.generate("abc def", temperature=0, max_tokens=40, stop=(stop,))
    among = llm.generate(["hello world", "abc def"], temperature=0, max_tokens=40, stop=(stop,))[1]
    assert (among.text, among.token_ids, among.finish_reason) == (alone.text, alone.token_ids, "stop")
    at_the_end = llm.generate("abc def", temperature=0, max_tokens=len(alone.token_ids), stop=(stop,))
    assert at_the_end.finish_reason == "stop"


def test_interleaved_streams_do_not_mix(llm: LLM) -> None:
    alone = [llm.generate(text, **GREEDY).token_ids for text in ("aaaa", "bbbb")]
    llm.reset()
    streams = [llm.stream(text, **GREEDY) for text in ("aaaa", "bbbb")]
    together: list[list[int]] = [[], []]
    for pair in zip(*streams, strict=True):
        for tokens, event in zip(together, pair, strict=True):
            tokens += event.token_ids
    assert together == alone


def test_a_callback_that_raises_stops_its_own_request(llm: LLM) -> None:
    def explode(done: int, total: int) -> None:
        raise ValueError("from A")

    other = llm.stream("bbbb", **GREEDY)
    next(other)
    with pytest.raises(ValueError, match="from A"):
        llm.generate(["x" * 40, "y" * 40], on_progress=explode, **GREEDY)
    assert sum(len(event.token_ids) for event in other) == GREEDY["max_tokens"] - 1
    assert llm.engine.is_idle
    assert llm.service.num_requests == 0


def test_timings_of_every_answer_are_its_own(llm: LLM) -> None:
    llm.reset()
    first, second = llm.generate(["one two three", "four five six"], temperature=0, max_tokens=30, ignore_eos=True)
    assert second.timings.predicted_s > first.timings.predicted_s / 4
