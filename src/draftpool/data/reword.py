"""Requests in other words: slips of the keyboard, a long instruction ahead, another format, or a model's own words."""

from __future__ import annotations

import re

import numpy as np

from draftpool import draws
from draftpool.data.generation import answer_prompts
from draftpool.targets.base import TargetModel
from draftpool.targets.load import end_ids, prompt_ids
from draftpool.targets.memory import check_batch

# Shorter words stay as they are: a slip would make another word of most.
_WORD = re.compile(r"[A-Za-z]{4,}")
_CODE = re.compile(r"(```.*?(?:```|\Z))", re.DOTALL)
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")

REASONING = (
    "Take your time with this one. Begin by saying in your own words what is asked. Then list what is known and what "
    "is missing, go through the problem one small step at a time, and after each step stop to check that it follows "
    "from the one before. If two ways are possible, try both and compare them. Give the final answer only when all "
    "steps agree.\n\n{text}",
    "You are a careful expert. Before you answer, make a plan of at least three steps and explain why each is needed. "
    "Carry the plan out, show all intermediate results, look for mistakes as a strict examiner would, and mend them. "
    "End with a short summary that someone in a hurry could rely on.\n\n{text}",
    "{text}\n\nDo not answer at once. First collect the facts above that matter, then reason from them to a "
    "conclusion, writing every thought down in full sentences. Ask yourself what could be wrong with your "
    "conclusion, and revise it where needed. Your reply must hold the reasoning and, after it, the answer.",
)
TEMPLATES = (
    "### Instruction:\n{text}\n\n### Response:",
    "Below is a task between two lines.\n---\n{text}\n---\nNow write the reply to the task.",
    "Q: {text}\nA:",
    "<request>\n{text}\n</request>\nRespond to the request.",
)
LLM = (
    "Say the following request in other words. Keep its meaning and every detail that is needed to answer it. "
    "Reply with the new request only.\n\n{text}"
)
# A request in other words may be this much longer.
LONGER, MORE_TOKENS = 1.5, 32


def _slip(word: str, generator: np.random.Generator) -> str:
    """One slip in a word, never in its first letter."""
    place = int(generator.integers(1, len(word)))
    letter = word[place]
    kind = int(generator.integers(4))
    if kind == 0:
        return word[:place] + word[place + 1 :]
    if kind == 1:
        return word[:place] + letter + word[place:]
    if kind == 2 and place + 1 < len(word):
        return word[:place] + word[place + 1] + letter + word[place + 2 :]
    row = next(row for row in _ROWS if letter.lower() in row)
    at = row.index(letter.lower())
    beside = row[at - 1] if at + 1 == len(row) or (at > 0 and generator.random() < 0.5) else row[at + 1]
    return word[:place] + (beside.upper() if letter.isupper() else beside) + word[place + 1 :]


def typos(text: str, rate: float, *key: str | int) -> str:
    """Put one slip of the keyboard into a share of the words; fenced code stays as it is.

    Args:
        text: What the user wrote.
        rate: Share of the words of at least four letters, at least one of them.
        key: Of the draws.
    """
    generator = draws.generator("typos", *key)
    parts = _CODE.split(text)
    words = [(part, word) for part in range(0, len(parts), 2) for word in _WORD.finditer(parts[part])]
    if not words:
        return text
    chosen = generator.permutation(len(words))[: max(1, round(rate * len(words)))]
    # From the back, so that places in front stay true.
    for part, word in sorted((words[index] for index in chosen), key=lambda at: (at[0], -at[1].start())):
        own = parts[part]
        parts[part] = own[: word.start()] + _slip(word.group(), generator) + own[word.end() :]
    return "".join(parts)


def framed(text: str, frames: tuple[str, ...], *key: str | int) -> str:
    """The request inside one of several frames (`REASONING`, `TEMPLATES`)."""
    return frames[int(draws.generator("frame", *key).integers(len(frames)))].replace("{text}", text)


def reworded_by_model(texts: list[str], model: TargetModel, tokenizer, batch: int) -> list[str]:
    """Requests in a model's own words, greedily; where it says nothing, the request as it was.

    Args:
        texts: What the user wrote.
        model: The rewording model.
        tokenizer: Its tokenizer, with a chat template.
        batch: Requests at the same time.

    Raises:
        DraftpoolError: If the batch does not fit into memory.
    """
    prompts = [
        prompt_ids(tokenizer, [{"role": "user", "content": LLM.replace("{text}", text)}]) for text in texts
    ]
    longest = max(len(tokenizer(text)["input_ids"]) for text in texts)
    ends = end_ids(tokenizer, model.hf_config)
    made = list(texts)
    limit = round(LONGER * longest) + MORE_TOKENS
    if model.supports_batches:
        longest_prompt = max(map(len, prompts))
        check_batch(
            model,
            min(batch, len(prompts)),
            longest_prompt + limit,
            longest_prompt,
            "config key `responses.batch_sequences`",
        )
    for index, answer in answer_prompts(model, prompts, ends, limit, batch, with_taps=False):
        # Each has its own room: a small model may go on for ever.
        room = round(LONGER * len(tokenizer(texts[index])["input_ids"])) + MORE_TOKENS
        said = tokenizer.decode(answer.ids[:room], skip_special_tokens=True).strip()
        made[index] = said or texts[index]
    return made
