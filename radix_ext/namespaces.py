"""Radix namespaces: what keeps chunk KV, blended KV and exact KV, models and tenants apart.

A namespace is a cache salt; SGLang's tree never matches across two. The client's own salt comes last
in each of ours and may not begin like one (request.check_salt), so no client can name another's.

    exact      <client salt>                          prompts as stock SGLang caches them
    chunks     sgl-blend:c:<model>:<client salt>      [build prefix][chunk], built alone
    rounded    sgl-blend:q:<model>:<client salt>      the same paths as storage holds them, in few bits
    blended    sgl-blend:b:<model>:<how>:<client salt>    prompts whose KV was blended
    probes     sgl-blend:p:<model>:<client salt>      chunks after made-up texts, their lower layers
    shadows    sgl-blend:s:<model>:<client salt>      full prefills after a change of weights
    rejected   sgl-blend:r:<client salt>              malformed requests that passed the gate
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NewType

from sgl_blend.protocol.request import RESERVED_SALT

ModelFingerprint = NewType("ModelFingerprint", str)
"""Digest of everything that decides what a model's KV bytes mean."""


def fingerprint(description: str) -> ModelFingerprint:
    """Digest a description of the model: weights, architecture, dtypes, rotation."""
    return ModelFingerprint(hashlib.sha256(description.encode()).hexdigest()[:16])


_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Entries of a model's configuration that say nothing about the model."""


def architecture(hf_config: Mapping[str, Any]) -> str:
    """Digest a model's configuration, the same wherever the model lies and however it is loaded."""
    known = {name: value for name, value in hf_config.items() if name not in _VOLATILE}
    text = json.dumps(known, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def chunk_salt(model: ModelFingerprint, client_salt: str | None) -> str:
    """Name the namespace in which a client's chunks are stored."""
    return f"{RESERVED_SALT}c:{model}:{client_salt or ''}"


def blend_salt(
    model: ModelFingerprint,
    client_salt: str | None,
    *,
    policy: str,
    ratio: float,
    check_layer: int,
    serial: int | None,
) -> str:
    """Name the namespace of requests blended in one way.

    Args:
        model: The model's fingerprint.
        client_salt: The client's own salt.
        policy: Selection policy.
        ratio: Recompute ratio.
        check_layer: Layer at which tokens are selected.
        serial: A number that no other request has, to share with nobody; None to share.
    """
    how = f"{policy}:{ratio!r}:{check_layer}:{'' if serial is None else serial}"
    return f"{RESERVED_SALT}b:{model}:{how}:{client_salt or ''}"


def rounded_salt_of(chunk_salt: str) -> str:
    """Name the namespace for rounded KV of the chunks of a namespace.

    Nothing is built there, nothing of it is written to storage, and none of it counts as exact.
    """
    return chunk_salt.replace(f"{RESERVED_SALT}c:", f"{RESERVED_SALT}q:", 1)


def probe_salt_of(chunk_salt: str) -> str:
    """Name the probes' namespace that belongs to a namespace of chunks, rounded or not."""
    rest = chunk_salt.removeprefix(f"{RESERVED_SALT}c:").removeprefix(f"{RESERVED_SALT}q:")
    return f"{RESERVED_SALT}p:{rest}"


def is_probe(salt: str | None) -> bool:
    """Tell whether a namespace holds probes."""
    return salt is not None and salt.startswith(f"{RESERVED_SALT}p:")


def is_blended(salt: str | None) -> bool:
    """Tell whether a namespace holds blended prompts."""
    return salt is not None and salt.startswith(f"{RESERVED_SALT}b:")


def may_leave_server(salt: str | None, model: ModelFingerprint) -> bool:
    """Tell whether KV of a namespace is of use to other servers: exact prompts, and a model's chunks.

    A blended prompt is made again out of chunks, and what else is ours is never asked for.
    """
    return not (salt or "").startswith(RESERVED_SALT) or is_chunk_of(salt, model)


def is_chunk_of(salt: str | None, model: ModelFingerprint) -> bool:
    """Tell whether a namespace holds chunks of a model."""
    return salt is not None and salt.startswith(f"{RESERVED_SALT}c:{model}:")


def is_built_by(salt: str, model: ModelFingerprint) -> bool:
    """Tell whether a namespace holds what a model builds: its chunks, or probes of them."""
    return salt.startswith((f"{RESERVED_SALT}c:{model}:", f"{RESERVED_SALT}p:{model}:"))


def shadow_salt(model: ModelFingerprint, client_salt: str | None) -> str:
    """Name the namespace of full prefills by weights that the exact namespace may not be of."""
    return f"{RESERVED_SALT}s:{model}:{client_salt or ''}"


def rejected_salt(client_salt: str | None) -> str:
    """Name the namespace of malformed requests; its client salt may be one of ours."""
    return f"{RESERVED_SALT}r:{client_salt or ''}"
