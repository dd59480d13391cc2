"""What rank 0 sends to the other ranks."""

import json

import numpy as np

from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.ranks.lead import _prompt, _prompt_fields


def test_prompts_with_images_travel_as_json() -> None:
    images = {"pixel_values": np.ones((2, 3), np.float32), "image_grid_thw": np.array([[1, 2, 1]])}
    sent = json.loads(json.dumps([_prompt_fields(EncodedPrompt([1, 2], images)), _prompt_fields(EncodedPrompt([3]))]))
    first, second = (_prompt(**fields) for fields in sent)
    assert first.ids == [1, 2] and second.ids == [3] and not second.images
    assert all(np.array_equal(first.images[name], tensor) for name, tensor in images.items())
