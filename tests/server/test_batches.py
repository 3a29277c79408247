"""Files and batches, through OpenAI's own client: what it gets, what stays on disk, and what a restart finds there."""

import io
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from sala.server import batches, runtime
from sala.server.batch import read_index
from sala.server.files import FileStore
from sala.server.http.errors import ApiError
from tests.server.conftest import Puppet, Server, start, wait_for

OVER = ("completed", "failed", "expired", "cancelled")
NAMES = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}


def connect(server: Server, key: str = "-") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, http_client=httpx2.Client(trust_env=False)
    )


def line(custom_id: str, text: str | None = None, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    said = custom_id if text is None else text
    prompt: Any = [{"role": "user", "content": said}] if url.endswith("chat/completions") else said
    limit = "max_output_tokens" if url.endswith("responses") else "max_tokens"
    body = {NAMES[url]: prompt, limit: 4, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    texts = (one if isinstance(one, str) else json.dumps(one) for one in lines)
    file = ("in.jsonl", io.BytesIO("".join(f"{text}\n" for text in texts).encode()))
    return client.files.create(file=file, purpose="batch").id


def begin(client: openai.OpenAI, lines: list[Any], url: Any = "/v1/completions", **more: Any) -> openai.types.Batch:
    file_id = upload(client, lines)
    return client.batches.create(input_file_id=file_id, endpoint=url, completion_window="24h", **more)


def wait_over(client: openai.OpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    wait_for(lambda: client.batches.retrieve(batch.id).status in OVER, 20)
    return client.batches.retrieve(batch.id)


def read(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    found = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one["response"]["body"] for one in found}


def test_a_batch(server: Server) -> None:
    """Good lines get what the route would answer, bad ones an error; neither waits for the other."""
    client = connect(server)
    url = "/v1/chat/completions"
    lines = [line(f"q{number}", url=url) for number in range(5)]
    bad = ["{", line("q0", url=url), line("hot", url=url, temperature=1000), line("who", url=url, model="nobody")]
    batch = begin(client, [*lines, *bad, line("other", url="/v1/completions"), ""], url, metadata={"job": "7"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"job": "7"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    done = wait_over(client, batch)
    assert (done.status, done.errors) == ("completed", None)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert dict(done.request_counts) == {"total": 10, "completed": 5, "failed": 5}
    answers, errors = read(client, done.output_file_id), read(client, done.error_file_id)
    for number in range(5):
        alone = server.post(url, lines[number]["body"]).json()
        assert answers[f"q{number}"]["choices"] == alone["choices"]
    codes = {name: body["error"]["code"] for name, body in errors.items()}
    assert codes == {
        "sala:line-6": "invalid_value", "sala:line-7": "invalid_value", "hot": "invalid_value",
        "who": "model_not_found", "other": "invalid_value",
    }  # fmt: skip
    assert client.batches.list(limit=1).data[0].id == batch.id
    outputs = [file.id for file in client.files.list(purpose="batch_output")]
    assert {done.output_file_id, done.error_file_id} <= set(outputs)


def test_responses(server: Server) -> None:
    client = connect(server)
    done = wait_over(client, begin(client, [line("one", url="/v1/responses")], "/v1/responses"))
    assert (done.request_counts.completed, done.error_file_id) == (1, None)
    assert read(client, done.output_file_id)["one"]["output"][0]["type"] == "message"


def test_files(server: Server) -> None:
    client = connect(server)
    names = [f"{number}.jsonl" for number in range(3)]
    files = [client.files.create(file=(name, b"{}\n"), purpose="batch") for name in names]
    store = server.app.state.batches.files
    for file in files:
        assert (file.bytes, file.status) == (3, "processed")
        assert file.expires_at == file.created_at + 30 * 24 * 3600
        path = store.directory / file.id
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"{}\n", 0o600)
        assert path.with_suffix(".json").stat().st_mode & 0o777 == 0o600
    assert store.directory.stat().st_mode & 0o777 == 0o700
    listed = [file.filename for file in client.files.list(limit=1, order="asc", purpose="batch")]  # page by page
    assert [name for name in listed if name in names] == names
    assert client.files.retrieve(files[0].id) == files[0]
    assert client.files.delete(files[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(files[0].id)
    assert not (store.directory / files[0].id).exists()
    short = client.files.create(
        file=("s", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert short.expires_at == short.created_at + 3600


@pytest.mark.parametrize(
    ("form", "files", "param"),
    [
        ({"purpose": "batch"}, {}, "file"),
        ({}, {"file": b"x"}, "purpose"),
        ({"purpose": "fine-tune"}, {"file": b"x"}, "purpose"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, {"file": b"x"}, "expires_after"),
    ],
)
def test_bad_uploads(server: Server, form: dict[str, str], files: dict[str, bytes], param: str) -> None:
    with server.client() as client:
        parts = {name: (None, value.encode()) for name, value in form.items()}
        parts |= {name: ("in.jsonl", value) for name, value in files.items()}
        answer = client.post("/v1/files", files=parts)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_hostile_uploads(server: Server) -> None:
    head = {"content-type": "multipart/form-data; boundary=b"}
    two = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\nx\r\n' * 2 + b"--b--\r\n"
    many = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nx\r\n' * 20 + b"--b--\r\n"
    with server.client() as client:
        for body in (two, many, b"nothing", b"--b\r\n\r\n"):
            assert client.post("/v1/files", content=body, headers=head).status_code == 400, body
        assert client.post("/v1/files", content=b"", headers={"content-type": "multipart/form-data"}).status_code == 400
        assert client.post("/v1/files", json={}).status_code == 415
        assert client.post("/v1/files", files={"file": ("../../x", b"{}"), "purpose": (None, "batch")}).is_success
    store = server.app.state.batches.files
    names = [path.name for path in store.directory.iterdir()]
    assert all(name.startswith(("file-", "batches", ".lock")) for name in names)


def test_servers_do_not_share_files(tmp_path: Path) -> None:
    one, two = (FileStore(tmp_path / "files", 10, 1000, 60) for _ in range(2))
    one.open()
    with pytest.raises(ApiError, match="another server uses the directory of files"):
        two.open()
    one.close()
    two.open()
    two.close()


def test_keys_do_not_see_each_other(make_server: Callable[..., Server]) -> None:
    server = make_server(api_key="one", admin_key="two")
    mine, other = connect(server, "one"), connect(server, "two")
    batch = wait_over(mine, begin(mine, [line("a")]))
    assert batch.status == "completed"
    assert not other.files.list().data
    assert not other.batches.list().data
    for ask in (
        lambda: other.files.content(batch.output_file_id),
        lambda: other.files.delete(batch.input_file_id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    with pytest.raises(openai.AuthenticationError):
        connect(server, "three").files.list()


def test_limits(make_server: Callable[..., Server]) -> None:
    server = make_server(max_files=4, files_disk=3000, batch_lines=3, max_batches=1, max_body=4096)
    client = connect(server)
    with pytest.raises(openai.APIStatusError) as too_long:
        upload(client, ["x" * 5000])
    assert too_long.value.status_code == 413
    long = upload(client, ["x" * 2500])
    with pytest.raises(openai.BadRequestError, match="bytes"):
        upload(client, ["x" * 1000])
    client.files.delete(long)
    failed = wait_over(client, begin(client, [line(str(number)) for number in range(4)]))
    assert (failed.status, failed.output_file_id) == ("failed", None)
    assert "more than 3 requests" in failed.errors.data[0].message
    empty = wait_over(client, begin(client, [""]))
    assert "is empty" in empty.errors.data[0].message
    begin(client, [line("slow", max_tokens=1500, ignore_eos=True)])
    with pytest.raises(openai.RateLimitError):
        begin(client, [line("b")])
    with pytest.raises(openai.BadRequestError, match="files"):
        upload(client, ["x"])


def test_cancel_and_expire(server: Server, puppet: Puppet, monkeypatch: pytest.MonkeyPatch) -> None:
    client = connect(server)
    lines = [line("first"), *(line(f"slow{number}", max_tokens=1000, ignore_eos=True) for number in range(9))]
    for outcome in ("cancelled", "expired"):
        puppet.delay_s = 0.0
        batch = begin(client, [lines[0], "{", *lines[1:]])
        with pytest.raises(openai.ConflictError):
            client.files.delete(batch.input_file_id)
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)  # noqa: B023
        puppet.delay_s = 0.05
        if outcome == "cancelled":
            assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
            monkeypatch.setattr(batches, "WINDOW_S", 2)  # for the next one
        done = wait_over(client, batch)
        assert done.status == outcome
        assert set(read(client, done.output_file_id)) == {"first"}
        codes = {name: body["error"]["code"] for name, body in read(client, done.error_file_id).items()}
        late = {one["custom_id"]: "batch_expired" for one in lines[1:]} if outcome == "expired" else {}
        assert codes == {"sala:line-2": "invalid_value", **late}
        server.wait_idle()
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_restart_repeats_nothing(tiny: Path, tmp_path: Path) -> None:
    first = start(tiny, tmp_path / "room", batch_answers=1)
    client = connect(first)
    slow = [line(f"slow{number}", "z", max_tokens=1000, ignore_eos=True) for number in range(3)]
    batch = begin(client, ["{", line("a"), line("b"), *slow])
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 2)
    part = tmp_path / "room-files" / "batches" / f"{batch.id}.output"
    first.stop()
    before = part.read_text()
    assert before.count("\n") == 2
    part.write_text(before + '{"custom_id": "slow0", "resp')  # the power failed
    second = start(tiny, tmp_path / "room")
    client = connect(second)
    done = wait_over(client, batch)
    assert (done.status, dict(done.request_counts)) == ("completed", {"total": 6, "completed": 5, "failed": 1})
    assert client.files.content(done.output_file_id).text.startswith(before)
    assert set(read(client, done.output_file_id)) == {"a", "b", "slow0", "slow1", "slow2"}
    assert second.app.state.metrics.statistics.num_accepted == 3
    rival = start(tiny, tmp_path / "room")
    with pytest.raises(openai.InternalServerError, match="another server"):
        connect(rival).files.list()
    rival.stop()
    second.stop()
    third = start(tiny, tmp_path / "room")
    assert connect(third).batches.retrieve(batch.id) == done
    third.stop()


def test_expired_files_are_deleted(make_server: Callable[..., Server]) -> None:
    server = make_server()
    client = connect(server)
    file_id = upload(client, ["{}"])
    store = server.app.state.batches.files
    object.__setattr__(store._files[file_id], "expires_at", int(time.time()))
    assert not client.files.list().data
    store.sweep()
    assert not list(store.directory.glob("file-*"))


def test_common_beginnings_are_computed_once(server: Server) -> None:
    """Two documents with three questions each, in mixed order: each is computed for its first question only."""
    client = connect(server)
    server.llm.engine.forget()
    documents = ["The first document. " * 30, "Another document. " * 34]
    lines = [line(f"{d}{q}", f"{documents[d]} Question {q}?") for q in range(3) for d in range(2)]
    done = wait_over(client, begin(client, lines))
    cached = {
        name: body["usage"]["prompt_tokens_details"]["cached_tokens"]
        for name, body in read(client, done.output_file_id).items()
    }
    assert [cached["00"], cached["10"]] == [0, 0]
    assert all(cached[f"{d}{q}"] >= len(documents[d]) for q in (1, 2) for d in range(2)), cached


def test_lines_are_sorted_by_what_they_begin_with(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    texts = {"a": "x1", "b": "y", "c": "x2", "d": "x1 and more"}
    source.write_text("".join(json.dumps(line(name, text)) + "\n" for name, text in texts.items()))
    assert [one.custom_id for one in read_index(source, ("/v1/completions",)).lines] == ["d", "a", "c", "b"]


def test_other_requests_go_first(make_server: Callable[..., Server]) -> None:
    """They get in though a batch fills the engine, and are answered while it still runs."""
    server = make_server(batch_answers=64, max_batch=3, max_queue=0)
    client, scheduler = connect(server), server.llm.engine.scheduler
    batch = begin(client, [line(str(number), max_tokens=1900, ignore_eos=True) for number in range(4)])
    wait_for(lambda: len(scheduler.running) == 3)
    assert server.post("/v1/completions", {"prompt": "hello", "max_tokens": 2}).status_code == 200
    assert client.batches.retrieve(batch.id).request_counts.completed == 0
    assert scheduler.num_preemptions == 1
    client.batches.cancel(batch.id)
    assert wait_over(client, batch).status == "cancelled"


def test_a_request_for_another_model_goes_first(
    tiny: Path, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch's model is unloaded for it; the batch goes on when the other model is not used any more."""
    monkeypatch.setattr(runtime, "UNUSED_S", 0.3)
    monkeypatch.setattr(batches, "RETRY_S", 0.05)
    server = make_server(max_batch=2)
    app_runtime = server.app.state.runtime
    shutil.copytree(tiny, app_runtime.library.directory / "another")
    client = connect(server)
    batch = begin(client, [line(str(number), max_tokens=1000, ignore_eos=True) for number in range(3)])
    wait_for(lambda: server.llm.engine.scheduler.running)
    answer = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 2, "model": "another"})
    assert answer.json()["model"] == "another"
    assert list(app_runtime.loaded) == ["another"]
    done = wait_over(client, batch)
    assert dict(done.request_counts) == {"total": 3, "completed": 3, "failed": 0}
    assert list(app_runtime.loaded) == [app_runtime.default_id]
