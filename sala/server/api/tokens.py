"""Text to token ids and back, with the model's tokenizer."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator

from sala.engine.requests import COUNT_LIMIT
from sala.errors import InputError
from sala.server.api.answers import naming
from sala.server.api.chat import ChatReply, as_messages
from sala.server.api.chat_schema import MAX_TOOLS, Message, Tool
from sala.server.api.completions_schema import TokenIds
from sala.server.api.routes import until_gone
from sala.server.http.body import Strict, problem
from sala.server.http.errors import ALWAYS
from sala.server.http.security import StrictRoute
from sala.server.runtime import LoadedModel

router = APIRouter(tags=["tokens"], route_class=StrictRoute)


class TokenizeRequest(Strict):
    """One of `prompt`, `content` (the same under another name) and `messages`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_special_tokens: bool = Field(True, description="Begin a text with BOS, if the model uses it.")
    add_generation_prompt: bool = Field(True, description="End a conversation with the prompt for the answer.")

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeRequest":
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise problem("give exactly one of prompt, content and messages", "prompt")
        return self


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: TokenIds


class DetokenizedText(BaseModel):
    prompt: str
    content: str = Field(description="The same as `prompt`.")


class TokenizerInfo(BaseModel):
    model: str
    vocab_size: int
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None = Field(description="The first of the tokens that end a text.")
    eos_token_ids: list[int]
    max_model_len: int
    fingerprint: str = Field(description="A hash of the tokenizer's definition.")


@router.post("/tokenize", response_model=Tokens, responses=ALWAYS, summary="Text to token ids")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    model: LoadedModel = await request.app.state.runtime.get(body.model)
    llm = model.llm

    def encode() -> list[int]:
        if body.messages is not None:
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
            ends_open = body.add_generation_prompt
            return llm.encode_chat(as_messages(body.messages), tools=tools, add_generation_prompt=ends_open)
        text = body.prompt if body.prompt is not None else body.content
        return llm.tokenizer.encode(text or "", body.add_special_tokens, max_tokens=llm.ctx, count_limit=COUNT_LIMIT)

    with naming(ChatReply.fields):
        ids = await until_gone(request, model.service.call(encode))
    return {"tokens": ids, "count": len(ids), "max_model_len": model.llm.ctx}


@router.post("/detokenize", response_model=DetokenizedText, responses=ALWAYS, summary="Token ids to text")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    model: LoadedModel = await request.app.state.runtime.get(body.model)
    llm = model.llm

    def decode() -> str:
        if max(body.tokens) >= llm.config.vocab_size:
            raise InputError("tokens", f"hold {max(body.tokens)}", f"ids go to {llm.config.vocab_size - 1}")
        return llm.tokenizer.decode(body.tokens, skip_special=False)

    text = await until_gone(request, model.service.call(decode))
    return {"prompt": text, "content": text}


@router.get("/tokenizer_info", response_model=TokenizerInfo, responses=ALWAYS, summary="Facts about the tokenizer")
async def show_tokenizer(request: Request, model: str | None = None) -> dict[str, Any]:
    loaded: LoadedModel = await request.app.state.runtime.get(model)
    llm = loaded.llm
    bos_id, stop_ids = llm.tokenizer.bos_id, sorted(llm.stop_ids)
    return {
        "model": loaded.id,
        "vocab_size": llm.config.vocab_size,
        "bos_token": None if bos_id is None else llm.tokenizer.decode([bos_id], skip_special=False),
        "bos_token_id": bos_id,
        "eos_token": llm.tokenizer.decode(stop_ids[:1], skip_special=False) or None,
        "eos_token_ids": stop_ids,
        "max_model_len": llm.ctx,
        "fingerprint": llm.tokenizer.fingerprint,
    }
