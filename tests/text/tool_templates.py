"""Chat templates with tools, small ones in the manner of those that models bring, and conversations with calls."""

from __future__ import annotations

from typing import Any

# Hermes 2 and 3, Qwen2.5, Qwen3.
HERMES = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n\\nFunction signatures are within <tools></tools> XML tags:\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n\\nFor each call return <tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n" }}
{{- "</tool_call><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not tools) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + content }}
{%- for call in message.tool_calls or [] %}
{%- if loop.index0 or content %}{{- '\\n' }}{%- endif %}
{%- set call = call.function or call %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Llama 3.1, 3.2, 3.3.
LLAMA = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set said = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}
{%- else %}{%- set said = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + said + '<|eot_id|>' }}
{%- for message in messages %}
{%- if loop.first and tools is not none %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond in the format {"name": function name, "parameters": ' }}
{{- 'dictionary of argument name and its value}. Do not use variables.\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{{- message['content'] + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
{{- '<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Mistral 7B Instruct v0.3 and its like.
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- if tools is not none and loop.last %}
{{- '[AVAILABLE_TOOLS] [' }}
{%- for tool in tools %}{{- '{"type": "function", "function": {' }}
{%- for key, val in tool.function.items() %}
{%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
{%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}{{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- '][/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message['content'] + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- set out = call.function | tojson %}{{- out[:-1] }}
{%- if not call.id is defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be 9 characters!') }}{%- endif %}
{{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}
{%- endfor %}
{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}
{%- elif message['role'] == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

# Qwen3-Coder, Qwen3.5.
CODER = """{%- if tools %}
{{- '<|im_start|>system\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool.function | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}
{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in call.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# GLM 4.5 to 4.7.
GLM = """[gMASK]<sop>
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{% endif -%}
{%- for message in messages %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{% set call = call.function or call %}
{{ '<tool_call>' + call.name }}
{% for key, value in call.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson(ensure_ascii=False) }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# Nemotron 3, which writes its calls as Qwen3-Coder does, and thinks.
NEMOTRON_3 = CODER.replace(
    "<|im_start|>assistant\\n' }}{%- endif %}", "<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)

# Nemotron Nano v2, Llama Nemotron.
NEMOTRON = """<SPECIAL_10>System
{% if tools %}{{ '<AVAILABLE_TOOLS>' + (tools | map(attribute='function') | list | tojson) + '</AVAILABLE_TOOLS>' }}
Write <TOOLCALL>[{"name": name, "arguments": object}]</TOOLCALL> to call them.
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<SPECIAL_11>User
<TOOL_RESPONSE>[{{ message.content }}]</TOOL_RESPONSE>
{% else %}<SPECIAL_11>{{ message.role | capitalize }}
{{ message.content or '' }}
{%- if message.tool_calls %}<TOOLCALL>[
{%- for call in message.tool_calls %}{% set call = call.function %}
{{- '{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}}{{ '' if loop.last else ', ' }}
{%- endfor %}]</TOOLCALL>{% endif %}
<SPECIAL_12>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<SPECIAL_11>Assistant
<think>

{% endif %}"""

# LFM2.5 (LFM2 writes no earlier calls, and has its tools between <|tool_list_start|> and <|tool_list_end|>).
LFM = """{{ bos_token }}
{%- if tools %}{{ '<|im_start|>system\nList of tools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- macro written(value) %}
{%- if value is string %}"{{ value }}"{% elif value is mapping %}{{ value | tojson }}{% else %}{{ value }}{% endif %}
{%- endmacro %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call_start|>[' if loop.first else ', ' }}{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}{{ key }}={{ written(value) }}{{ '' if loop.last else ', ' }}
{%- endfor %}){{ ']<|tool_call_end|>' if loop.last else '' }}
{%- endfor %}
{{- message.content or '' }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# DeepSeek V3.1 (V3 and R1 write the kind of a call before its name, and fences around its arguments).
DEEPSEEK_31 = """{{ bos_token }}{% if tools %}## Tools
{% for tool in tools %}{{ tool.function | tojson }}{{ '\n' }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- elif message.tool_calls %}{{ '<｜Assistant｜></think>' + (message.content or '') + '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}{% set call = call.function %}
{{- '<｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{ '<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜>' + eos_token }}
{%- else %}{{ '<｜Assistant｜></think>' + message.content + eos_token }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜></think>' }}{% endif %}"""
DEEPSEEK_3 = (
    DEEPSEEK_31.replace("call.name + '<｜tool▁sep｜>'", "'function<｜tool▁sep｜>' + call.name + '\\n```json\\n'")
    .replace("{{ '<｜tool▁call▁end｜>' }}", "{{ '\\n```<｜tool▁call▁end｜>' }}")
    .replace("</think>", "")
)

# Kimi K2, Kimi Linear. The id of a call is functions.NAME:NUMBER.
KIMI = """{%- macro said(message) %}{{ message.content or '' }}{% endmacro %}
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}
{{- '<|im_system|>' if message.role in ['system', 'tool'] else '<|im_' + message.role + '|>' }}
{{- message.get('name') or message.role }}<|im_middle|>
{%- if message.role == 'tool' %}## Return of {{ message.tool_call_id }}{{ '\n' }}{% endif %}{{ said(message) }}
{%- if message.get('tool_calls') %}<|tool_calls_section_begin|>
{%- for call in message.tool_calls %}<|tool_call_begin|>functions.{{ call.function.name }}:{{ loop.index0 }}
{%- set arguments = call.function.arguments %}<|tool_call_argument_begin|>
{{- arguments if arguments is string else arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

# gpt-oss.
HARMONY = """{%- if tools %}
{{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {' }}
{%- for tool in tools %}
{{- '\\n// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: ' }}
{{- tool.function.parameters | tojson }}{{- ') => any;' }}
{%- endfor %}{{- '\\n}<|end|>' }}
{%- endif %}
{%- set called = namespace(name='') %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set call = message.tool_calls[0].function %}{%- set called.name = call.name %}
{{- '<|start|>assistant to=' }}{{- 'functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson }}{{- '<|end|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city, à jour.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}},
]
CALL = {"id": "abcdef012", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it warm in Zürich?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdef012", "name": "weather", "content": '{"degrees": 21}'},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "And tomorrow?"},
]
