// The frame that a chat template puts around a message: for each kind of family, what comes before and after it,
// whether BOS comes first and spaces are trimmed. Templates without such a frame are refused. A message's own control
// tokens are text, while the frame's are tokens. test_profiler_jinja.c judges what templates evaluate to.
#include "profiler/text/model_text.h"
#include "profiler/text/utf8.h"
#include "unit.h"

static kvb_error err;

static void expect_frame(const char *jinja, const char *kind, const char *front, const char *back, bool bos, bool trim)
{
    chat_frame f;
    ck_assert_msg(chat_frame_read(&f, jinja, "<s>", "</s>", "model", &err) == KVB_OK, "%s: %s", kind, err.message);
    unit_strings(f.kind, kind, f.front, front, f.back, back);
    ck_assert_msg(f.bos == bos && f.trim == trim, "%s: bos %d, trim %d", kind, f.bos, f.trim);
    chat_frame_free(&f);
    ck_assert(!f.front && !f.back && !f.kind);
}

#define FOR(body) "{% for message in messages %}" body "{% endfor %}"
#define THEN(answer) "{% if add_generation_prompt %}{{ '" answer "' }}{% endif %}"
#define CHATML "{{ '<|im_start|>' + message['role'] + '\\n' + message[\"content\"] + '<|im_end|>' + '\\n' }}"

UNIT_TEST(test_kinds)
{
    expect_frame(FOR(CHATML) THEN("<|im_start|>assistant\\n"), "chatml", "<|im_start|>user\n",
                 "<|im_end|>\n<|im_start|>assistant\n", false, false);
    expect_frame(
        "{# <|im_sep|> #}{{ bos_token }}{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nIt\\'s "
        "me<|im_end|>\\n' }}{% endif %}" FOR(CHATML) THEN("<|im_start|>assistant\\n<think>\\n"),
        "chatml", "<|im_start|>system\nIt's me<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n", true, false);
    expect_frame(
        "{{ bos_token }}{{ 'Today: ' + strftime_now('%d %b %Y') }}" FOR(
            "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim "
            "+ '<|eot_id|>' }}") THEN("<|start_header_id|>assistant<|end_header_id|>\\n\\n"),
        "llama3", "Today: 26 Jul 2024<|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", true, true);
    expect_frame("{{ bos_token }}" FOR("{{ ' [INST] ' + message['content'] + ' [/INST]' }}"), "mistral", " [INST] ",
                 " [/INST]", true, false);
    expect_frame("<s>" FOR("{{ '<start_of_turn>' + message.role + '\\n' + message['content'].strip() + "
                           "'<end_of_turn>\\n' }}") THEN("<start_of_turn>model\\n"),
                 "gemma", "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", true, true);
    expect_frame(FOR("{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}") THEN("<|assistant|>"),
                 "phi3", "<|user|>", "<|end|><|assistant|>", false, false);
    expect_frame(FOR("{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}")
                     THEN("<|im_start|>assistant<|im_sep|>"),
                 "phi4", "<|im_start|>user<|im_sep|>", "<|im_end|><|im_start|>assistant<|im_sep|>", false, false);
    expect_frame("<|start|>system<|message|>{{ strftime_now('%Y-%m-%d') }}<|end|>" FOR(
                     "{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}") THEN("<|start|>assistant"),
                 "gpt-oss", "<|start|>system<|message|>2024-07-26<|end|><|start|>user<|message|>",
                 "<|end|><|start|>assistant", false, false);
    expect_frame(FOR("{{ '### ' + message.content + eos_token }}"), "other", "### ", "</s>", false, false);
}

UNIT_TEST(test_refused)
{
    static const char *const templates[][2] = {
        {"", "it does not write the message"},
        {FOR("{{ message.role }}"), "it does not write the message"},
        {FOR("{{ message.content|upper }}"), "it does not write the message"},
        {FOR("{{ message.content.replace('  ', ' ') }}"), "it does not write the message"},
        {FOR("{{ message.content }}{{ message.content }}"), "it writes the message twice"},
        {FOR("{{ message.content.rstrip() }}"), "on one side of the message only"},
        {FOR("{{ message.content|length }}{{ message.content }}"), "depends on the message"},
        {FOR("{% if '\\n' in message.content.strip() %}x{% endif %}{{ message.content }}"), "depends on the message"},
        {"{{ raise_exception('two messages, please') }}", "two messages, please"},
        {FOR("{{ message.content }}") "{% filter upper %}", "line 1: expected a statement"},
    };
    for (size_t i = 0; i < sizeof templates / sizeof *templates; i++) {
        chat_frame f;
        unit_refuses(chat_frame_read(&f, templates[i][0], "<s>", NULL, "model", &err), KVB_UNSUPPORTED,
                     templates[i][1]);
        ck_assert(!f.front && !f.back && !f.kind);
    }
}

// Spaces are those that Python's strip() removes, Unicode's included.
UNIT_TEST(test_spaces)
{
    static const struct {
        const char *text;
        size_t before, behind;
    } cases[] = {{"", 0, 0},
                 {"a", 0, 0},
                 {" \t\na\r\v", 3, 2},
                 {"\xC2\xA0\xE3\x80\x80x\xE2\x80\x83 \x1c", 5, 5},
                 {"\xE2\x80\x8Bx\xE2\x80\x8B", 0, 0}, // a zero-width space is none
                 {"  \n", 3, 3},
                 {"\xA0x\xA0", 0, 0}}; // broken UTF-8
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unit_numbers(utf8_spaces_before(cases[i].text, strlen(cases[i].text)), cases[i].before,
                     utf8_spaces_behind(cases[i].text, strlen(cases[i].text)), cases[i].behind);
    }
}

// BOS and EOS come from the tokenizer, the template from its configuration.
UNIT_TEST(test_of_tokenizer)
{
    static const char json[] =
        "{\"normalizer\":null,\"pre_tokenizer\":null,\"added_tokens\":[{\"id\":1,\"content\":\"<b>\","
        "\"special\":true},{\"id\":2,\"content\":\"<e>\",\"special\":true}],"
        "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]}}";
    static const char config[] =
        "{\"bos_token\":\"<b>\",\"eos_token\":\"<e>\",\"chat_template\":\"{{ bos_token }}[INST]{{ "
        "messages[0].content }}[/INST]{{ eos_token }}\"}";
    const json_text nothing = {NULL, 0}, whole = {json, sizeof json - 1}, with = {config, sizeof config - 1};
    tokenizer *t;
    chat_frame f;
    ck_assert_msg(tokenizer_from_json(&t, "folder", whole, with, nothing, &err) == KVB_OK, "%s", err.message);
    ck_assert_msg(chat_frame_of(&f, t, "model", &err) == KVB_OK, "%s", err.message);
    unit_strings(f.front, "[INST]", f.back, "[/INST]<e>");
    ck_assert(f.bos && !f.trim && strcmp(f.kind, "mistral") == 0);
    chat_frame_free(&f);
    tokenizer_free(t);
    ck_assert_int_eq(tokenizer_from_json(&t, "folder", whole, nothing, nothing, &err), KVB_OK);
    unit_refuses(chat_frame_of(&f, t, "model", &err), KVB_UNSUPPORTED, "model: has no chat template");
    tokenizer_free(t);
}

UNIT_TEST(test_control_tokens)
{
    static const char json[] =
        "{\"normalizer\":null,\"pre_tokenizer\":null,\"added_tokens\":[{\"id\":4,\"content\":\"<u>\",\"special\":true}]"
        ","
        "\"model\":{\"type\":\"BPE\",\"vocab\":{\"<\":0,\"u\":1,\">\":2,\"a\":3},\"merges\":[]}}";
    static const int32_t expected[2][12] = {{3, 4, 0, 1, 2, 3, 4, 3}, {3, 4, 4, 3, 4, 3}};
    static const size_t n_expected[2] = {8, 6};
    tokenizer *t;
    ck_assert_int_eq(tokenizer_from_json(&t, "folder", (json_text){json, sizeof json - 1}, (json_text){NULL, 0},
                                         (json_text){NULL, 0}, &err),
                     KVB_OK);
    for (int special = 0; special < 2; special++) {
        int32_t *ids;
        size_t n;
        ck_assert_int_eq(tokenizer_encode_framed(t, "a<u>", "<u>a", 4, "<u>a", special, &ids, &n, &err), KVB_OK);
        ck_assert_uint_eq(n, n_expected[special]);
        ck_assert_mem_eq(ids, expected[special], n * sizeof *ids);
        free(ids);
    }
    tokenizer_free(t);
}

UNIT_MAIN("profiler chat")
