"""A document and a question as the model's chat expects them.

S tokens.
"""

from typing import Any

from jaxtyping import Int
from torch import Tensor


def prompt_ids(tokenizer: Any, document: str, question: str) -> Int[Tensor, "1 S"]:
    """Token ids of one user turn that asks `question` about `document`; either may be empty, not both.

    Models without a chat template get the bare text.

    Raises:
        ValueError: for an empty prompt.
    """
    text = _turn(document.strip(), question.strip())
    if tokenizer.chat_template is None:
        return tokenizer(text, return_tensors="pt")["input_ids"]
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def _turn(document: str, question: str) -> str:
    if not document and not question:
        raise ValueError("the prompt is empty: give a question, a document, or both")
    if not document or not question:
        return document or question
    return f"Read the document and answer the question after it.\n\n{document}\n\nQuestion: {question}"
