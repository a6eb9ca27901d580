"""Request bodies of the API: unknown fields and values of another type are refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic import GetJsonSchemaHandler as Handler
from pydantic_core import CoreSchema

LARGEST_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_MESSAGES = MAX_PROMPTS = 4096
MAX_STOPS = 16
LONGEST_STOP = 1000  # characters


def _check_text(text: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half a surrogate pair, which is not a character") from None
    return text


def _parse_prompt(value: Any) -> Any:
    accepted = "accepted: a text, a list of texts, a list of token ids, or a list of lists of token ids"
    if isinstance(value, str):
        return _check_text(value)
    if not isinstance(value, list) or not value:
        raise ValueError(accepted)
    if _are_token_ids(value):
        return value
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"{len(value)} prompts; accepted: at most {MAX_PROMPTS}")
    if all(isinstance(prompt, str) for prompt in value):
        return list(map(_check_text, value))
    if all(isinstance(prompt, list) and prompt and _are_token_ids(prompt) for prompt in value):
        return value
    raise ValueError(accepted)


def _are_token_ids(value: list[Any]) -> bool:
    return all(type(token) is int and 0 <= token < 2**31 for token in value)


def _parse_stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    valid = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not valid or not all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops):
        raise ValueError(f"accepted: a text, or a list of up to {MAX_STOPS} texts of 1 to {LONGEST_STOP} characters")
    return stops


def _parse_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or not all(map(_is_bias, value.items())):
        raise ValueError("accepted: an object from token ids (as text) to numbers from -100 to 100")
    return {int(token): float(bias) for token, bias in value.items()}


def _is_bias(item: tuple[str, Any]) -> bool:
    token, bias = item
    number = isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
    # isdecimal alone accepts digits of other scripts, and a leading zero would name a token twice.
    return number and token.isascii() and token.isdecimal() and len(token) < 10 and str(int(token)) == token


def _parse_content(value: Any) -> str:
    if isinstance(value, str):
        return _check_text(value)
    if not isinstance(value, list) or not all(map(_is_text_part, value)):
        raise ValueError("accepted: a text, or a list of parts such as {'type': 'text', 'text': '…'}")
    return _check_text("\n".join(item["text"] for item in value))


def _is_text_part(item: Any) -> bool:
    text = isinstance(item, dict) and item.keys() == {"type", "text"} and item["type"] == "text"
    return text and isinstance(item["text"], str)


def _any_of(*schemas: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(schemas)})


_NULL, _TEXT = {"type": "null"}, {"type": "string"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STOP = {**_TEXT, "minLength": 1, "maxLength": LONGEST_STOP}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_LOGIT_BIAS = {
    "type": "object",
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}

Number = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, AfterValidator(_check_text)]
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    BeforeValidator(_parse_prompt),
    _any_of(
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ),
]
Stop = Annotated[
    list[str],
    BeforeValidator(_parse_stop),
    _any_of(_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}),
]
LogitBias = Annotated[dict[int, float], BeforeValidator(_parse_logit_bias), WithJsonSchema(_LOGIT_BIAS)]
Content = Annotated[str, BeforeValidator(_parse_content), _any_of(_TEXT, {"type": "array", "items": _TEXT_PART})]


class RequestBody(BaseModel):
    """A request body. A field that is null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        # Clients send null for unused fields such as tools, and send replies back with the nulls in them.
        return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: Handler) -> dict[str, Any]:
        schema = handler(core_schema)
        inner = handler.resolve_ref_schema(schema)
        inner["additionalProperties"] = _NULL
        for name in inner["properties"].keys() - inner.get("required", []):
            inner["properties"][name] = _or_null(inner["properties"][name])
        return schema


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    variants = schema.get("anyOf", ())
    if _NULL in variants:
        return schema
    notes = {name: schema[name] for name in ("title", "description", "default") if name in schema}
    kind = {name: item for name, item in schema.items() if name not in notes}
    return {**notes, "anyOf": [*(variants or [kind]), _NULL]}


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool = False


class ResponseFormat(RequestBody):
    """Format of a reply; only plain text is supported."""

    type: Literal["text"]


class GenerationRequest(RequestBody):
    """Fields that completions and chat completions share."""

    model: str = Field(max_length=1000)
    temperature: Number = Field(1.0, ge=0, le=100)
    top_p: Number = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31 - 1, description="Sample among the k likeliest tokens; 0 or -1: all.")
    min_p: Number = Field(0.0, ge=0, le=1)
    presence_penalty: Number = Field(0.0, ge=-2, le=2)
    frequency_penalty: Number = Field(0.0, ge=-2, le=2)
    repetition_penalty: Number = Field(1.0, ge=0.01, le=10)
    logit_bias: LogitBias = Field({})
    seed: int | None = Field(None, ge=-LARGEST_SEED - 1, le=LARGEST_SEED)
    stop: Stop = Field([])
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool = Field(False, description="Name tokens 'token_id:ID' in log-probabilities.")
    # No effect on the reply.
    user: str | None = Field(None, max_length=1000)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need a stream: set stream to true, or leave them out")
        return self


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: int = Field(16, ge=0, le=2**31 - 1, description="0 only with echo.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=128)

    @model_validator(mode="after")
    def _fields_fit(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0: accepted only with echo, which returns the prompt")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of is {self.best_of}: accepted: at least n, {self.n}")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ValueError("best_of cannot be streamed; leave out best_of or stream")
        return self


class ChatMessageParam(RequestBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessageParam] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    # No effect on the reply.
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = Field(None, max_length=1000)
    prompt_cache_key: str | None = Field(None, max_length=1000)

    @model_validator(mode="after")
    def _fields_fit(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: set logprobs to true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self


class TokenizeRequest(RequestBody):
    """Body of POST /tokenize: a prompt, or messages."""

    model: str | None = Field(None, max_length=1000)
    prompt: Text | None = None
    messages: list[ChatMessageParam] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_special_tokens: bool = Field(True, description="For prompts; chat templates write their own.")
    add_generation_prompt: bool = Field(True, description="End messages with the start of a reply.")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(RequestBody):
    """Body of POST /detokenize."""

    model: str | None = Field(None, max_length=1000)
    tokens: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field(fail_fast=True)


class ErrorObject(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every reply with status 400 or above."""

    error: ErrorObject
