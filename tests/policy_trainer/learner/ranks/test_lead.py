"""What ranks send to each other."""

import json

import numpy as np

from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.learner.ranks.lead import _completion, _fields, _prompt, _prompt_fields


def test_prompts_with_images_travel_as_json() -> None:
    images = {"pixel_values": np.ones((2, 3), np.float32), "image_grid_thw": np.array([[1, 2, 1]])}
    sent = json.loads(json.dumps([_prompt_fields(EncodedPrompt([1, 2], images)), _prompt_fields(EncodedPrompt([3]))]))
    first, second = (_prompt(**fields) for fields in sent)
    assert first.ids == [1, 2] and second.ids == [3] and not second.images
    assert all(np.array_equal(first.images[name], tensor) for name, tensor in images.items())


def test_completions_travel_as_json() -> None:
    sent = Completion(np.array([4, 1]), np.array([-0.5, -2], np.float32), finished=True, eos=True)
    got = _completion(**json.loads(json.dumps(_fields(sent))))
    assert (got.ids.tolist(), got.logps.tolist(), got.finished, got.eos) == ([4, 1], [-0.5, -2], True, True)
