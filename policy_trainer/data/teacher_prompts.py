"""What a teacher reads in place of the prompt: the prompt together with what only the teacher may know, such as a
demonstration (SDFT, arXiv 2601.19897)."""

import re
from dataclasses import replace

from policy_trainer.data.pictures import PLACEHOLDER
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import EncodedPrompt, PromptEncoder, PromptTooLong, UnusablePrompt
from shared.spelling import spell_setting

# The column of a row with what only the teacher reads; TRL's name.
PRIVILEGED_CONTEXT = "privileged_context"
_PLACE = re.compile(r"\{(prompt|privileged_context)\}")


def with_teacher_prompt(
    prompt: EncodedPrompt, problem: Problem, template: str | None, encoder: PromptEncoder
) -> EncodedPrompt:
    """The encoded prompt of a problem, with the ids that a teacher reads in its place; unchanged without a template.

    The template takes the place of the user's last message, or of a text without messages. Raises UnusablePrompt for a
    problem without a privileged context, and the errors of `PromptEncoder.encode`.
    """
    if template is None:
        return prompt
    try:
        read = encoder.encode(_for_teacher(problem, template, encoder))
    except PromptTooLong as error:
        raise PromptTooLong(f"{spell_setting('data.teacher_prompt_template')}: {error.problem}", error.remedy) from None
    return replace(prompt, teacher_ids=tuple(read.ids))


def _for_teacher(problem: Problem, template: str, encoder: PromptEncoder) -> Problem:
    where, setting = f"{problem.where}: " if problem.where else "", spell_setting("data.teacher_prompt_template")
    context = problem.extras.get(PRIVILEGED_CONTEXT)
    if not isinstance(context, str):
        raise UnusablePrompt(
            f"{where}{PRIVILEGED_CONTEXT}: must be a text, got {type(context).__name__}",
            f"give each row that column, which {setting} adds to the teacher's prompt",
        )
    if encoder.is_rendered(problem.prompt):
        raise UnusablePrompt(
            f"{where}prompt: it has been through the chat template, and {setting} comes before that",
            "give messages, or a text that has not been through it",
        )
    messages, text = list(problem.messages), problem.prompt
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if messages and not users:
        raise UnusablePrompt(f"{where}prompt: no message is a user's, and {setting} takes the place of one", "add one")
    for last in users[-1:]:
        messages[last] = {**messages[last], "content": _filled(template, messages[last]["content"], context)}
    if problem.images and sum(message["content"].count(PLACEHOLDER) for message in messages) != len(problem.images):
        raise UnusablePrompt(
            f"{where}{setting} repeats the places of pictures, or {PRIVILEGED_CONTEXT} has more of them",
            f"give a template with one {{prompt}}, and a context without {PLACEHOLDER}",
        )
    return replace(problem, messages=tuple(messages), prompt=text and _filled(template, text, context))


def _filled(template: str, prompt: str, context: str) -> str:
    values = {"prompt": prompt, PRIVILEGED_CONTEXT: context}
    return _PLACE.sub(lambda match: values[match[1]], template)
