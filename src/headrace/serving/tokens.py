"""/tokenize and /detokenize."""

import asyncio

from headrace.serving.api_errors import ApiError
from headrace.serving.chat_completions import encode_messages
from headrace.serving.requests import DetokenizeBody, TokenizeBody
from headrace.serving.responses import Detokenized, Tokenized
from headrace.serving.service import Service


async def tokenize(service: Service, body: TokenizeBody) -> Tokenized:
    """The tokens of a prompt or of a conversation. Raises ApiError."""
    engine = service.ready()
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        tokens = await encode_messages(
            service,
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            template_options=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        )
    else:
        assert body.prompt is not None
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name} is for messages, not for a prompt", param=name)
        special = body.add_special_tokens is not False
        tokens = await service.encode(body.prompt, special, "prompt")
    strings = None
    if body.return_token_strs:
        core = engine.tokenizer.core
        strings = [core.id_to_token(token) or "" for token in tokens]
    return Tokenized(len(tokens), engine.card.max_model_len, tokens, strings)


async def detokenize(service: Service, body: DetokenizeBody) -> Detokenized:
    """The text of tokens, special ones included. Raises ApiError."""
    core = service.ready().tokenizer.core
    service.check_model(body.model)
    size = core.get_vocab_size()
    for token in (min(body.tokens), max(body.tokens)) if body.tokens else ():
        if not 0 <= token < size:
            raise ApiError(
                400, f"tokens: {token} is not in the vocabulary (0 to {size - 1})", param="tokens"
            )
    # As a batch, since decode() would stop all other threads meanwhile.
    texts = await asyncio.to_thread(core.decode_batch, [body.tokens], skip_special_tokens=False)
    return Detokenized(str(texts[0]))
