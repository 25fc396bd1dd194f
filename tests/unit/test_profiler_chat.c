// Chat templates: of every known kind what stands around a message, as transformers renders the template
// (tools/peer/compare_chat.py compares ids); what is not known for sure is refused; and a message's own control tokens
// are text while those of the frame are tokens.
#include "profiler/chat.h"
#include "profiler/tokenizer_json.h"
#include "unit.h"
#include <stdlib.h>
#include <string.h>

static kvb_error err;

static void expect_frame(const char *jinja, const char *kind, const char *front, const char *back, bool bos, bool trim)
{
    chat_frame f;
    ck_assert_msg(chat_frame_read(&f, jinja, "model", &err) == KVB_OK, "%s: %s", kind, err.message);
    ck_assert_str_eq(f.kind, kind);
    ck_assert_str_eq(f.front, front);
    ck_assert_str_eq(f.back, back);
    ck_assert_msg(f.bos == bos && f.trim == trim, "%s: bos %d, trim %d", kind, f.bos, f.trim);
    chat_frame_free(&f);
    ck_assert(!f.front && !f.back && !f.kind);
}

#define FOR(body) "{% for message in messages %}" body "{% endfor %}"
#define THEN(answer) "{% if add_generation_prompt %}{{ '" answer "' }}{% endif %}"
#define CHATML "{{ '<|im_start|>' + message['role'] + '\\n' + message[\"content\"] + '<|im_end|>' + '\\n' }}"

START_TEST(test_chatml)
{
    expect_frame(FOR(CHATML) THEN("<|im_start|>assistant\\n"), "chatml", "<|im_start|>user\n",
                 "<|im_end|>\n<|im_start|>assistant\n", false, false);
    expect_frame(
        "{# <|im_sep|> #}{{ bos_token }}{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nIt\\'s "
        "me<|im_end|>\\n' }}{% endif %}" FOR(CHATML) THEN("<|im_start|>assistant\\n<think>\\n"),
        "chatml", "<|im_start|>system\nIt's me<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n", true, false);
}
END_TEST

START_TEST(test_other_kinds)
{
    expect_frame(FOR("{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + "
                     "message['content'] | trim + '<|eot_id|>' %}{{ bos_token + content }}"),
                 "llama3", "<|start_header_id|>user<|end_header_id|>\n\n",
                 "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", true, true);
    expect_frame(
        "{{- bos_token }}{{- \"Cutting Knowledge Date: December 2023\\n\" }}{{- \"Today Date: \" + date_string }}" FOR(
            "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim "
            "+ '<|eot_id|>' }}"),
        "llama3",
        "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul "
        "2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", true, true);
    expect_frame("{{ bos_token }}" FOR("{{ ' [INST] ' + message['content'] + ' [/INST]' }}"), "mistral", " [INST] ",
                 " [/INST]", true, false);
    expect_frame(
        "{{ bos_token }}" FOR("{{- \"[INST]\" + system + \"\\n\\n\" + message[\"content\"] + \"[/INST]\" }}{{- "
                              "\"[INST]\" + message[\"content\"] + \"[/INST]\" }}"),
        "mistral", "[INST]", "[/INST]", true, false);
    expect_frame("{{ bos_token }}" FOR("{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + "
                                       "'<end_of_turn>\\n' }}") THEN("<start_of_turn>model\\n"),
                 "gemma", "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", true, true);
    expect_frame(FOR("{{'<|user|>' + '\\n' + message['content'] + '<|end|>' + '\\n' + '<|assistant|>' + '\\n'}}"),
                 "phi3", "<|user|>\n", "<|end|>\n<|assistant|>\n", false, false);
    expect_frame(FOR("{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}") THEN("<|assistant|>"),
                 "phi3", "<|user|>", "<|end|><|assistant|>", false, false);
    expect_frame(FOR("{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}")
                     THEN("<|im_start|>assistant<|im_sep|>"),
                 "phi4", "<|im_start|>user<|im_sep|>", "<|im_end|><|im_start|>assistant<|im_sep|>", false, false);
    expect_frame(
        "{%- set model_identity = \"You are ChatGPT, a large language model trained by OpenAI.\" %}{{- "
        "\"Knowledge cutoff: 2024-06\\n\" }}{{- \"# Valid channels: analysis, commentary, final. Channel must be "
        "included for every message.\" }}{{- \"<|start|>user<|message|>\" }}",
        "gpt-oss",
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: "
        "2024-06\nCurrent date: 2024-07-26\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. "
        "Channel must be included for every message.<|end|><|start|>user<|message|>",
        "<|end|><|start|>assistant", false, false);
}
END_TEST

START_TEST(test_refused)
{
    static const char *const templates[][2] = {
        {"", "is none of ChatML, Llama 3"},
        {"{{ '### Instruction:\\n' + message['content'] }}", "is none of ChatML, Llama 3"},
        {FOR(CHATML), "has marks of chatml"}, // how does the answer begin?
        {FOR(CHATML) THEN("<|im_start|>bot\\n"), "has marks of chatml"},
        {"{{ strftime_now('%d') }}" FOR(CHATML) THEN("<|im_start|>assistant\\n"), "has marks of chatml"},
        {"{{ '[INST] <<SYS>>' }}{{ '[INST] ' + message['content'] + '[/INST]' }}", "has marks of mistral"},
        {"{{ '[INST]' + name + message['content'] + '[/INST]' }}", "has marks of mistral"},
        {"{{ '[INST]", "has marks of mistral"},           // cut short
        {"{{ [INST] [/INST] }}", "has marks of mistral"}, // no text at all
        {"{{ '<|start|>user<|message|>' }}", "has marks of gpt-oss"},
        {"{{ bos_token }}\n" FOR(CHATML) THEN("<|im_start|>assistant\\n"), "has marks of chatml"}, // that is written
        {"x" FOR("  " CHATML) THEN("<|im_start|>assistant\\n"), "has marks of chatml"},
    };
    for (size_t i = 0; i < sizeof templates / sizeof *templates; i++) {
        chat_frame f;
        ck_assert_int_eq(chat_frame_read(&f, templates[i][0], "model", &err), KVB_UNSUPPORTED);
        ck_assert_msg(strstr(err.message, templates[i][1]), "%s: %s", templates[i][0], err.message);
        ck_assert(!f.front && !f.back && !f.kind);
    }
}
END_TEST

// Any prefix of a template is either known or refused, and reads nothing behind its end.
START_TEST(test_cut_templates)
{
    static const char whole[] = "{# c #}{{ bos_token }} {{ '<|im_start|>system\\nx<|im_end|>\\n' }}" FOR(
        CHATML) "raw 'text' {" THEN("<|im_start|>assistant\\n");
    for (size_t n = 0; n < sizeof whole; n++) {
        char *cut = strndup(whole, n);
        chat_frame f;
        ck_assert_ptr_nonnull(cut);
        kvb_status status = chat_frame_read(&f, cut, "model", &err);
        ck_assert(status == KVB_OK || status == KVB_UNSUPPORTED);
        chat_frame_free(&f);
        free(cut);
    }
}
END_TEST

START_TEST(test_control_tokens)
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
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, test_chatml);
    tcase_add_test(tc, test_other_kinds);
    tcase_add_test(tc, test_refused);
    tcase_add_test(tc, test_cut_templates);
    tcase_add_test(tc, test_control_tokens);
}

UNIT_MAIN("profiler chat", fill)
