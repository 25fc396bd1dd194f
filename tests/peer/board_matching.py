"""Rows of the board that change what is kept, from papers outside kvpress: Attention Matching and folding.

Attention Matching (arXiv 2602.16284), the published code's fast setting, with the context's own queries or those of a
second prefill that repeats the context. Per KV head: the keys with the highest root mean square of attention over all
queries of its group, a bias log w for each with w in [e^-3, e^3] by least squares on the masses of attention, and
values by least squares on the outputs. Nothing is causal and nothing is protected there. It keeps as many tokens in
every head, or what kvbudget's table says: the paper's own budgets exist for other models.

Folding (kvfold): each evicted token goes to the kept one whose key points most nearly the same way. That one's value
becomes the mean weighted by the scores, and its bias log(1 + sum of exp(log score - own log score)). Keys stay; the
first four tokens are kept and take nothing in.
"""
import time

import torch
from board_context import Absent, Cut, inputs_of

SINK = 4
LIMIT = 3.0  # of a bias, in either direction
STEPS, POWERS = 2, 3  # of projected gradient, and of the power iteration for its step


@torch.no_grad()
def repeated(context):
    """Returns what the attention layers are given, (hidden, rope) each, when the context is read a second time."""
    if "repeated" not in context.scores:
        if context.has_windows:
            raise Absent("layers with windows do not see what is repeated")
        start = time.process_time()
        with inputs_of(context.layers) as seen:
            context.model.model(context.ids, past_key_values=context.plain_cache())
        context.scores["repeated"] = [seen[x.index] for x in context.layers], time.process_time() - start
    return context.scores["repeated"]


def solve(m, y):
    """Returns the least squares solution; a singular system gets a ridge, as in the published code."""
    x = torch.linalg.lstsq(m, y, driver="gels").solution
    if bool(torch.isfinite(x).all()):
        return x
    a = m.T @ m
    a.diagonal().add_(1e-6)
    return torch.cholesky_solve(m.T @ y, torch.linalg.cholesky(a))


def weights_of(m, y):
    """Returns w [t] in [e^-3, e^3] that makes m w near y: least squares, clamped, then steps down the gradient."""
    low, high = torch.tensor([-LIMIT, LIMIT]).exp().tolist()
    w = solve(m, y[:, None])[:, 0].clamp(low, high)
    u = torch.ones_like(w) / w.numel() ** 0.5
    for _ in range(POWERS):
        u = m.T @ (m @ u)
        u = u / u.norm().clamp(min=1e-12)
    step = 1 / (m @ u).square().sum().clamp(min=1e-12)
    for _ in range(STEPS):
        w = (w - step * (m.T @ (m @ w - y))).clamp(low, high)
    return w


def match(q, k, v, t):
    """Returns positions [t], biases [t] and values [t, d] for one KV head. q: [n, d], scaled; k, v: [T, d]."""
    scores = q @ k.T
    top = scores.amax(1, keepdim=True)
    mass = (scores - top).exp_()
    total = mass.sum(1)
    at = (mass / total[:, None]).square_().mean(0).topk(t).indices
    m = mass[:, at]
    bias = weights_of(m, total).log()
    x = (scores[:, at] + bias).softmax(1)
    return at, bias, solve(x, (mass @ v) / total[:, None])


def put(cut, layer, places, biases, values):
    """Adds one layer to a cut, from a list for its KV heads."""
    groups, n = layer.keys.shape[1:3]
    hidden, bias = torch.ones(groups, n, dtype=torch.bool), torch.zeros(groups, n)
    changed = layer.values[0].clone()
    for h, at in enumerate(places):
        hidden[h, at], bias[h, at], changed[h, at] = False, biases[h], values[h]
    cut.hidden.append(hidden)
    cut.bias.append(bias)
    cut.values.append(changed)


def matched(by_table=False, repeat=False):
    def of(context):
        given, spent = repeated(context) if repeat else ([(x.hidden, x.rope) for x in context.layers], 0.0)

        @torch.no_grad()
        def at(ratio):
            cut, start = Cut([], None, [], context.tokens, bias=[]), time.process_time()
            if by_table:
                keep = context.subject.table.keep(ratio, context.tokens, lookup="linear")
            for layer, (hidden, rope) in zip(context.layers, given):
                counts = keep[layer.index] if by_table else [round((1 - ratio) * context.tokens)] * layer.keys.shape[1]
                q = layer.queries(hidden, rope)[0].reshape(layer.keys.shape[1], -1, layer.keys.shape[3])
                found = [match(q[h], layer.keys[0, h], layer.values[0, h], int(t)) for h, t in enumerate(counts)]
                put(cut, layer, *zip(*found))
            cut.seconds = time.process_time() - start + spent
            return cut
        return at
    return of


def fold(k, v, s, t):
    """Returns positions [t], biases and values for one KV head. k, v: [T, d]; s: [T], logarithms of scores."""
    s = s.clone()
    s[:SINK] = float("inf")
    at = s.topk(t).indices.sort().values
    gone = torch.ones(len(s), dtype=torch.bool).index_fill(0, at, False).nonzero()[:, 0]
    near = torch.nn.functional.normalize(k, dim=-1)
    near = near[gone] @ near[at[SINK:]].T
    into = near.argmax(1) + SINK
    w = (s[gone] - s[at][into]).exp()
    added = torch.zeros(t).index_add_(0, into, w)
    values = v[at].index_add(0, into, w[:, None] * v[gone]) / (1 + added)[:, None]
    return at, added.log1p(), values


def folded(make):
    """Folds what a scorer of kvpress with scores above 0 evicts."""
    def of(context):
        press = make()

        @torch.no_grad()
        def at(ratio):
            cut, start = Cut([], None, [], context.tokens, bias=[]), time.process_time()
            for layer in context.layers:
                layer.module.rotary_emb = layer.press_rotary()
                s = press.score(layer.module, layer.hidden, layer.keys, layer.values, None, layer.given())[0]
                del layer.module.rotary_emb
                t = round((1 - ratio) * context.tokens)
                found = [fold(layer.keys[0, h], layer.values[0, h], s[h].clamp(min=1e-30).log(), t)
                         for h in range(len(s))]
                put(cut, layer, *zip(*found))
            cut.seconds = time.process_time() - start
            return cut
        return at
    return of
