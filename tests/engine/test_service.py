"""The engine service from synchronous and asynchronous code: one thread, streams, cancellation, exit."""

import asyncio
import gc
import multiprocessing
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sala.engine.requests import Call, Submission
from sala.engine.service import EngineService
from sala.engine.stream import Event, Inbox, PromptProgress
from sala.errors import CacheTooSmall, EngineClosed, EngineDead, InputError
from sala.llm import LLM, AsyncLLM
from sala.protocol import Sampling
from tests.integrity import integrity

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, device="cpu", ctx=2048, max_batch=4)


def submission(llm: LLM, prompt: str = "hello", **settings: Any) -> Submission:
    return llm.inputs.submit(Call(None, Sampling(**{**GREEDY, **settings}), prompt))


def engine_threads() -> int:
    return sum(thread.name == "sala-engine" for thread in threading.enumerate())


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_one_request_read_both_ways(llm: LLM) -> None:
    with llm.service.submit(submission(llm)) as stream:
        events = [item for item in stream if isinstance(item, Event)]

    async def read() -> list[Event]:
        async with await llm.service.open(lambda: submission(llm)) as stream:
            return [item async for item in stream if isinstance(item, Event)]

    again = asyncio.run(read())
    assert [event.token_ids for event in events] == [event.token_ids for event in again]
    assert events[-1].completion is not None
    assert again[-1].completion is not None
    assert events[-1].completion.text == again[-1].completion.text == "".join(event.text for event in events)
    assert llm.service.num_requests == 0


def test_the_thread_starts_with_the_first_request_and_ends_with_the_model(tiny: Path) -> None:
    before = engine_threads()
    model = LLM(tiny, device="cpu", ctx=256)
    assert engine_threads() == before
    model.generate("hello", **GREEDY)
    assert engine_threads() == before + 1
    engine = weakref.ref(model.engine)
    del model
    gc.collect()
    wait_for(lambda: engine_threads() == before)
    assert engine() is None


def test_progress_comes_before_the_first_token(llm: LLM) -> None:
    llm.reset()
    work = submission(llm, "a prompt of some length")
    work.wants_progress = True
    with llm.service.submit(work) as stream:
        items = list(stream)
    told = [item for item in items if isinstance(item, PromptProgress)]
    assert [one.done for one in told] == sorted({one.done for one in told})
    assert told[-1].done == told[-1].total
    first = next(at for at, item in enumerate(items) if isinstance(item, Event) and item.sampled)
    assert all(isinstance(item, PromptProgress) for item in items[:first])


def test_only_completions(llm: LLM) -> None:
    work = submission(llm)
    work.is_streamed = False
    with llm.service.submit(work) as stream:
        items = list(stream)
    assert len(items) == 1
    assert isinstance(items[0], Event)
    assert items[0].completion is not None
    assert len(items[0].completion.token_ids) == 12


def test_closing_a_stream_waits_until_the_engine_has_dropped_it(llm: LLM) -> None:
    stream = llm.service.submit(submission(llm, max_tokens=1500))
    assert stream.read() is not None
    stream.close(wait=True)
    assert llm.engine.is_idle
    assert integrity(llm.engine) == []
    with pytest.raises(TimeoutError), llm.service.submit(submission(llm, "another one", max_tokens=1500)) as slow:
        while True:
            slow.read(0)


def test_a_generator_that_is_dropped_cancels_its_request(llm: LLM) -> None:
    events = llm.stream("hello", **{**GREEDY, "max_tokens": 1500})
    next(events)
    del events
    assert llm.engine.is_idle


def test_threads_share_the_engine(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(8)]
    want = [llm.generate(prompt, **GREEDY).token_ids for prompt in prompts]
    found: dict[str, list[int]] = {}

    def answer(prompt: str) -> None:
        found[prompt] = llm.generate(prompt, **GREEDY).token_ids

    threads = [threading.Thread(target=answer, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[prompt] for prompt in prompts] == want


def test_all_work_on_the_device_is_on_the_engine_thread(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLM(tiny, device="cpu", ctx=256)
    seen: set[str] = set()
    for name in ("run", "logits", "copy_states", "copy_page", "clear_state"):
        real = getattr(model._executor, name)

        def spy(*arguments: Any, real: Any = real) -> Any:
            seen.add(threading.current_thread().name)
            return real(*arguments)

        monkeypatch.setattr(model._executor, name, spy)
    model.generate(["hello", "help"], n=2, **GREEDY)
    model.score("a text")
    model.chat([{"role": "user", "content": "hi"}], **GREEDY)
    model.reset()
    assert seen == {"sala-engine"}


def test_a_request_that_cannot_be_admitted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.hybrid, "admit", lambda _: False)
        with pytest.raises(CacheTooSmall, match="cache_memory"):
            llm.generate("hello there", **GREEDY)
        with pytest.raises(InputError, match="does not fit"):
            llm.score("hello there")
    assert llm.generate("hello there", **GREEDY).token_ids


def test_text_that_cannot_be_made_fails_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = submission(llm), submission(llm, "other")
    monkeypatch.setattr(bad.groups[0][0]._answer, "push", lambda _: 1 // 0)
    with llm.service.submit(bad) as one, llm.service.submit(good) as other:
        with pytest.raises(ZeroDivisionError):
            list(one)
        assert list(other)
    assert llm.engine.is_idle


def test_run_all_takes_only_what_there_is_room_for(llm: LLM) -> None:
    taken: list[int] = []

    def source() -> Any:
        for number in range(9):
            taken.append(number)
            yield number, ValueError("bad") if number == 4 else submission(llm, f"prompt {number}")

    results = {}
    for key, index, result in llm.service.run_all(source(), 3):
        assert index == 0
        results[key] = result
        assert len(taken) <= len(results) + 3
    assert len(results) == 9
    assert isinstance(results.pop(4), ValueError)
    assert all(not isinstance(result, Exception) for result in results.values())
    assert llm.service.num_requests == 0


def test_leaving_run_all_early_cancels_the_rest(llm: LLM) -> None:
    source = ((number, submission(llm, f"prompt {number}", max_tokens=500)) for number in range(3))
    results = llm.service.run_all(source, 3)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert llm.engine.is_idle
    assert llm.service.num_requests == 0


def test_execute(llm: LLM) -> None:
    assert llm.service.execute(lambda: threading.current_thread().name).result() == "sala-engine"
    with pytest.raises(ZeroDivisionError):
        llm.service.execute(lambda: 1 // 0).result()
    assert llm.generate("hello", **GREEDY).token_ids


def test_a_closed_model(tiny: Path) -> None:
    model = LLM(tiny, device="cpu", ctx=256)
    events = model.stream("hello", **{**GREEDY, "max_tokens": 200})
    next(events)
    model.close()
    model.close()
    with pytest.raises(EngineClosed):
        list(events)
    for call in (lambda: model.generate("hello"), lambda: model.reset(), lambda: model.score("hello")):
        with pytest.raises(EngineClosed):
            call()
    assert not model.service.is_alive


def test_a_dead_engine(tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = LLM(tiny, device="cpu", ctx=256)

    def lost(*_: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(model._executor, "run", lost)
    monkeypatch.setattr(model._executor, "probe", lost)
    with pytest.raises(EngineDead) as caught:
        model.generate("hello", **GREEDY)
    assert "lost" in str(caught.value.__cause__)
    with pytest.raises(EngineDead):
        model.generate("hello", **GREEDY)
    assert "the engine has stopped" in caplog.text


def test_pickle_and_fork(tiny: Path) -> None:
    model = LLM(tiny, device="cpu", ctx=256)
    with pytest.raises(TypeError, match="load it in the process that uses it"):
        pickle.dumps(model)
    model.generate("hello", **GREEDY)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child() -> None:
        try:
            model.generate("hello", **GREEDY)
        except EngineDead as error:
            queue.put(str(error))

    process = context.Process(target=child)
    process.start()
    assert "after a fork, in the child process" in queue.get(timeout=20)
    process.join(20)
    assert model.generate("hello", **GREEDY).token_ids


def run_script(tiny: Path, body: str) -> subprocess.Popen[str]:
    imports = "import sys, time\nfrom sala import LLM\nfrom tests.integrity import integrity\n"
    script = f"{imports}llm = LLM({str(tiny)!r}, device='cpu', ctx=2048)\n"
    command = [sys.executable, "-c", script + textwrap.dedent(body)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_exit_without_close(tiny: Path) -> None:
    """An interpreter that exits in the middle of an answer exits cleanly."""
    process = run_script(
        tiny,
        """
        events = llm.stream("hello", temperature=0, max_tokens=1900, ignore_eos=True)
        next(events)
        keep = llm.service.submit(llm.inputs.submit(__import__("sala.engine.requests", fromlist=["Call"]).Call(
            None, __import__("sala").Sampling(max_tokens=1900, ignore_eos=True), "again")))
        print("bye")
        """,
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "bye\n", "")


def test_ctrl_c_in_a_stream(tiny: Path) -> None:
    """Ctrl-C reaches the reader at once, cancels the request, and the model goes on."""
    process = run_script(
        tiny,
        """
        try:
            for number, event in enumerate(llm.stream("hello", temperature=0, max_tokens=1900, ignore_eos=True)):
                if number == 0:
                    print("begun", flush=True)
                time.sleep(0.005)
            print("not interrupted")
        except KeyboardInterrupt:
            print(llm.engine.is_idle, llm.service.num_requests, integrity(llm.engine))
        print(len(llm.generate("again", temperature=0, max_tokens=3, ignore_eos=True).token_ids))
        """,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "True 0 []\n3\n", "")


def test_inbox_wakes_its_reader() -> None:
    inbox: Inbox[int] = Inbox()
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.extend(inbox.get() for _ in range(1000)))
    reader.start()
    for number in range(1000):
        inbox.put(number)
    reader.join(20)
    assert found == list(range(1000))


# AsyncLLM


def test_async_answers_are_those_of_llm(tiny: Path, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = llm.encode("a text to score")
    want = (
        llm.generate("hello", **GREEDY).text,
        [one.text for one in llm.generate(["a", "b"], **GREEDY)],
        [one.text for one in llm.generate("hello", n=2, temperature=1, seed=3, max_tokens=5)],
        llm.chat(messages, **GREEDY).text,
        [sampled.logprob for sampled in llm.score(ids)],
    )

    async def work() -> None:
        async with await AsyncLLM.load(tiny, device="cpu", ctx=2048, max_batch=4) as model:
            told: list[tuple[int, int]] = []
            one = await model.generate("hello", on_progress=lambda *at: told.append(at), **GREEDY)
            assert told[0] == (0, 6)
            assert told[-1] == (6, 6)
            two = await model.generate(["a", "b"], **GREEDY)
            some = await model.generate("hello", n=2, temperature=1, seed=3, max_tokens=5)
            chat = await model.chat(messages, **GREEDY)
            scores = await model.score(ids)
            found = (one.text, [a.text for a in two], [a.text for a in some], chat.text, [s.logprob for s in scores])
            assert found == want
            assert "".join([event.text async for event in model.stream("hello", **GREEDY)]) == one.text
            assert "".join([event.text async for event in model.stream_chat(messages, **GREEDY)]) == chat.text
            assert (await model.logits(ids)).shape == (len(ids), model.config.vocab_size)
            assert await model.perplexity(ids) == pytest.approx(llm.perplexity(ids))
            calls = [Call(number, Sampling(**GREEDY), f"prompt {number}") for number in range(6)]
            calls.append(Call("bad", Sampling(), [10**6]))
            answers = {key: answer async for key, answer in model.many(calls, max_waiting=2)}
            assert isinstance(answers.pop("bad"), InputError)
            assert {key: one.text for key, one in answers.items()} == {  # type: ignore[union-attr]
                key: one.text for key, one in llm.many(calls) if not isinstance(one, Exception)
            }
        assert not model.service.is_alive

    asyncio.run(work())


def test_async_requests_run_together_and_are_cancelled_with_their_tasks(tiny: Path) -> None:
    async def work() -> None:
        async with AsyncLLM(tiny, device="cpu", ctx=2048, max_batch=4) as model:
            tasks = [asyncio.create_task(model.generate(f"p {i}", **{**GREEDY, "max_tokens": 1500})) for i in range(3)]
            while model.service.status().running < 3:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert model.service.num_requests == 0
            events = model.stream("hello", **{**GREEDY, "max_tokens": 1500})
            await anext(events)
            await events.aclose()  # type: ignore[attr-defined]
            assert model.service.num_requests == 0
            with pytest.raises(ValueError, match="from the callback"):
                await model.generate("hello again", on_progress=_explode, **GREEDY)
            while not model.engine.is_idle:
                await asyncio.sleep(0.01)
            assert integrity(model.engine) == []

    asyncio.run(work())


def _explode(done: int, total: int) -> None:
    raise ValueError("from the callback")


def test_async_sessions(tiny: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with AsyncLLM(tiny, device="cpu", ctx=512) as model:
            store = model.open_store(tmp_path)
            assert await model.save_session(store, "note", "a text to keep") == 15
            await model.reset()
            ids = await model.load_session(store, "note")
            out = await model.generate([*ids, 5], **GREEDY)
            assert out.usage.cached_tokens == 15

    asyncio.run(work())


def test_a_service_without_text() -> None:
    """The service needs an engine and nothing else: no tokenizer, no model files."""
    from sala.engine.engine import Engine
    from sala.engine.scheduler import Request
    from sala.engine.stream import AnswerState
    from sala.protocol import Options
    from tests.engine.fake import FakeExecutor
    from tests.engine.test_engine import SPARSE

    service = EngineService(Engine(FakeExecutor(), SPARSE, Options()))
    steps: list[int] = []
    service.observe(on_step=lambda: steps.append(1))
    with service.submit(Submission([[AnswerState(Request([1, 2, 3], Sampling(max_tokens=4)))]])) as stream:
        items = list(stream)
    assert isinstance(items[-1], Event)
    assert items[-1].completion is not None
    assert len(items[-1].completion.token_ids) == 4
    assert len(steps) >= 4
    assert service.close()
