"""The special tokens of a model directory: what its JSON files say of them beyond `tokenizer.json`.

The rules are those of transformers. Where tokenizer_config.json lists `added_tokens_decoder`, its flags win over those
of `tokenizer.json`; else it is of an older time, and special_tokens_map.json and added_tokens.json count as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = "added_tokens_decoder"


def with_legacy_map(config: Mapping[str, Any], legacy_map: Mapping[str, Any]) -> Mapping[str, Any]:
    """tokenizer_config.json, and over it special_tokens_map.json where that still counts."""
    return config if _LISTED in config else {**config, **legacy_map}


def add_special_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], legacy_ids: Mapping[str, int]
) -> dict[str, str]:
    """Give `backend` the tokens that only the config knows, and the flags that the config gives to others.

    `legacy_ids` is added_tokens.json. Returns name -> text of the named ones. Raises an exception of any type for what
    is no token.
    """
    named = {name: _token(token, name) for name, token in _named(config).items()}
    texts = {token.content for token in named.values()}
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = {token.content: token for token in _listed(config, known, legacy_ids)}
    flagged = listed if _LISTED in config else {**known, **listed}
    for text, token in flagged.items():  # the library goes on skipping what was special once
        token.special = token.special or text in texts or (text in known and known[text].special)
    backend.add_tokens(list(flagged.values()))
    extra = [_token(token, "extra_special_tokens") for token in _extra(config)]
    backend.add_special_tokens([token for token in (*named.values(), *extra) if token.content not in known | listed])
    return {name: token.content for name, token in named.items()}


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> token; a model may have names of its own, such as image_token."""
    own = {name: token for name, token in config.items() if name.endswith("_token") and isinstance(token, str)}
    usual = {name: config[name] for name in _NAMED_TOKENS if config.get(name) is not None}
    extra = config.get("extra_special_tokens")
    return usual | own | (dict(extra) if isinstance(extra, Mapping) else {})


def _extra(config: Mapping[str, Any]) -> list[Any]:
    extra = config.get("extra_special_tokens")
    return list((None if isinstance(extra, Mapping) else extra) or config.get("additional_special_tokens") or [])


def _listed(
    config: Mapping[str, Any], known: Mapping[str, AddedToken], legacy_ids: Mapping[str, int]
) -> list[AddedToken]:
    """The tokens of the list in the order of their ids; of the legacy file those that the tokenizer lacks."""
    if _LISTED in config:
        by_id = sorted(config[_LISTED].items(), key=lambda item: int(item[0]))
        return [_token({**token}, _LISTED) for _, token in by_id]
    missing = sorted((token_id, text) for text, token_id in legacy_ids.items() if text not in known)
    return [AddedToken(text, normalized=True, special=False) for _, text in missing]


def _token(token: Any, key: str) -> AddedToken:
    """A token that is given by its text, or as an object with its flags."""
    if isinstance(token, Mapping) and isinstance(token.get("content"), str):
        return AddedToken(**{name: value for name, value in token.items() if name != "__type"})
    if not isinstance(token, str):
        raise ValueError(f"{key} is {token!r}, not a token")
    return AddedToken(token, special=True, normalized=False)
