#include "profiler/chat.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- The template's expressions, as one line ----

// Stands where a text begins or ends; no template holds it.
#define QUOTE "\x01"

typedef struct squeezer {
    char *out; // as long as the template at most
    size_t n;
} squeezer;

static void put(squeezer *s, char c)
{
    s->out[s->n++] = c;
}

// 'a' + 'b' is one text.
static void open_text(squeezer *s)
{
    if (s->n >= 2 && s->out[s->n - 1] == '+' && s->out[s->n - 2] == QUOTE[0]) s->n -= 2;
    else put(s, QUOTE[0]);
}

// A text in quotes, its escapes undone; returns the place behind it.
static const char *squeeze_text(squeezer *s, const char *p)
{
    char quote = *p++;
    open_text(s);
    for (; *p && *p != quote; p++) {
        if (*p == '\\' && p[1]) {
            p++;
            put(s, (char)(*p == 'n' ? '\n' : *p == 't' ? '\t' : *p));
        } else {
            put(s, *p);
        }
    }
    put(s, QUOTE[0]);
    return *p ? p + 1 : p;
}

// Does Jinja write anything of these spaces? transformers sets trim_blocks (no line end behind a block or comment) and
// lstrip_blocks (no blanks in front of one that begins its line); '-' in a tag takes all spaces on its side.
static bool writes_spaces(const char *jinja, const char *spaces, size_t size)
{
    const char *begin = spaces, *end = spaces + size;
    bool left_block = spaces - jinja >= 3 && spaces[-1] == '}' && (spaces[-2] == '%' || spaces[-2] == '#');
    bool right_block = end[0] == '{' && (end[1] == '%' || end[1] == '#');
    if (spaces - jinja >= 3 && spaces[-1] == '}' && spaces[-3] == '-') return false;
    if ((right_block || strncmp(end, "{{", 2) == 0) && end[2] == '-') return false;
    if (right_block) {
        const char *line = end;
        while (line > spaces && line[-1] != '\n') line--;
        if (line > spaces || line == jinja) end = line;
    }
    if (left_block && begin < end && *begin == '\n') begin++;
    if (!spaces[size] && end > begin && end[-1] == '\n') end--; // at the end of the template
    return end > begin;
}

// Plain text between blocks, without spaces at its begin; false where it is spaces that are written.
static bool squeeze_plain(squeezer *s, const char *jinja, const char *p, size_t size)
{
    size_t spaces = strspn(p, " \t\r\n");
    if (spaces >= size) return !writes_spaces(jinja, p, size);
    put(s, QUOTE[0]);
    for (size_t i = spaces; i < size; i++) put(s, p[i]);
    put(s, QUOTE[0]);
    return true;
}

// A block or expression without spaces; returns the place behind it.
static const char *squeeze_tag(squeezer *s, const char *p)
{
    const char *end = p[1] == '{' ? "}}" : "%}";
    put(s, '{');
    for (p += 2; *p && strncmp(p, end, 2) != 0;) {
        if (*p == '\'' || *p == '"') p = squeeze_text(s, p);
        else if (strchr(" \t\r\n-", *p)) p++;
        else put(s, *p++);
    }
    put(s, '}');
    return *p ? p + 2 : p;
}

// What stands in {{ }} and {% %}, and the text between them as a text in quotes too. Comments are left out. Malloc'd,
// or NULL: no memory. *sure is false where spaces between blocks would be written, which the kinds below know nothing
// of.
static char *squeeze(const char *jinja, bool *sure)
{
    squeezer s = {malloc(2 * strlen(jinja) + 3), 0};
    *sure = true;
    if (!s.out) return NULL;
    for (const char *p = jinja; *p;) {
        if (strncmp(p, "{#", 2) == 0) {
            const char *end = strstr(p, "#}");
            p = end ? end + 2 : p + strlen(p);
        } else if (strncmp(p, "{{", 2) == 0 || strncmp(p, "{%", 2) == 0) {
            p = squeeze_tag(&s, p);
        } else {
            size_t size = 1 + strcspn(p + 1, "{");
            *sure &= squeeze_plain(&s, jinja, p, size);
            p += size;
        }
    }
    s.out[s.n] = '\0';
    return s.out;
}

// ---- Looking for texts ----

static bool has(const char *line, const char *what)
{
    return strstr(line, what) != NULL;
}

// The message's own filter is trim.
static bool trims(const char *line)
{
    static const char *const contents[] = {"message[" QUOTE "content" QUOTE "]|trim", "message.content|trim",
                                           "+content|trim"};
    for (size_t i = 0; i < sizeof contents / sizeof *contents; i++)
        for (const char *at = line; (at = strstr(at, contents[i])); at++)
            if (at == line || at[-1] != 's') return true;
    return false;
}

// The first text behind `from` that begins with `mark`, its size in *size; NULL: there is none.
static const char *text_behind(const char *from, const char *mark, size_t *size)
{
    char quoted[64];
    snprintf(quoted, sizeof quoted, QUOTE "%s", mark);
    const char *at = strstr(from, quoted);
    if (!at) return NULL;
    *size = strcspn(at + 1, QUOTE);
    return at + 1;
}

// The text behind the last "add_generation_prompt": what the answer begins with.
static const char *answer_begins(const char *line, const char *mark, size_t *size)
{
    static const char word[] = "add_generation_prompt";
    const char *last = NULL;
    for (const char *at = line; (at = strstr(at, word)); at++) last = at;
    const char *text = last ? strstr(last, QUOTE) : NULL;
    if (!text || strncmp(text + 1, mark, strlen(mark)) != 0) return NULL;
    *size = strcspn(text + 1, QUOTE);
    return text + 1;
}

// ---- The kinds ----

// Fills front and back; false where the template has something that the kind does not explain.
typedef bool frame_reader(FILE *front, FILE *back, const char *line);

// A system text of the template's own stands between the marks as one text, without a variable.
static bool read_chatml(FILE *front, FILE *back, const char *line)
{
    static const char begin[] = "<|im_start|>system\n", end[] = "<|im_end|>\n";
    size_t size = 0, n;
    for (const char *at = line; (at = text_behind(at, begin, &n)) && !size; at += n)
        if (n > sizeof begin + sizeof end - 2 && strncmp(at + n - (sizeof end - 1), end, sizeof end - 1) == 0) {
            size = n;
            fwrite(at, 1, n, front);
        }
    fputs("<|im_start|>user\n", front);
    fputs("<|im_end|>\n", back);
    const char *answer = answer_begins(line, "<|im_start|>assistant\n", &n);
    if (answer) fwrite(answer, 1, n, back);
    return answer && !has(line, "strftime_now") && !has(line, "|im_start|>\n");
}

static bool read_phi4(FILE *front, FILE *back, const char *line)
{
    fputs("<|im_start|>user<|im_sep|>", front);
    fputs("<|im_end|><|im_start|>assistant<|im_sep|>", back);
    return has(line, QUOTE "<|im_start|>user<|im_sep|>" QUOTE) && has(line, "<|im_start|>assistant<|im_sep|>");
}

static bool read_llama3(FILE *front, FILE *back, const char *line)
{
    if (has(line, "Cutting Knowledge Date: December 2023\n"))
        fputs("<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
              "Today Date: 26 Jul 2024\n\n<|eot_id|>",
              front);
    else if (has(line, "Date")) return false;
    fputs("<|start_header_id|>user<|end_header_id|>\n\n", front);
    fputs("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", back);
    return has(line, "<|end_header_id|>\n\n") && has(line, "<|eot_id|>");
}

// [INST] and [/INST], with or without blanks; newer ones with a system text of their own hold dates.
static bool read_mistral(FILE *front, FILE *back, const char *line)
{
    static const char open[] = "[INST]", close[] = "[/INST]";
    const char *message[] = {"+message[" QUOTE "content", "+message.content", "+content"};
    const char *begin = NULL, *end = strstr(line, close);
    for (const char *at = line; (at = strstr(at, open)); at++) begin = at; // the last one is the message without system
    if (!begin || !end || has(line, "[SYSTEM_PROMPT]") || has(line, "<<SYS>>")) return false;
    size_t size = strcspn(begin, QUOTE);
    bool joined = false;
    for (int i = 0; begin[size] && i < 3; i++) joined |= strncmp(begin + size + 1, message[i], strlen(message[i])) == 0;
    if (begin[-1] == ' ' && begin[-2] == QUOTE[0]) begin--, size++;
    fwrite(begin, 1, size, front);
    while (end > line && end[-1] != QUOTE[0]) end--;
    fwrite(end, 1, strcspn(end, QUOTE), back);
    return joined;
}

static bool read_gemma(FILE *front, FILE *back, const char *line)
{
    fputs("<start_of_turn>user\n", front);
    fputs("<end_of_turn>\n<start_of_turn>model\n", back);
    return has(line, "<end_of_turn>\n") && has(line, "<start_of_turn>model\n");
}

// The line ends of Phi-3 are not those of Phi-4-mini.
static bool read_phi3(FILE *front, FILE *back, const char *line)
{
    bool line_ends = has(line, "|>\n" QUOTE "+message");
    const char *end = line_ends ? "\n" : "";
    fprintf(front, "<|user|>%s", end);
    fprintf(back, "<|end|>%s<|assistant|>%s", end, end);
    return (line_ends || has(line, "|>" QUOTE "+message")) && has(line, line_ends ? "<|end|>\n" : "<|end|>" QUOTE);
}

static bool read_gpt_oss(FILE *front, FILE *back, const char *line)
{
    fputs("<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: "
          "2024-06\nCurrent date: 2024-07-26\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. "
          "Channel must be included for every message.<|end|><|start|>user<|message|>",
          front);
    fputs("<|end|><|start|>assistant", back);
    return has(line, "You are ChatGPT, a large language model trained by OpenAI.") &&
           has(line, "Knowledge cutoff: 2024-06\n") &&
           has(line, "# Valid channels: analysis, commentary, final. Channel");
}

static const struct {
    const char *name, *mark, *but_not; // the first whose mark the template has
    frame_reader *read;
} kinds[] = {{"phi4", "<|im_sep|>", NULL, read_phi4},
             {"chatml", "<|im_start|>", NULL, read_chatml},
             {"llama3", "<|start_header_id|>", NULL, read_llama3},
             {"gpt-oss", "<|start|>", NULL, read_gpt_oss},
             {"gemma", "<start_of_turn>", NULL, read_gemma},
             {"mistral", "[INST]", NULL, read_mistral},
             {"phi3", "<|end|>", "<|system|>\n" QUOTE "+system", read_phi3}};

static kvb_status fill(chat_frame *out, size_t kind, const char *line, bool sure, const char *name, kvb_error *err)
{
    size_t sizes[2];
    FILE *front = open_memstream(&out->front, &sizes[0]), *back = open_memstream(&out->back, &sizes[1]);
    bool known = front && back && kinds[kind].read(front, back, line);
    bool written = front && fclose(front) == 0;
    written = back && fclose(back) == 0 && written;
    if (!written || !out->front || !out->back) return kvb_fail(err, KVB_MEMORY, "%s: no memory for a template", name);
    if (!known || !sure)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: the chat template has marks of %s, but is not one of its known forms; wrap the texts "
                        "yourself and give --special in the place of --chat",
                        name, kinds[kind].name);
    out->kind = kinds[kind].name;
    out->trim = trims(line) || kinds[kind].read == read_gemma;
    out->bos = has(line, "bos_token");
    return KVB_OK;
}

kvb_status chat_frame_read(chat_frame *out, const char *jinja, const char *name, kvb_error *err)
{
    *out = (chat_frame){0};
    bool sure;
    char *line = squeeze(jinja, &sure);
    if (!line) return kvb_fail(err, KVB_MEMORY, "%s: no memory for a template", name);
    kvb_status status = KVB_OK;
    size_t n = sizeof kinds / sizeof *kinds, i = 0;
    while (i < n && (!has(line, kinds[i].mark) || (kinds[i].but_not && has(line, kinds[i].but_not)))) i++;
    if (i < n) status = fill(out, i, line, sure, name, err);
    else
        status = kvb_fail(err, KVB_UNSUPPORTED,
                          "%s: the chat template is none of ChatML, Llama 3, Mistral, Gemma, Phi and gpt-oss; wrap the "
                          "texts yourself and give --special in the place of --chat",
                          name);
    free(line);
    if (status != KVB_OK) chat_frame_free(out);
    return status;
}

void chat_frame_free(chat_frame *f)
{
    free(f->front);
    free(f->back);
    *f = (chat_frame){0};
}
