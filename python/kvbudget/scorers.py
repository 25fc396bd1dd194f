"""Finds the metric that a name, a table or a press of kvpress means; and the two metrics that are built of others.

Names, parameters, defaults, protected tokens and presses come from the program's own rows (:func:`rows`); Python has
only the formulas.
"""

import functools
import json
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ._library import KVBudgetError, one_of
from ._program import program
from .metrics import TOVA, ExpectedAttention, KeyDiff, KNorm, LagKV, Metric, MorphKV, Seen, SnapKV, Step
from .models import AttentionLayer
from .ranking import open_ranking
from .table import Table

_LOCK = threading.Lock()  # presses look at the module, which threads may share


@dataclass(frozen=True)
class Press(Metric):
    """A ScorerPress of kvpress. It must see a whole prefill at once, so neither chunks nor second cuts are possible."""

    press: Any = None
    needs_hidden: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    @property
    def needs_queries(self) -> bool:
        return True

    @property
    def once(self) -> str:
        return "is a press of kvpress, which scores whole contexts in one pass"

    def observe(self, seen: Seen, layer: AttentionLayer, step: Step) -> None:
        seen.step = step if seen.n_tokens == 0 else None
        super().observe(seen, layer, step)

    def score(
        self, layer: AttentionLayer, keys: Tensor, values: Tensor, seen: Seen, places: Tensor, heads: slice
    ) -> Tensor:
        step = seen.step
        if step is None:
            raise KVBudgetError(f"{layer.name}: {self.name} scores whole contexts only, in one pass", "UNSUPPORTED")
        kwargs: dict[str, Any] = {"hidden_states": step.hidden[None], "past_key_values": None}
        if step.rope is not None:
            kwargs["position_embeddings"] = tuple(x[None] for x in step.rope)
        with _LOCK:
            own = layer.module.__dict__.get("rotary_emb")
            layer.module.__dict__["rotary_emb"] = layer.rotary  # where kvpress's scorers look for it
            try:
                scores: Tensor = self.press.score(
                    layer.module, step.hidden[None], keys[None], values[None], None, kwargs
                )
            finally:
                if own is None:
                    del layer.module.__dict__["rotary_emb"]
        seen.step = None
        return scores[0]


@dataclass(frozen=True)
class Learned(Metric):
    """A table's own ranking (`kvbudget learn`): per KV head a linear form of other metrics' scores and of recency."""

    table: Any = None
    features: tuple[Metric, ...] = ()

    @property
    def needs_queries(self) -> bool:
        return any(feature.needs_queries for feature in self.features)

    @property
    def least(self) -> int:
        return max(feature.least for feature in self.features)

    @property
    def once(self) -> str:
        if self.table.ranking.layer_mean:
            return (
                "ranks by the mean of its layer's heads, which once cut hold different tokens; `kvbudget learn --own`"
            )
        return next((f"is made of {f.name}, which {f.once}" for f in self.features if f.once), "")

    def observe(self, seen: Seen, layer: AttentionLayer, step: Step) -> None:
        seen.parts = seen.parts or [Seen() for _ in self.features]
        for feature, part in zip(self.features, seen.parts):
            feature.observe(part, layer, step)
        super().observe(seen, layer, step)

    def score(
        self, layer: AttentionLayer, keys: Tensor, values: Tensor, seen: Seen, places: Tensor, heads: slice
    ) -> Tensor:
        """Scores with the library, which takes rows for a whole text; if tokens are gone, recency is corrected here."""
        found = []
        for feature, part in zip(self.features, seen.parts or [Seen() for _ in self.features]):
            part.n_tokens = seen.n_tokens or keys.shape[1]
            found.append(feature.score(layer, keys, values, part, places, heads).float().cpu().numpy())
        features, at = np.stack(found), places.cpu().numpy()  # [F, G, T]
        first = heads.start or 0
        if features.shape[1] == self.table.info.n_kv_heads:
            scores = self.table.rank_layer(layer.index, features)
        else:
            scores = np.stack(
                [self.table.rank(layer.index, first + g, features[:, g]) for g in range(features.shape[1])]
            )
        n_rows, total = len(at), max(seen.n_tokens, int(at[-1]) + 1)
        if total != n_rows:
            recency = self.table.ranking.weights[layer.index, first : first + len(scores), -2, None]
            scores += (recency * (np.log(n_rows - np.arange(n_rows)) - np.log(total - at))).astype(np.float32)
        return torch.from_numpy(scores)


def of_press(scorer: Any) -> Metric:
    """Returns the metric of a kvpress ScorerPress, or of a pair (name, press). A metric that the C program has, too,
    gets the program's name, so that its tables fit; any other is called ``kvpress:Class:parameter=value``."""
    name, press = scorer if isinstance(scorer, tuple) else (None, scorer)
    if isinstance(press, Metric):
        return press
    kind = type(press).__name__
    if not callable(getattr(press, "score", None)):
        raise KVBudgetError(f"scorer: expected a ScorerPress of kvpress, found {kind}")
    known = _as_known(kind, press)
    if name is None:
        name = known.name if known else ":".join(["kvpress", kind, *_press_parameters(press)])
    if known is not None:
        return Press(name, known.parameters, known.protect_sink, known.protect_window, press=press)
    window = getattr(press, "window_size", 1)
    return Press(name, {}, 4, window if isinstance(window, int) else 1, press=press)


def _as_known(kind: str, press: Any) -> Metric | None:
    """Returns the program's first metric that has this press and a formula here, or None."""
    for base, row in rows().items():
        if row["press"] == kind and base in _known():
            given = {parameter: getattr(press, name) for name, parameter in row["press_arguments"].items()}
            return build(base, {k: int(v) if isinstance(v, bool) else v for k, v in given.items()})
    return None


def _press_parameters(press: Any) -> list[str]:
    """Lists numbers that are not the press's defaults; its own ratio is not a parameter of the score."""
    fields = getattr(type(press), "__dataclass_fields__", {})
    return [
        f"{name}={_text(getattr(press, name))}"
        for name, field in fields.items()
        if name != "compression_ratio"
        and isinstance(getattr(press, name, None), (bool, int, float))
        and getattr(press, name) != field.default
    ]


#: a metric's formula, by its name without variant and parameters
_FORMULAS: dict[str, type[Metric]] = {
    "keydiff": KeyDiff,
    "knorm": KNorm,
    "snapkv": SnapKV,
    "ea": ExpectedAttention,
    "morphkv": MorphKV,
    "tova": TOVA,
    "lagkv": LagKV,
}


@functools.cache
def rows() -> dict[str, Any]:
    """Returns what `kvbudget help metrics --json` says. Wheels contain it; without a wheel the program is run."""
    brought = Path(__file__).parent / "metrics.json"
    if brought.exists():
        text = brought.read_bytes()
    else:
        text = subprocess.run([program(), "help", "metrics", "--json"], capture_output=True, check=True).stdout
    found: dict[str, Any] = json.loads(text)
    return found


def _known() -> list[str]:
    return [base for base in rows() if base.split(":")[0] in _FORMULAS]


def parse(text: str) -> Metric:
    """Parses a metric, `name[:variant][:parameter=value]...`; a bare name means `:kvpress` if there is one."""
    plain = [part for part in text.split(":") if "=" not in part]
    given = dict(part.split("=", 1) for part in text.split(":") if "=" in part)
    base = ":".join(plain)
    base = base if base in _known() else f"{base}:kvpress"
    if base not in _known():
        raise KVBudgetError(
            f"metric {text!r} has no scorer in Python; expected one of {', '.join(_known())}, or a ScorerPress of "
            "kvpress"
        )
    defaults = rows()[base]["parameters"]
    if not given.keys() <= defaults.keys():
        raise KVBudgetError(f"metric {text!r}: its parameters are {', '.join(defaults) or 'none'}")
    return build(base, {name: _value(base, name, value) for name, value in given.items()})


def build(base: str, given: Mapping[str, Any]) -> Metric:
    """Returns a metric by its plain name and given parameters; its full name has those that are not defaults."""
    row = rows()[base]
    defaults = row["parameters"]
    values = {name: given.get(name, default) for name, default in defaults.items()}
    if int(values.get("kernel", 1)) % 2 == 0:
        raise KVBudgetError(f"metric {base}: kernel must be odd, found {values['kernel']}")
    named = "".join(f":{name}={_text(value)}" for name, value in values.items() if value != defaults[name])
    window = int(values["window"] if row["window_protected"] else row["protect_window"])
    return _FORMULAS[base.split(":")[0]](base + named, values, row["protect_sink"], window, row["constant"])


def of_recording(wishes: Sequence[Any]) -> list[Metric]:
    """Returns the metrics of a recording, from names, presses and tables. ``learned=FILE`` adds those that a ranking of
    `kvbudget learn` is made of, which `kvbudget solve --metric learned=FILE` needs in a record."""
    files = [w for w in wishes if isinstance(w, str) and w.startswith("learned=")]
    kinds: dict[type, Callable[[Any], Metric]] = {str: parse, Table: of_table}
    found = [kinds.get(type(w), of_press)(w) for w in wishes if w not in files]
    if len({m.name for m in found}) != len(found) or not wishes:
        raise KVBudgetError("metrics: expected at least one, and each once")
    features = {name: parse(name) for file in files for name in open_ranking(file.removeprefix("learned=")).metrics}
    return found + [metric for name, metric in features.items() if name not in {m.name for m in found}]


def of_table(table: Table) -> Metric:
    """Returns the metric that a table is for, with the table's own parameters, or with the ranking that it carries."""
    name, parameters, ranking = table.info.metric, table.info.metric_parameters, table.ranking
    if ranking is not None:
        features = tuple(parse(metric) for metric in ranking.metrics)
        return Learned(name, parameters, 4, 1, table=table, features=features)
    base = ":".join(part for part in name.split(":") if "=" not in part)
    if base not in _known():
        raise KVBudgetError(
            f"the table is for {name}, which has no scorer in Python; give one with scorer=, a ScorerPress of kvpress",
            "UNSUPPORTED",
        )
    return build(base, {k: v for k, v in parameters.items() if k in rows()[base]["parameters"]})


def _value(base: str, name: str, text: str) -> Any:
    row = rows()[base]
    if name in row["choices"]:
        return one_of(f"metric {base}: {name}", text, row["choices"][name].split("|"))
    try:
        return float(text) if name in row["real"] else int(text)
    except ValueError:
        raise KVBudgetError(f"metric {base}: {name} expects a number, found {text!r}") from None


def _text(value: Any) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)
