import numpy as np

from policy_trainer.data.completion import Completion, group_tokens
from policy_trainer.data.prompts import EncodedPrompt


def test_group_tokens_packs() -> None:
    completions = [
        Completion(np.array([4, 5]), np.array([-1.0, -2.0], np.float32), True),
        Completion(np.array([6]), np.array([-3.0], np.float32), False),
    ]
    tokens, logps, finished = group_tokens(EncodedPrompt([1, 2, 3]), completions)
    assert tokens.prompt_ids.tolist() == [1, 2, 3]
    assert tokens.completion_ids.tolist() == [4, 5, 6]
    assert tokens.completion_lengths.tolist() == [2, 1]
    assert logps.tolist() == [-1, -2, -3]
    assert finished.tolist() == [True, False]
