"""Bodies of the API: requests, of which unknown fields and values of another type are refused, and errors.

Messages of errors name what the client sent. They never contain paths or messages of other libraries.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic import GetJsonSchemaHandler as Handler
from pydantic_core import CoreSchema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from divdec.errors import FailedClosed, UsageError
from divdec.serving.engine import Busy, InvalidRequest
from divdec.serving.grammar import GrammarConflict
from divdec.serving.scheduler import Closing

MAX_INT, MAX_SEED = 2**31 - 1, 2**63 - 1
MAX_LOGPROBS = 20
MAX_MESSAGES = MAX_PROMPTS = 4096
MAX_STOPS = 16
MAX_TOOLS = 128
MAX_STOP_LENGTH = 1000  # characters
RETRY_AFTER = 1  # seconds
MAX_VALUE_LENGTH = 200  # characters of a value that a message quotes
OFFERED = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health, GET /metrics"
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def _accepting(description: str) -> WrapValidator:
    """Replace the errors of a union, one for each variant, by one that says what is accepted."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"accepted: {description}") from None

    return WrapValidator(validate)


NEITHER = (None, "none", "auto")
"""Values of `tool_choice` that force no call."""
Number = Annotated[float, Field(allow_inf_nan=False)]
# The limit makes pydantic refuse half a surrogate pair, which is not a character.
Text = Annotated[str, Field(max_length=MAX_INT)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(min_length=1, fail_fast=True)]
Name = Annotated[str, Field(max_length=1000)]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]

Prompt = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)],
    _accepting(f"a text, a list of token ids, or a list of up to {MAX_PROMPTS} texts or lists of token ids"),
]
Stop = Annotated[
    _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOPS, fail_fast=True)],
    _accepting(f"a text, or a list of up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters"),
    AfterValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
LogitBias = Annotated[
    dict[
        Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")],
        Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)],
    ],
    _accepting("an object from token ids (as text) to numbers from -100 to 100"),
    AfterValidator(lambda biases: {int(token): bias for token, bias in biases.items()}),
]


class RequestBody(BaseModel):
    """A request body. A field that is null, or has a value that asks for nothing, counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Values that ask for nothing, of fields that are refused with other values."""

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_values(cls, value: Any) -> Any:
        # Clients send null or [] for unused fields such as tools, and send replies back with such fields in them.
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if not (item is None or cls._asks_nothing(name, item))}

    @classmethod
    def _asks_nothing(cls, name: str, item: Any) -> bool:
        return any(type(item) is type(neutral) and item == neutral for neutral in cls.NEUTRAL.get(name, ()))

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: Handler) -> dict[str, Any]:
        schema = handler(core_schema)
        inner = handler.resolve_ref_schema(schema)
        inner["additionalProperties"] = null = {"type": "null"}
        for name in inner["properties"].keys() - inner.get("required", []):
            inner["properties"][name] = {"anyOf": [inner["properties"][name], null]}
        for name, values in cls.NEUTRAL.items():
            known = inner["properties"].get(name, {"anyOf": [null]})
            inner["properties"][name] = {"anyOf": [*known["anyOf"], {"enum": list(values)}]}
        return schema


class StreamOptions(RequestBody):
    """Options of a stream."""

    NEUTRAL: ClassVar = {"include_obfuscation": (False,)}
    include_usage: bool = False


class JsonSchemaFormat(RequestBody):
    """JSON schema of a reply, which is always enforced."""

    name: FunctionName
    schema_: dict[str, Any] = Field(alias="schema")
    # No effect on the reply.
    description: Text | None = None
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """Format of a reply."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_fits_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(f"type is {self.type!r}; json_schema is needed with type 'json_schema', and only there")
        return self

    @property
    def schema_of_reply(self) -> dict[str, Any] | None:
        """JSON schema of the reply; None for text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return None if self.type == "text" else {"type": "object"}


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half a surrogate pair, which is not a character") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if schema.get("type", "object") != "object":
        raise ValueError("accepted: a JSON schema of type object")
    return schema


class FunctionDefinition(RequestBody):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_check_parameters)] = Field(
        {"type": "object", "properties": {}, "additionalProperties": False},
        description="JSON schema of the arguments, an object. Without it there are none.",
    )
    # No effect on the reply: arguments follow the schema where `tool_choice` forces a call.
    strict: bool | None = None


class Tool(RequestBody):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(RequestBody):
    """Name of a function."""

    name: FunctionName


class NamedToolChoice(RequestBody):
    """The function that the model must call."""

    type: Literal["function"]
    function: FunctionReference


Tools = Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice,
    _accepting("none, auto, required, or {'type': 'function', 'function': {'name': '…'}}"),
]


def _check_arguments(text: str) -> str:
    try:
        valid = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        valid = False
    if not valid:
        raise ValueError("accepted: a JSON object as text")
    return text


class FunctionCall(RequestBody):
    """A call of a function."""

    name: FunctionName
    arguments: Annotated[Text, AfterValidator(_check_arguments)]


class ToolCall(RequestBody):
    """A call in an earlier reply of the assistant."""

    id: Name
    type: Literal["function"]
    function: FunctionCall
    # No effect on the reply; parts of a stream have it.
    index: int | None = None


class GenerationRequest(RequestBody):
    """Fields that completions and chat completions share."""

    NEUTRAL: ClassVar = {
        "stop": ("",), "stop_token_ids": ([],), "min_tokens": (0,), "skip_special_tokens": (True,),
    }  # fmt: skip
    model: Name
    temperature: Number = Field(1.0, ge=0, le=100)
    top_p: Number = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_INT, description="Sample among the k likeliest tokens; 0 or -1: all.")
    min_p: Number = Field(0.0, ge=0, le=1)
    presence_penalty: Number = Field(0.0, ge=-2, le=2)
    frequency_penalty: Number = Field(0.0, ge=-2, le=2)
    repetition_penalty: Number = Field(1.0, ge=0.01, le=10)
    logit_bias: LogitBias = Field({})
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: Stop = Field([])
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool = Field(False, description="Name tokens 'token_id:ID' in log-probabilities.")
    # No effect on the reply.
    user: Name | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need a stream: set stream to true, or leave them out")
        return self


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    NEUTRAL: ClassVar = {**GenerationRequest.NEUTRAL, "suffix": ("",), "best_of": (1,)}
    prompt: Prompt
    max_tokens: int = Field(16, ge=0, le=MAX_INT, description="0 only with echo.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @model_validator(mode="after")
    def _fields_fit(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0: accepted only with echo, which returns the prompt")
        return self


class TextPart(RequestBody):
    """Part of a message's content."""

    type: Literal["text"]
    text: Text
    # No effect on the reply.
    cache_control: dict[str, str] | None = None


Content = Annotated[
    Text | Annotated[list[TextPart], Field(fail_fast=True)],
    _accepting("a text, or a list of parts such as {'type': 'text', 'text': '…'}"),
    AfterValidator(lambda content: content if isinstance(content, str) else "\n".join(part.text for part in content)),
]


class ChatMessageParam(RequestBody):
    """One message of a conversation."""

    NEUTRAL: ClassVar = {
        "type": ("text", "message"), "tool_calls": ([],), "annotations": ([],), "refusal": ("",), "reasoning": ("",),
        "reasoning_content": ("",), "provider_specific_fields": ({}, {"refusal": None}),  # litellm's
    }  # fmt: skip
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field("", description="Required, except beside tool_calls.")
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = Field(None, description="The call that a message of role tool answers.")
    # No effect on the reply.
    name: Name | None = None

    @model_validator(mode="after")
    def _fields_fit_role(self) -> ChatMessageParam:
        if "content" not in self.model_fields_set and self.tool_calls is None:
            raise ValueError("content is required, except in messages with tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id is required in messages of role tool")
        for name, value, role in (
            ("tool_calls", self.tool_calls, "assistant"),
            ("tool_call_id", self.tool_call_id, "tool"),
        ):
            if value is not None and self.role != role:
                raise ValueError(f"{name} is for messages of role {role}; this one is of role {self.role}")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        # Templates know OpenAI's role developer as system, and arguments as objects.
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.tool_calls is not None:
            calls = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
            for call in calls:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            message["tool_calls"] = calls
        if self.role == "tool":
            fields = {"name": self.name, "tool_call_id": self.tool_call_id}
            message |= {name: value for name, value in fields.items() if value is not None}
        return message


TemplateKwargs = Annotated[
    dict[str, bool | int | Number | Text],
    _accepting("an object from variables of the chat template to texts, numbers, true or false"),
]


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    NEUTRAL: ClassVar = {
        **GenerationRequest.NEUTRAL, "tools": ([],), "functions": ([],), "function_call": ("none", "auto"),
    }  # fmt: skip
    messages: list[ChatMessageParam] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_generation_prompt: bool = Field(True, description="False only with continue_final_message.")
    continue_final_message: bool = Field(False, description="The reply continues the last message, the assistant's.")
    chat_template_kwargs: TemplateKwargs = Field({}, description="Variables of the chat template.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(None, description="'auto' by default.")
    parallel_tool_calls: bool = Field(True, description="Whether a reply may hold several calls.")
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    # No effect on the reply.
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None

    @model_validator(mode="after")
    def _fields_fit(self) -> ChatCompletionRequest:
        role, continues = self.messages[-1].role, self.continue_final_message
        if continues and "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt are both true; leave out one of them")
        if continues and role != "assistant":
            raise ValueError(
                f"continue_final_message is true, and the last message is of role {role!r}; accepted: assistant"
            )
        if continues and self.messages[-1].tool_calls:
            raise ValueError("continue_final_message is true, and the last message has tool_calls, which are complete")
        if not self.add_generation_prompt and not continues:
            raise ValueError("add_generation_prompt is false: accepted only with continue_final_message")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: set logprobs to true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_completion_tokens and max_tokens differ; give one of them")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name; accepted: different names")
        choice = self.tool_choice
        if choice not in NEITHER and not names:
            raise ValueError("tool_choice needs tools: give tools, or leave it out")
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise ValueError(f"tool_choice names {choice.function.name!r}; the tools are {', '.join(names)}")
        if choice not in NEITHER and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("tool_choice forces a call, which response_format would exclude; leave out one of them")
        return self

    @property
    def callable_tools(self) -> list[FunctionDefinition]:
        """Functions that the reply may call."""
        if self.tool_choice == "none":
            return []
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedToolChoice) else None
        return [tool.function for tool in self.tools or () if name in (None, tool.function.name)]

    @property
    def forces_call(self) -> bool:
        """Whether the reply must be a call."""
        return self.tool_choice not in NEITHER


class ErrorObject(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every reply with status 400 or above."""

    error: ErrorObject


class ApiError(HTTPException):
    """An error reply."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        kind = TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the HTTP response, in ASCII: a quoted value may hold half a surrogate pair."""
        content = json.dumps(self.body())
        return Response(content, self.status_code, self.headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that no retry makes valid (status 400)."""
    return ApiError(400, message, param=param, code=code)


def server_closing() -> ApiError:
    """Return the error while the server shuts down (status 503)."""
    return ApiError(503, "the server is shutting down", code="closing", headers={"Connection": "close"})


def to_api_error(error: BaseException, asked: str = "this path") -> ApiError:
    """Word any exception as an error reply to a request; `asked` is its method and path."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _from_validation(error.errors()[0])
        case HTTPException():
            message = f"{asked} is not offered; offered: {OFFERED}"
            message = message if error.status_code in (404, 405) else "the body cannot be read as JSON in UTF-8"
            return ApiError(error.status_code, message, headers=error.headers)
        case Busy():
            message, headers = "the server's queue is full; try again later", {"Retry-After": str(RETRY_AFTER)}
            return ApiError(429, message, code="queue_full", headers=headers)
        case Closing():
            return server_closing()
        case TimeoutError():
            return ApiError(504, "the answer took longer than the server allows; ask for fewer tokens", code="timeout")
        case GrammarConflict():
            return invalid(f"{error}; widen the schema, or leave it out", code="no_token_left")
        case FailedClosed():
            return ApiError(500, "the model could not be steered; it gives no other answer", code="steering_failed")
        case InvalidRequest():
            return invalid(str(error), error.param)
        case UsageError():
            return invalid(str(error))
    return ApiError(500, "internal error", code="internal_error")


def _from_validation(error: dict[str, Any]) -> ApiError:
    """Describe the first field that does not fit."""
    kind, value = error["type"], error.get("input")
    param = ".".join(map(str, error["loc"][1:])) or None  # the first is "body"
    if kind == "json_invalid":
        return invalid(f"the body is not JSON: {error['ctx']['error']}")
    if kind == "extra_forbidden":
        # Ignoring a field would let clients believe that it has an effect.
        return invalid(f"field {param!r} is not supported by this server; leave it out", param, "unsupported_parameter")
    if param is None and isinstance(value, bytes):
        return ApiError(415, "the body must be JSON in UTF-8: send Content-Type: application/json")
    if param is None and not isinstance(value, dict):
        return invalid("the body is empty; send a JSON object" if value is None else "the body must be a JSON object")
    if kind == "missing":
        return invalid(f"field {param!r} is required", param, "missing_required_parameter")
    message = str(error["msg"]).removeprefix("Value error, ")
    if param is None:  # a check across fields; most messages begin with the name of one
        name = message.partition(" ")[0]
        return invalid(message, name if name in (value or ()) else None, "invalid_value")
    shown = reprlib.repr(value)[:MAX_VALUE_LENGTH]
    return invalid(f"{param} is {shown}: {message[:1].lower()}{message[1:]}", param, "invalid_value")
