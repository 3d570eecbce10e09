"""A tokenizer for tiny models: one token a character."""

import string
from typing import Any

# 0 to 3 are special
_LETTERS = ["<pad>", "<s>", "</s>", "<?>", *string.printable[:95], "\n"]

CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def letter_tokenizer(*, chat_template: str | None = CHAT) -> Any:
    """Encodes and decodes printable ASCII without loss; `</s>` ends a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate(_LETTERS)}, unk_token="<?>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<?>",
        chat_template=chat_template,
        model_max_length=4096,
    )
