"""kvpress's scorers by the names that kvbudget's tables give to metrics."""
import json

from kvpress import ExpectedAttentionPress, KeyDiffPress, SnapKVPress


def scorer(metadata, ratio):
    """Returns the kvpress scorer that the table was calibrated for; for a :lukv variant, kvpress's most similar one."""
    name, par = metadata["metric"], json.loads(metadata["metric_parameters"])
    if name.startswith("snapkv"):
        return SnapKVPress(ratio, window_size=int(par["window"]), kernel_size=int(par["kernel"]))
    if name.startswith("keydiff"):
        return KeyDiffPress(ratio)
    return ExpectedAttentionPress(ratio, n_future_positions=int(par["future"]), n_sink=int(par["sinks"]),
                                  epsilon=par["epsilon"])
