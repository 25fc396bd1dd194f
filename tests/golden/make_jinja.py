"""Regenerates jinja.json: small templates with every construct that profiler/text/jinja.h reads, and the output of
Jinja2 with the settings of transformers; and seeds of the fuzz target `chat`.

usage: make_jinja.py [OUT]     (needs: pip install jinja2)
Writes a list of {"template", "text"}; text null: Jinja2 refuses it too.
"""

import datetime
import json
import os
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

HERE = os.path.dirname(os.path.abspath(__file__))
SEEDS = os.path.join(HERE, "..", "fuzz", "corpus", "chat")
MESSAGE = " Who was\n\nit? é "
SPACES = [
    "a\n", "a\n\n", "a\r\nb", " {{ 1 }} ", "  {% if 1 %}\n  x\n  {% endif %}\ny", "x {% if 1 %}\n y{% endif %}\n",
    "{# c #}\nx", "a\n  {# c #}\n b", "a {#- c -#} b", "a {{- 1 -}} b", "a\n {%- if 1 -%} \n b {%- endif %} c",
    "  {%+ if 1 %}x{% endif +%}\ny", "{% if 1 %}\n\n{{ 1 }}\n{% endif %}", "a {# open", "{{ 1", "{% if 1 %}x", "{{ }}",
    "{{ '}}' }}{{ {'a': {'b': 1}}['a']['b'] }}", "}} %} #}", "{ {% if 1 %}{{% endif %}", "é\u00a0{{- 1 }}",
    "  {{ 1 }}\n  {% if 0 %}{% endif %}  \n", "{% if 1 %}\n  {% if 1 %}\nx\n  {% endif %}\n{% endif %}",
    "{{ 1 -}}\n  {% if 1 %}x{% endif %}", "{% if 1 -%}\n  {% if 1 %}x{% endif %}{% endif %}",
]  # fmt: skip
EXPRESSIONS = [
    "1 + 2 * 3", "7 // 2", "-7 // 2", "-7 % 3", "7 % -3", "2 - 3 - 4", "'a' + 'b' ~ 1", "none ~ true ~ 3",
    "1 if 0 else 2", "1 if 0", "'a' 'b'", "'\\n\\t\\\\\\'' + \"'\"", "1 == 1.0", "true == 1", "none == false",
    "'a' < 'b'", "2 >= 2", "1 < 2 < 3", "'a\u00a0\u2003 '.strip()", "'a\u3000'|trim", "'a' in 'cat'",
    "'a' not in 'cat'", "1 in [1, 2]", "'k' in {'k': 1}", "'x' in nothing", "'x' in none", "not 1 or 2",
    "0 or '' or 'x'", "1 and 2", "nothing", "nothing + 'x'", "nothing.x", "nothing is defined", "nothing or 'x'",
    "[1, 2, 3][-1]", "[1, 2, 3][5]", "[1, 2, 3][1:]|length", "[1, 2, 3][::-1]|first", "[1, 2, 3][:-1]|last",
    "'héllo'[1]", "'héllo'[1:3]", "'héllo'|length", "[3, 2, 1][2:0:-1]|join('-')", "(1, 2)|last", "()|length", "(1)",
    "{'a': 1}.a", "{'a': 1}['b']", "{'a': 1}.get('b', 2)", "{'a': 1}.items()|first|last", "{'a': 1}|length",
    "{1: 2}|length", "messages[0].role", "messages[0]['content']", "messages[0].content.strip()",
    "messages[0].content|trim", "messages|length", "messages[-1]['role'] == 'user'", "messages[0].nothing is none",
    "messages[0].tool_calls is defined", "'x' is string", "none is none", "1 is number", "true is number",
    "messages is iterable", "messages[0] is mapping", "messages is sequence", "'s' is iterable", "1 is odd",
    "2 is not odd", "true is true", "1 is true", "2 is in [1, 2]", "3 is divisibleby 3", "'a' is equalto 'a'",
    "'a' is eq('b')", "none is string", "true is boolean", "1 is boolean", "'abc'.startswith('ab')",
    "'abc'.endswith(('x', 'c'))", "'a,b,c'.split(',')|last", "'a,b,c'.split(',', 1)|last", "'a  b'.split()|last",
    "'a b'.title()", "'aBC'.capitalize()", "'ab'.upper() + 'AB'.lower()", "'xxaxx'.strip('x')",
    "'xa '.lstrip('x') + '|' + ' a '.rstrip()", "'aba'.replace('a', 'cc')", "'aba'|replace('a', 'c')", "'ab'|upper",
    "'é'|upper", "[1, 2]|join(', ')", "['a', 'b']|join", "nothing|default('d')", "none|default('d')",
    "''|default('d', true)", "[]|first", "messages|map(attribute='role')|join(',')",
    "messages|selectattr('role', 'equalto', 'user')|list|length", "[0, 1]|select|list|length",
    "messages|rejectattr('role', '==', 'user')|list|length", "messages|selectattr('tools')|list|length",
    "[1, 2]|reverse|first", "range(3)|list|length", "range(1, 3)|join", "range(0)|first", "range(5, 1)|list|length",
    "strftime_now('%d %b %Y')", "strftime_now('%Y-%m-%d, %A %-d %B')", "raise_exception('no')", "bos_token + eos_token",
    "tools is none", "tools is defined", "documents", "strftime_now is defined", "add_generation_prompt", "1 / 2",
    "2 ** 3", "'a' * 2", "- 'a'", "'a' + 1", "unknown()", "'%s' % 1", "1|unknown", "1 is unknown", "[1, 2]",
    "messages[0].content.split('\\n\\n')[0]", "'a'|first", "'abc'|list|length", "dict(a=1).a", "namespace(a=1).a",
    "messages[0]['role'] in ['user', 'tool'] and loop is not defined", "not true is false",
    "(messages[0].role == 'user') != (0 % 2 == 0)", "1 ~ 2 == '12'", "'a' if nothing is defined and nothing else 'b'",
    "messages[0].keys()|join", "messages[0].values()|first", "'\\u00e9'", "[[1], [1]] == [[1], [1]]",
    "{'a': 1} == {'a': 1}", "-1 is odd",
]  # fmt: skip
STATEMENTS = [
    "{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ m.role }}{% endfor %}",
    "{% for i in [] %}x{% else %}none{% endfor %}",
    "{% for i in [1, 2, 3] if i is odd %}{{ loop.index0 }}{{ i }}{{ loop.length }}{{ loop.revindex }}{% endfor %}",
    "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k ~ v }}{% endfor %}",
    "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
    "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}x",
    "{% for i in 'aé' %}{{ i }}-{% endfor %}",
    "{% for i in none %}x{% endfor %}",
    "{% for i in nothing %}x{% endfor %}y",
    "{% for i in [1, 2] %}{{ loop.previtem }},{{ loop.nextitem }};{% endfor %}",
    "{% for i in [1, 2] %}{% for k in [3] %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}",
    "{% set n = namespace(x=1) %}{% for i in [1, 2] %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}{{ n.y is defined }}",
    "{% set a = {'x': 1} %}{% set a.x = 2 %}{{ a.x }}",
    "{% set x %}a{{ 1 }}{% set y = 2 %}{% endset %}{{ x }}{{ y is defined }}",
    "{% if 0 %}a{% elif 1 %}b{% else %}c{% endif %}{% if 0 %}a{% elif 0 %}b{% else %}c{% endif %}",
    "{% if 1 %}{% set x = 1 %}{% endif %}{{ x }}",
    "{% macro f(a, c, b='d') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }}{{ f(1, 2, 3) }}{{ f(b=4, a=5) }}",
    "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}",
    "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
    "{% set x = 1 %}{% macro f() %}{{ x }}{% set x = 3 %}{{ x }}{% endmacro %}{{ f() }}{{ x }}",
    "{%- macro f() -%}\n  a\n{%- endmacro -%}\n{{- f() }}|",
    "{% for i in [1] %}{% set y = 2 %}{% endfor %}{{ y is defined }}",
    "{% generation %}x{% endgeneration %}y",
    "{% unknown %}",
    "{% if 1 %}{% endfor %}",
    "{% endif %}",
    "{% for %}{% endfor %}",
    "{% set = 1 %}",
    "{% set messages = messages + messages %}{{ messages|length }}",
    "{% set loop_messages = messages[1:] %}{% for m in loop_messages %}x{% else %}y{% endfor %}",
]
# The forms of the six kinds, written with the constructs of their families' templates; the words are our own.
KINDS = {
    "chatml": """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and not (message.content.startswith('<r>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "llama3": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "1 Jan 2000" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The system message, if there is one. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Tools: " + tools|reject('equalto', 'x')|join(", ") }}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- raise_exception("no tools") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}""",
    "mistral": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[TOOLS]" + tools }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token}}
    {%- endif %}
{%- endfor %}
""",
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
""",
    "phi3": """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}""",
    "phi4": "{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + "
    "message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + "
    "message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant<|im_sep|>' }}{% endif %}",
    "gpt-oss": """{#- What the system says. #}
{%- macro render_type(spec, required, is_nullable=false) -%}
    {%- if spec.type == "array" -%}{{ spec["items"] }}{%- endif -%}
{%- endmacro -%}
{%- macro build_system_message() -%}
    {%- if model_identity is not defined %}
        {%- set model_identity = "You are a model." %}
    {%- endif %}
    {{- model_identity + "\\n" }}
    {{- "Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
    {%- if reasoning_effort is not defined %}
        {%- set reasoning_effort = "medium" %}
    {%- endif %}
    {{- "Reasoning: " + reasoning_effort + "\\n\\n" }}
    {%- if builtin_tools %}
        {{- render_type(builtin_tools, []) }}
    {%- endif -%}
    {{- "# Valid channels: analysis, final." }}
{%- endmacro -%}
{#- The messages. #}
{{- "<|start|>system<|message|>" }}
{{- build_system_message() }}
{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set developer_message = "" %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|>" + developer_message + "<|end|>" }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- set last_tool_call.name = none %}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
""",
}


class Generation(jinja2.ext.Extension):
    """transformers' tag around the assistant's part: only its body is rendered."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller):
        return caller()


def refuse(why):
    raise jinja2.exceptions.TemplateError(why)


def main():
    extensions = [Generation, jinja2.ext.loopcontrols]
    jinja = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    jinja.globals |= {"raise_exception": refuse, "strftime_now": datetime.date(2024, 7, 26).strftime}
    said = {"messages": [{"role": "user", "content": MESSAGE}], "add_generation_prompt": True, "tools": None}
    said |= {"documents": None, "bos_token": "<s>", "eos_token": "</s>"}
    cases = []
    for template in [*SPACES, *("{{ %s }}" % e for e in EXPRESSIONS), *STATEMENTS, *KINDS.values()]:
        try:
            text = jinja.from_string(template).render(**said)
        except (jinja2.exceptions.TemplateError, TypeError, ZeroDivisionError):
            text = None
        cases.append({"template": template, "text": text})
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "jinja.json")
    with open(out, "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
    os.makedirs(SEEDS, exist_ok=True)
    for name, template in KINDS.items() | {"statements": "".join(STATEMENTS[:18])}.items():
        with open(os.path.join(SEEDS, name), "w", encoding="utf-8") as file:
            file.write(template)


if __name__ == "__main__":
    main()
