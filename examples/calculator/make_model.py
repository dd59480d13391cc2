"""Saves a model with the chat template of this folder, which has tools, to model/: python make_model.py MODEL"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent

if __name__ == "__main__":
    (source,) = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(HERE / "model")
    tokenizer.save_pretrained(HERE / "model")
