"""More chat templates with tools: those of models since the end of 2025 (`tool_templates.py` has the others)."""

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
