// Scores answers as `kvbudget task` does (for tests/peer/ruler_prompts.py).
//
// usage: task_score FILE.jsonl
// Reads lines {"gold": ["...", ...], "answer": "..."} and prints the score of each, 0 to 1.
#include "evaluator/task.h"
#include <cJSON.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    FILE *from = argc == 2 ? fopen(argv[1], "r") : NULL;
    char *line = NULL;
    size_t size = 0;
    if (!from) return 2;
    while (getline(&line, &size, from) > 0) {
        cJSON *j = cJSON_Parse(line), *gold = cJSON_GetObjectItem(j, "gold"), *one;
        char *texts[TASK_MAX_GOLD];
        size_t n = 0;
        cJSON_ArrayForEach(one, gold) if (n < TASK_MAX_GOLD) texts[n++] = cJSON_GetStringValue(one);
        printf("%.17g\n", task_score(TASK_ALL, cJSON_GetStringValue(cJSON_GetObjectItem(j, "answer")), texts, n));
        cJSON_Delete(j);
    }
    free(line);
    return fclose(from) != 0;
}
