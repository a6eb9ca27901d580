"""A chat template with tools in the Hermes form, for the tiny models, and requests with tools."""

TEMPLATE = (
    "{% if tools %}<|user|>Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|end|>"
    "{% elif message.role == 'tool' %}<|user|><tool_response>{{ message.content }}</tool_response>"
    "{% else %}<|user|>{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": ARGUMENTS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def fits(arguments):
    """Whether arguments follow the schema."""
    return (
        arguments.keys() == {"city", "days"} and arguments["city"] in ("Oslo", "Rome") and 1 <= arguments["days"] <= 9
    )
