"""`sampling.generation_kwargs`: settings of sampling by the names of transformers and vLLM."""

from collections.abc import Mapping
from typing import Any

# What the sampler does, and how log-probs are computed, follows from these.
_SETTINGS: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")},
    "stop_token_ids": "stop_token_ids",
    "stop_strings": "stop",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
}
# By name, the value that changes nothing. Others are refused: trainer and server compute log-probs without them.
_OFF: Mapping[str, Any] = {
    "do_sample": True, "num_beams": 1, "penalty_alpha": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "guidance_scale": 1.0, "min_length": 0, "min_new_tokens": 0, "min_tokens": 0, "logit_bias": {},
    "sequence_bias": {}, "bad_words": [], "bad_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": [],
    "allowed_token_ids": [], "forced_bos_token_id": [], "forced_eos_token_id": [], "structured_outputs": {},
    "exponential_decay_length_penalty": [], "watermarking_config": {},
}  # fmt: skip
_INSTEAD: Mapping[str, str] = {
    "n": "sampling.num_generations has the number of completions",
    "num_return_sequences": "sampling.num_generations has the number of completions",
    "seed": "the setting `seed` is the run's, from which each completion's follows",
    "eos_token_id": "the model's generation_config.json has its EOS tokens; stop_token_ids adds others",
    "ignore_eos": "completions end at the model's EOS tokens",
    "max_length": "it counts the prompt, too: give max_new_tokens",
}


def with_generation_kwargs(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the group `sampling`, where those of its `generation_kwargs` have replaced others, as in TRL.

    Raises ValueError for a name that is none of these, and for what changes the distribution unknown to the log-probs.
    """
    values = {**sampling}
    for name, value in (values.pop("generation_kwargs", None) or {}).items():
        where = f"sampling.generation_kwargs: {name}"
        if name in _SETTINGS:
            if value is not None:
                values[_SETTINGS[name]] = _ours(name, value)
        elif name in _OFF:
            if value not in (None, _OFF[name]) and value not in ([], {}):
                raise ValueError(
                    f"{where} changes the sampling distribution, but trainer and server compute log-probs without it, "
                    "so the ratio and the KL would be wrong: leave it out"
                )
        else:
            raise ValueError(f"{where} cannot be set: {_INSTEAD.get(name, 'there are ' + ', '.join(_SETTINGS))}")
    return values


def _ours(name: str, value: Any) -> Any:
    if name in ("stop", "stop_strings") and isinstance(value, str):
        return [value]
    return 0 if name == "top_k" and value == -1 else value  # vLLM's value for no limit
