"""Prompts with pictures, by each family's own processor."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import EvalConfig
from policy_trainer.data.pictures import encode
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import EncodedPrompt, PromptEncoder, PromptTooLong, UnusablePrompt, prompt_encoder
from policy_trainer.data.untrusted_text import SEPARATOR
from policy_trainer.data.vision import PictureProcessor
from shared.batch import TokenGroup
from shared.errors import UserError
from shared.logprobs.vision import vision_of
from shared.models import load_outline, load_tokenizer
from tests.policy_trainer.vision_models import FAMILIES, VOCABULARY, picture, save_vision_model
from tests.shared.logprobs.families import OLD_CACHES

PICTURES = encode(picture(60, 90)), encode(picture(100, 50))


def spoken(content: str, *images: bytes) -> Problem:
    return Problem("", ({"role": "user", "content": content},), images=images)


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_vision_model(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


def encoder(directory: Path, limit: int | None = None, **data: Any) -> PromptEncoder:
    config = EvalConfig.model_validate({"model": str(directory), "data": data})
    return prompt_encoder(config, load_tokenizer(str(directory)), limit=limit)


def checked_encoder(directory: Path, max_image_bytes: int | None = None) -> PromptEncoder:
    """An encoder that also checks prompts against the model."""
    config, outline = EvalConfig(model=str(directory)), load_outline(str(directory), revision=None)
    return prompt_encoder(config, load_tokenizer(str(directory)), outline, max_image_bytes=max_image_bytes)


@pytest.mark.parametrize("name", FAMILIES)
class TestFamilies:
    def test_the_models_check_accepts_placeholders_and_tensors(self, name: str, directories: dict[str, Path]) -> None:
        """One run of placeholders for each picture, of as many tokens as the tower makes features."""
        vision = vision_of(load_outline(str(directories[name]), revision=None))
        assert vision is not None
        encode = encoder(directories[name]).encode
        for problem in (spoken("A <image> and <image>?", *PICTURES), spoken("It.", PICTURES[0]), spoken("No picture.")):
            prompt = encode(problem)
            vision.check(TokenGroup(np.array(prompt.ids), np.array([7]), np.array([1]), prompt.images))
            assert prompt.pictures == problem.images

    def test_unexpanded_ids_have_one_place_for_each_picture(self, name: str, directories: dict[str, Path]) -> None:
        family = FAMILIES[name]
        prompt = encoder(directories[name]).encode(spoken("A <image> and <image>?", *PICTURES))
        mark = family.picture if family.picture in VOCABULARY else "<|image_pad|>"
        assert prompt.unexpanded_ids.count(VOCABULARY[mark]) == 2
        assert len(prompt.unexpanded_ids) < len(prompt.ids)
        text = str(load_tokenizer(str(directories[name])).decode(prompt.unexpanded_ids)).replace(" ", "")
        assert text == f"<|user|>A{family.picture}and{family.picture}?<|end|><|assistant|>"

    def test_what_an_environment_shows_has_no_places_of_pictures(self, name: str, directories: dict[str, Path]) -> None:
        family, encode = FAMILIES[name], encoder(directories[name]).encode
        for images in ((), PICTURES[:1]):
            bare = encode(spoken("It.", *images))
            shown = f"<image> {family.picture} <|image_pad|>"
            prompt = encode(replace(spoken(f"It.{shown}", *images), shown=shown))
            for mark in {"<image>", family.picture, "<|image_pad|>"} & {*VOCABULARY}:
                for ids, expected in ((prompt.ids, bare.ids), (prompt.unexpanded_ids, bare.unexpanded_ids)):
                    assert ids.count(VOCABULARY[mark]) == expected.count(VOCABULARY[mark])
            assert {*prompt.images} == {*bare.images} and len(prompt.ids) > len(bare.ids)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("sizes", [[(60, 90)], [(300, 20), (20, 300), (64, 64)], [(28, 28)] * 4, [(200, 200)]])
def test_tensors_have_at_most_the_bytes_that_follow_from_the_tokens(
    name: str, sizes: list[tuple[int, int]], directories: dict[str, Path]
) -> None:
    vision = vision_of(load_outline(str(directories[name]), revision=None))
    assert vision is not None
    prompt = encoder(directories[name]).encode(spoken("It.", *(encode(picture(*size)) for size in sizes)))
    size = sum(tensor.nbytes for tensor in prompt.images.values())
    assert size <= vision.most_bytes(len(prompt)) < 40 * size


@pytest.mark.parametrize("name", FAMILIES)
def test_placeholders_in_a_text_without_pictures_are_text(name: str, directories: dict[str, Path]) -> None:
    outline = load_outline(str(directories[name]), revision=None)
    tokenizer, vision = load_tokenizer(str(directories[name])), vision_of(outline)
    assert vision is not None
    text = "".join(str(tokenizer.convert_ids_to_tokens(id)) for id in vision.placeholders) + " <image> is a tag"
    ids = checked_encoder(directories[name]).encode(spoken(text)).ids
    vision.check(TokenGroup(np.array(ids), np.array([7]), np.array([1])))
    assert str(tokenizer.decode(ids)).replace(" ", "") == f"<|user|>{text}<|end|><|assistant|>".replace(" ", "")


class TestQwen:
    @pytest.fixture
    def directory(self, directories: dict[str, Path]) -> Path:
        return directories["qwen2_5_vl"]

    def test_a_text_of_the_same_model_has_no_images(self, directory: Path) -> None:
        prompt = encoder(directory).encode(spoken("An <image> tag"))
        assert not prompt.images and not prompt.pictures
        assert prompt.unexpanded_ids is prompt.ids

    def test_a_template_that_takes_only_blocks_gets_texts_in_blocks(self, directory: Path) -> None:
        ids = encoder(directory).encode(spoken("What?")).ids
        assert str(load_tokenizer(str(directory)).decode(ids)).replace(" ", "") == "<|user|>What?<|end|><|assistant|>"

    def test_max_pixels_bounds_the_tokens(self, directory: Path) -> None:
        problem = spoken("It.", encode(picture(200, 200)))
        few, many = (encoder(directory, max_pixels=pixels).encode(problem) for pixels in (4 * 28**2, 16 * 28**2))
        assert few.images["image_grid_thw"].tolist() == [[1, 4, 4]]
        assert many.images["image_grid_thw"].tolist() == [[1, 8, 8]]
        assert len(many) - len(few) == 12
        enlarged = encoder(directory, min_pixels=9 * 28**2).encode(spoken("It.", encode(picture(30, 30))))
        assert enlarged.images["image_grid_thw"].tolist() == [[1, 6, 6]]

    def test_the_limit_counts_expanded_tokens(self, directory: Path) -> None:
        problem = spoken("It.", PICTURES[0])
        length = len(encoder(directory).encode(problem))
        assert len(encoder(directory, length).encode(problem)) == length
        with pytest.raises(PromptTooLong, match=rf"has {length} tokens .* lower --data\.max-pixels"):
            encoder(directory, length - 1).encode(problem)

    @pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
    def test_placeholders_of_the_model_beside_pictures_are_refused(self, token: str, directory: Path) -> None:
        problem = replace(spoken(f"A {token}", PICTURES[0]), where="rows.jsonl:31")
        with pytest.raises(
            UnusablePrompt, match=rf"^rows\.jsonl:31: data: a text contains {re.escape(token)}, the model's picture"
        ):
            checked_encoder(directory).encode(problem)

    def test_tools_beside_pictures(self, directory: Path) -> None:
        """Neither a token nor a separator may stand for a tool's text that looks like a token."""
        tokenizer = load_tokenizer(str(directory))
        tokenizer.add_tokens(["<think>", "\n\n"])
        config = EvalConfig(model=str(directory))
        coder = prompt_encoder(config, tokenizer, load_outline(str(directory), revision=None))
        schema = {"type": "function", "function": {"name": "f", "description": "Shows it.\n\nTwice.", "parameters": {}}}
        problem = replace(spoken("It.", PICTURES[0]), tools=(schema,), where="rows.jsonl:31")
        prompt = coder.encode(problem)
        assert prompt.images and SEPARATOR not in str(tokenizer.decode(prompt.unexpanded_ids))
        schema["function"]["description"] = "Writes <think> first."
        with pytest.raises(UserError, match=r"^tools: .* contains <think>, a token of the model") as error:
            coder.encode(problem)
        assert not isinstance(error.value, UnusablePrompt)

    def test_tensors_that_the_server_would_not_take(self, directory: Path) -> None:
        size = sum(tensor.nbytes for tensor in encoder(directory).encode(spoken("It.", PICTURES[0])).images.values())
        checked_encoder(directory, max_image_bytes=size).encode(spoken("It.", PICTURES[0]))
        with pytest.raises(UnusablePrompt, match=rf"have {size} bytes as tensors, but .*--max-body-mib \d+"):
            checked_encoder(directory, max_image_bytes=size - 1).encode(spoken("It.", PICTURES[0]))

    def test_a_processor_without_memory_leaves_no_row_out(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(**options: Any) -> None:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

        coder = encoder(directory)
        monkeypatch.setattr(PictureProcessor, "processor", staticmethod(fail))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            coder.encode(spoken("It.", PICTURES[0]))

    def test_a_shape_that_the_processor_refuses(self, directory: Path) -> None:
        problem = replace(spoken("It.", encode(picture(3000, 10))), where="rows.jsonl:31")
        with pytest.raises(UnusablePrompt, match=r"^rows\.jsonl:31: .*aspect ratio"):
            encoder(directory).encode(problem)

    def test_plain_prompts_are_refused(self, directory: Path) -> None:
        with pytest.raises(UserError, match="pictures need the model's chat template"):
            encoder(directory, prompt_style="plain").encode(spoken("It.", PICTURES[0]))


def test_pixels_that_are_not_rescaled_go_as_floats(tmp_path: Path) -> None:
    """A processor leaves them in uint8, which the wire has and no family takes."""
    directory = save_vision_model("gemma3", tmp_path)
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_rescale": False, "do_normalize": False}))
    pixels = encoder(directory).encode(spoken("A <image>?", PICTURES[0])).images["pixel_values"]
    assert pixels.dtype == np.float32 and pixels.max() > 200


def test_fixed_sizes_cannot_be_set(directories: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"data\.max_pixels: .* gives pictures a fixed size"):
        encoder(directories["gemma3"], max_pixels=1000).encode(spoken("It.", PICTURES[0]))


def test_a_model_of_texts_refuses_pictures(tokenizer: PreTrainedTokenizerFast, make_tiny: Any, tmp_path: Path) -> None:
    make_tiny().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no processor of pictures that can be loaded: .*give a vision-language"):
        encoder(tmp_path).encode(spoken("It.", PICTURES[0]))


def test_a_text_by_default_is_its_own_unexpanded_prompt() -> None:
    prompt = EncodedPrompt([1, 2])
    assert len(prompt) == 2 and prompt.unexpanded_ids == [1, 2] and not prompt.images


@pytest.mark.skipif(OLD_CACHES, reason="this transformers imports its processors with its models")
def test_texts_import_nothing_for_pictures() -> None:
    code = """
import sys
from policy_trainer.config import EvalConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import prompt_encoder
from policy_trainer.cli.demo.base_model import make_tokenizer
before = set(sys.modules)
prompt_encoder(EvalConfig(model="m"), make_tokenizer()).encode(Problem("", ({"role": "user", "content": "1"},)))
assert "PIL" not in set(sys.modules) - before, "Pillow"
assert not any("processing_auto" in name for name in sys.modules), "transformers' processors"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_processors_chat_template_if_the_tokenizer_has_none(directories: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(directories["llava_next"]))
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(str(tmp_path)).chat_template == template
