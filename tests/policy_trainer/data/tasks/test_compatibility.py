"""Whether model, tokenizer, problems and rewards are compatible."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]

from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.config import EvalConfig, PromptConfig
from policy_trainer.data.pictures import data_url, encode
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.data.vision import PictureProcessor
from policy_trainer.trainer.evaluation.standalone import evaluate_model
from shared.errors import UserError
from shared.logprobs.vision import vision_of
from shared.models import load_tokenizer
from shared.settings import from_values
from tests.policy_trainer.vision_models import FAMILIES, OTHERS, picture, save_vision_model

PICTURE = encode(picture(60, 90))


def evaluate(model: Path, rows: list[dict[str, Any]], **settings: Any) -> Any:
    """Among the first rows, which are held out."""
    path = model / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    sampling = {"max_completion_length": 4}
    data = {"path": path, "eval_path": path, **settings.pop("data", {})}
    config = from_values(
        EvalConfig, model=str(model), device="cpu", task="jsonl", data=data, sampling=sampling, **settings
    )
    return evaluate_model(config, lambda decoding, progress: None)


class TestPictures:
    @pytest.mark.parametrize("name", OTHERS)
    def test_a_model_that_is_not_shown_them_is_refused_before_it_answers(self, name: str, tmp_path: Path) -> None:
        save_vision_model(OTHERS[name], tmp_path)
        row = {"image": data_url(PICTURE), "prompt": "What?", "answer": "5"}
        with pytest.raises(UserError, match=r"are not supported for \w+; use Qwen2-VL, .* and SmolVLM2, or data"):
            evaluate(tmp_path, [row])
        with pytest.raises(UserError, match="pictures, which are not supported"):  # only a later row has a picture
            evaluate(tmp_path, [{"prompt": "What?", "answer": "5"}, row])

    def test_it_answers_texts(self, tmp_path: Path) -> None:
        save_vision_model(OTHERS["llava"], tmp_path)
        assert evaluate(tmp_path, [{"prompt": "What?", "answer": "5"}])[0].problems == 1

    @pytest.mark.slow
    def test_every_family_of_transformers_is_shown_them_or_refused(self) -> None:
        """Families that have a processor and whose default configuration gives a model."""
        refused = []
        for name in sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) & set(PROCESSOR_MAPPING_NAMES)):
            try:
                with torch.device("meta"):
                    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name))
            except Exception:
                continue
            if vision_of(model) is not None:
                assert name in (*FAMILIES, "qwen3_vl_moe", "qwen3_5_moe"), name
                continue
            config = EvalConfig(model="none")
            tokenizer: Any = object.__new__(type("NoTokenizer", (), {}))
            encoder = PromptEncoder(
                tokenizer, PromptConfig(), processor=PictureProcessor(config, tokenizer), model=model
            )
            with pytest.raises(UserError, match=r"are not supported for \w+; use Qwen2-VL"):
                encoder.encode(Problem("", ({"role": "user", "content": "?"},), images=(PICTURE,)))
            refused.append(name)
        assert {"llava", "idefics3", "gemma4", "internvl", "mllama"} <= set(refused)


class TestRows:
    ALTERNATING = (
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.content }}{% endfor %}"
    )

    def save(self, directory: Path, make_tiny: Any, *added: str) -> Path:
        """A text model whose template requires alternating roles, and whose embedding has a row for each token of its
        tokenizer except those in `added`."""
        tokenizer = make_tokenizer()
        make_tiny(vocabulary=len(tokenizer)).save_pretrained(directory)
        tokenizer.chat_template = self.ALTERNATING
        tokenizer.add_tokens([*added])
        tokenizer.save_pretrained(directory)
        return directory

    GOOD: ClassVar = {"messages": [{"role": "user", "content": "1+1=?"}], "answer": "2"}
    BAD: ClassVar = {"messages": [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}], "answer": "2"}

    def test_one_that_makes_no_prompt_is_left_out_and_named(self, make_tiny: Any, tmp_path: Path) -> None:
        model = self.save(tmp_path, make_tiny)
        with capture_logs() as events:
            evaluation = evaluate(model, [self.BAD, self.GOOD], data={"system_prompt": ""})[0]
        assert (evaluation.problems, evaluation.left_out) == (1, 1)
        left_out = next(event for event in events if event["event"] == "a held-out problem is left out")
        assert re.search(r"problems\.jsonl:1: .*roles must alternate", left_out["reason"])

    def test_none_that_makes_a_prompt(self, make_tiny: Any, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"^.*problems\.jsonl:1: .*roles must alternate"):
            evaluate(self.save(tmp_path, make_tiny), [self.BAD] * 3, data={"system_prompt": ""})

    def test_one_that_ends_with_an_answer(self, make_tiny: Any, tmp_path: Path) -> None:
        answered = {"messages": [*self.GOOD["messages"], {"role": "assistant", "content": "It is"}], "answer": "2"}
        with capture_logs() as events:
            evaluate(self.save(tmp_path, make_tiny), [answered, self.GOOD], data={"system_prompt": ""})
        warned = next(event["event"] for event in events if "message is the assistant's" in event["event"])
        assert "--data.assistant-prefill is for how all answers begin" in warned
        with capture_logs() as events:
            evaluate(tmp_path, [self.GOOD], data={"system_prompt": ""})
        assert not any("assistant" in event["event"] for event in events)

    def test_tokens_that_the_model_has_no_row_for(self, make_tiny: Any, tmp_path: Path) -> None:
        model = self.save(tmp_path, make_tiny, "+1")
        settings: dict[str, Any] = {"data": {"system_prompt": "", "prompt_style": "plain"}}
        with pytest.raises(
            UserError, match=r"problems\.jsonl:1: model: the token \+1 has id \d+, but the model's embed"
        ):
            evaluate(model, [self.GOOD], **settings)
        rows = [self.GOOD, {"prompt": "2=?", "answer": "2"}]
        assert evaluate(model, rows, **settings)[0].left_out == 1


@pytest.mark.parametrize("tags", [["<answer>", "</answer>"], ["<think>"], ["<solution>"]])
def test_tags_that_are_special_tokens(tags: list[str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_vision_model(OTHERS["llava"], tmp_path)))
    tokenizer.add_tokens(tags, special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    rows = [{"prompt": "Answer between <solution> and </solution>.", "answer": "2"}]
    named = f"model: {', '.join(tags)} .* special token.* drops them from the texts that rewards judge: "
    if "<answer>" in tags:
        with pytest.raises(UserError, match=named + "accuracy, format would find no answer; set "):
            evaluate(tmp_path, rows)
        return
    with capture_logs() as events:
        evaluate(tmp_path, rows)
    assert [bool(re.match(named, event["event"])) for event in events] == [True]
