"""What clients may send. A field that is not here is refused, never ignored; so is a value of another type."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema

LARGEST_SEED = 2**63 - 1
MOST_TOP = 20
MOST_TURNS = MOST_PROMPTS = 4096
MOST_STOPS = 16
LONGEST_STOP = 1000  # characters

Number = Annotated[float, Field(allow_inf_nan=False)]


def _kind(value: Any, variants: tuple[type, ...], accepted: str) -> Any:
    # A union's own errors name each variant in turn; one line says what is accepted.
    if isinstance(value, bool) or not isinstance(value, variants):
        raise ValueError(f"accepted: {accepted}")
    return value


def _prompt(value: Any) -> Any:
    accepted = "a text, a list of texts, a list of token ids, or a list of lists of token ids"
    _kind(value, (str, list), accepted)
    if isinstance(value, str):
        return value
    if not value:
        raise ValueError(f"it is empty; accepted: {accepted}")
    if _ids(value):
        return value
    if len(value) > MOST_PROMPTS:
        raise ValueError(f"it holds {len(value)} prompts; accepted: at most {MOST_PROMPTS}")
    if all(isinstance(part, str) for part in value):
        return value
    if all(isinstance(part, list) and part and _ids(part) for part in value):
        return value
    raise ValueError(f"accepted: {accepted}")


def _ids(value: list[Any]) -> bool:
    return all(type(part) is int and 0 <= part < 2**31 for part in value)


def _stop(value: Any) -> list[str]:
    accepted = f"a text, or a list of up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters"
    texts = [value] if isinstance(value, str) else _kind(value, (list,), accepted)
    if len(texts) > MOST_STOPS or not all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in texts):
        raise ValueError(f"accepted: {accepted}")
    return texts


def _bias(value: Any) -> dict[int, float]:
    accepted = "an object from token ids (as text) to numbers from -100 to 100"
    _kind(value, (dict,), accepted)
    found = {}
    for token, bias in value.items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
        # isdecimal alone would take digits of other scripts, and a leading zero name a token twice.
        if not number or not (token.isascii() and token.isdecimal() and len(token) < 10 and str(int(token)) == token):
            raise ValueError(f"accepted: {accepted}")
        found[int(token)] = float(bias)
    return found


def _content(value: Any) -> str:
    accepted = "a text, or a list of parts such as {'type': 'text', 'text': '…'}"
    if isinstance(value, str):
        return value
    texts = []
    for part in _kind(value, (list,), accepted):
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise ValueError(f"accepted: {accepted}")
        texts.append(_kind(part["text"], (str,), accepted))
    return "\n".join(texts)


_NULL, _TEXT, _ID = {"type": "null"}, {"type": "string"}, {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": _TEXT},
        "required": ["type", "text"],
        "additionalProperties": False,
    },
}
_STOPS = {**_TEXT, "minLength": 1, "maxLength": LONGEST_STOP}

Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    BeforeValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
Stop = Annotated[
    list[str],
    BeforeValidator(_stop),
    WithJsonSchema({"anyOf": [_STOPS, {"type": "array", "items": _STOPS, "maxItems": MOST_STOPS}]}),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
Content = Annotated[str, BeforeValidator(_content), WithJsonSchema({"anyOf": [_TEXT, _PARTS]})]


class Body(BaseModel):
    """Strict: no field beside these, and no value of another type. A field that is null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        # Clients write null for what they do not ask for, such as tools, and send answers back with their nulls.
        return {name: part for name, part in value.items() if part is not None} if isinstance(value, dict) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
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
    kind = {name: part for name, part in schema.items() if name not in notes}
    return {**notes, "anyOf": [*(variants or [kind]), _NULL]}


class StreamOptions(Body):
    """What a stream says beside the answer."""

    include_usage: bool = False


class ResponseFormat(Body):
    """Only plain text."""

    type: Literal["text"]


class Generation(Body):
    """What completions and chat completions have in common."""

    model: str = Field(max_length=1000)
    temperature: Number = Field(1.0, ge=0, le=100)
    top_p: Number = Field(1.0, gt=0, le=1)
    top_k: int = Field(
        0, ge=-1, le=2**31 - 1, description="Sample among so many of the likeliest tokens; 0 or -1: all."
    )
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
    return_tokens_as_token_ids: bool = Field(
        False, description="Name tokens 'token_id:ID' where log-probabilities are given."
    )
    # Without effect on the answer.
    user: str | None = Field(None, max_length=1000)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams: set stream to true, or leave them out")
        return self


class CompletionRequest(Generation):
    """Body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: int = Field(16, ge=0, le=2**31 - 1, description="0 only with echo.")
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=128)

    @model_validator(mode="after")
    def _fields_fit(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0: accepted with echo alone, which answers with the prompt")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of is {self.best_of}: accepted: at least n, {self.n}")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ValueError(
                "best_of cannot be streamed: the best is known only at the end; leave out best_of or stream"
            )
        return self


class Turn(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ChatRequest(Generation):
    """Body of POST /v1/chat/completions."""

    messages: list[Turn] = Field(min_length=1, max_length=MOST_TURNS, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    # Without effect on the answer.
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = Field(None, max_length=1000)
    prompt_cache_key: str | None = Field(None, max_length=1000)

    @model_validator(mode="after")
    def _fields_fit(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: set logprobs to true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self


class TokenizeRequest(Body):
    """Body of POST /tokenize: a prompt, or messages."""

    model: str | None = Field(None, max_length=1000)
    prompt: str | None = None
    messages: list[Turn] | None = Field(None, min_length=1, max_length=MOST_TURNS, fail_fast=True)
    add_special_tokens: bool = Field(True, description="Of a prompt; a chat template writes its own.")
    add_generation_prompt: bool = Field(True, description="End messages where the answer begins.")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: str | None = Field(None, max_length=1000)
    tokens: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field(fail_fast=True)
