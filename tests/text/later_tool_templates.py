"""More chat templates with tools (`tool_templates.py` has the others): MiniMax, DeepSeek's, Cohere, Hunyuan, Gemma."""

# MiniMax M2.
MINIMAX = """{%- set begin, end = '<minimax:tool_call>', '</minimax:tool_call>' -%}
{{- ']~!b[]~b]system\\n' }}
{%- if tools %}{{- '<tools>' }}
{% for tool in tools %}<tool>{{ tool.function | tojson }}</tool>
{% endfor %}</tools>
{{ begin }}
<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>
</invoke>
{{ end }}{% endif %}[e~[
{% for message in messages %}
{%- if message.role == 'tool' %}{{ ']~b]tool\\n<response>' + message.content + '</response>' }}
{%- else %}{{ ']~b]' + ('ai' if message.role == 'assistant' else message.role) + '\\n' }}
{{- message.content or '' }}{% endif %}
{%- if message.tool_calls %}
{{ begin }}
{% for call in message.tool_calls %}{% set call = call.function %}<invoke name="{{ call.name }}">
{% for key, value in call.arguments.items() %}<parameter name="{{ key }}">
{{- value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}{{ end }}{% endif %}[e~[
{% endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}"""

# DeepSeek V3.2, whose calls V4 writes within another section.
DSML = """{%- set dsml = '｜DSML｜' -%}{{ bos_token }}
{%- if tools %}## Tools
<{{ dsml }}function_calls>
<{{ dsml }}invoke name="$FUNCTION_NAME">
<{{ dsml }}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{{ dsml }}parameter>
</{{ dsml }}invoke>
</{{ dsml }}function_calls>
{% for tool in tools %}{{ tool.function | tojson(ensure_ascii=False) }}
{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content + '<｜Assistant｜></think>' }}
{%- elif message.role == 'tool' %}
<function_results>
<result>{{ message.content }}</result>
</function_results>

</think>{% else %}{{ message.content or '' }}{% if message.tool_calls %}

<{{ dsml }}function_calls>
{% for call in message.tool_calls %}<{{ dsml }}invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() %}<{{ dsml }}parameter name="{{ key }}" string="
{{- 'true' if value is string else 'false' }}">{{ value if value is string else value | tojson }}</{{ dsml }}parameter>
{% endfor %}</{{ dsml }}invoke>
{% endfor %}</{{ dsml }}function_calls>{% endif %}{{ eos_token }}{% endif %}
{%- endfor %}"""

# Command R7B, Command A. Its tool calls have numbers of their own.
COHERE = """{{ bos_token }}
{%- set numbers = namespace(next=0) %}
{%- if tools %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Write <|START_ACTION|> followed by a list of tool calls.
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|END_OF_TURN_TOKEN|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ message.content }}<|END_OF_TURN_TOKEN|>
{%- elif message.role == 'tool' %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[
    {"tool_call_id": "0", "results": {"0": {{ message.content | tojson }}}, "is_error": null}
]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>
{%- elif message.tool_calls %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_ACTION|>[
{% for call in message.tool_calls %}
    {"tool_call_id": "{{ numbers.next }}", "tool_name": "{{ call.function.name }}", "parameters":
{{- ' ' + (call.function.arguments | tojson) }}}{{ '' if loop.last else ',' }}
{% set numbers.next = numbers.next + 1 %}
{% endfor %}
]<|END_ACTION|><|END_OF_TURN_TOKEN|>
{%- else %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|>
{{- '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"""

# Hunyuan A13B.
HUNYUAN = """<|startoftext|>
{%- if tools %}Write <tool_calls>[{"name": "func_name1", "arguments": {"argument1": "value1"}},...]</tool_calls>.
{{ tools | tojson }}<|extra_4|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response><|extra_0|>
{%- elif message.tool_calls %}{% set ns = namespace(calls='[') %}
{%- for call in message.tool_calls %}{% set call = call.function %}
{%- set ns.calls = ns.calls + '{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}' %}
{%- set ns.calls = ns.calls + (']' if loop.last else ', ') %}
{%- endfor %}{{ (message.content or '') + '<tool_calls>' + ns.calls + '</tool_calls><|eos|>' }}
{%- else %}{{ message.content }}{{ '<|eos|>' if message.role == 'assistant' else '<|extra_0|>' }}{% endif %}
{%- endfor %}"""

# Gemma 4. Its declarations have keys between marks, its calls have them bare.
GEMMA4 = """{{ bos_token }}
{%- macro written(value) %}
{%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is mapping %}{
{%- for key, one in value | dictsort %}{{ key }}:{{ written(one) }}{{ '' if loop.last else ',' }}{% endfor %}}
{%- elif value is boolean %}{{ 'true' if value else 'false' }}
{%- elif value is sequence %}[
{%- for one in value %}{{ written(one) }}{{ '' if loop.last else ',' }}{% endfor %}]
{%- else %}{{ value }}{% endif %}
{%- endmacro %}
{%- if tools %}{{ '<|turn>system\\n' }}
{%- for tool in tools %}<|tool>declaration:{{ tool.function.name }}{{ written(tool.function) }}<tool|>{% endfor %}
{{- '<turn|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + written(call.function.arguments) + '<tool_call|>' }}
{%- endfor %}{{ (message.content or '') + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n<|channel>thought\\n<channel|>' }}{% endif %}"""

# FunctionGemma.
FUNCTIONGEMMA = (
    GEMMA4.replace('<|"|>', "<escape>")
    .replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>")
    .replace("<|channel>thought\\n<channel|>", "")
)
